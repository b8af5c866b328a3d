"""Finding the sites, and exchanging messages with them."""
