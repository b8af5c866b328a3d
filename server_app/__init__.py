"""The server: who takes part, the rounds, the server half of every algorithm, and what a run leaves behind."""
