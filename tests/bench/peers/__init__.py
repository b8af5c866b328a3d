"""One federated job in several engines, each in an environment of its own: `compare` runs them."""
