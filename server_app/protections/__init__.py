"""Protections stand between the clients' uploads and the algorithm that merges them.

`server_app/round.py` calls them. Each takes ``(uploads, federation, result)`` and returns the
uploads that may go on; the result notes whom it refused or cut, and why. Secure aggregation unmasks
its sum among them. `server_app/replies.py` checks a single reply.
"""
