"""Protection of training data in messages: noise, differential privacy, masked sums."""
