"""Merge nothing of too few: the result would be close to single uploads."""

from server_app.protections.base import Accepted, View
from server_app.run.replies import Upload


def enough_replies(uploads: list[Upload], view: View) -> Accepted:
    """Make a round void that has fewer valid replies than ``min-replies``."""
    fewest = view.fewest_replies
    replies = sum(upload.clients for upload in uploads)  # a secure sum is one upload of many
    if replies >= fewest:
        return Accepted(uploads)
    return Accepted([], why_void=f"{replies} valid replies, fewer than min-replies = {fewest}")
