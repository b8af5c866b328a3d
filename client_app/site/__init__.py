"""The client as its operator knows it: who it is, its data and model, its files, what it keeps."""
