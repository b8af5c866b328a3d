"""The client: its data, private model, local training, and the client half of every algorithm."""
