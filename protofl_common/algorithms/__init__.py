"""The algorithms: a file for each, with its row and its hyper-parameters."""
