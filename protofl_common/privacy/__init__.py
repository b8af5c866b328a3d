"""What protects training data in the messages of a client: small classes, noise, differential privacy, secure sums."""
