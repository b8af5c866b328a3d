"""The server: who takes part, the rounds, and what a run leaves behind.

Each algorithm has its server half in `strategies`.
"""
