"""Protection of training data in messages: small classes, noise, differential privacy, masked sums."""
