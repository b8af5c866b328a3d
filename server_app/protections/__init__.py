"""Protections stand between the clients' uploads and the algorithm that merges them, a file each.

Each has one hook, ``accept(uploads, federation, result)``: it returns the uploads that may go on, and notes in the
result whom it refused or cut, and why. `server_app/round.py` calls them in this order:

    outliers      refuses what is out of all proportion to the others of the round
    samples       lets no client weigh as many times the samples of the others
    secure_sum    secure aggregation: unmasks the sum, where the server learns no more
    vote          leaves out the prototypes that are least like the others

How far each goes stands in `bounds.py`. A reply of its own, whatever the others send, `server_app/replies.py` checks.
"""
