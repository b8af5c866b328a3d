"""Merge nothing of too few: the result would be close to single uploads."""

from server_app.protections.base import Accepted
from server_app.run.replies import Upload
from server_app.strategies.base import Strategy


def enough_replies(uploads: list[Upload], strategy: Strategy) -> Accepted:
    """Make a round void that has fewer valid replies than ``min-replies``."""
    fewest = strategy.federation.fewest_replies
    replies = sum(upload.clients for upload in uploads)  # a secure sum is one upload of many
    if replies >= fewest:
        return Accepted(uploads)
    return Accepted([], why_void=f"{replies} valid replies, fewer than min-replies = {fewest}")
