"""Training at the server, for the algorithms whose server half has a network of its own."""
