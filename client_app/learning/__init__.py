"""How a model learns: samples, the training loop, evaluation. Nothing here knows of messages."""
