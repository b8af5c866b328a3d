"""The client: its data, its private model, local training, and the client half of every algorithm."""
