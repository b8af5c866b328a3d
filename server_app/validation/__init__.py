"""What is accepted from a client."""
