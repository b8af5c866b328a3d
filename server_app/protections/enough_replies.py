"""Merge nothing of too few: the result would be close to single uploads."""

from collections.abc import Sequence

from server_app.protections.base import Accepted, Protection, View
from server_app.replies import Upload


class EnoughReplies(Protection):
    """Make a round void that has fewer valid replies than ``min-replies``."""

    def acts(self, view: View) -> bool:
        return True

    def accept(self, uploads: list[Upload], view: View) -> Accepted:
        why_void = why_too_few(uploads, view.least_replies)
        return Accepted([] if why_void else uploads, why_void=why_void)


def why_too_few(uploads: Sequence[Upload], least: int) -> str:
    """Return why the uploads are too few; "" where they are enough. A sum stands for several."""
    replies = sum(upload.clients for upload in uploads)
    if replies >= least:
        return ""
    return f"{replies} valid replies, fewer than min-replies = {least}"
