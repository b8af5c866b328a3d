"""Limits and checks of replies from clients."""
