"""What a run and its rounds are made of: questions, replies, bounds, checkpoints, the log.

The other rooms of the server import it; it imports none of them.
"""
