"""Privacy beyond "the data stay at home": the mathematics, for both sides."""
