"""The mathematics: prototypes, aggregation, clustering and losses; no Flower, no settings."""
