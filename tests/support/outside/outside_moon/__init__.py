"""A package of somebody else's: its own method, network and data."""
