"""A flow asks a round's sites in steps: a generator that yields questions and is sent the replies.

A plain round is a flow of one step, `uploads_of`; a secure sum is one of four
(`protections/secure_sum.py`). `MessageExchange.run` drives any flow, and knows no step by name.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import MessageType, RecordDict

from protofl_common.wire.records import SiteCard
from protofl_common.wire.schema import RefusedMessage
from server_app.run.replies import Exchanged, Records, ReplyReader, Upload

Replies = Mapping[str, RecordDict]
"""Site -> what its reply has."""


@dataclass(frozen=True)
class Question:
    """One message to each of some sites."""

    kind: str  # Flower's type of message
    contents: Mapping[str, Records]  # Site -> records, beside those that say which round it is
    stage: str = ""  # Name of the step, which stands before the reason of a site that fails
    largest: int = 0  # The most bytes that the arrays of a valid reply have


Flow = Generator[Question, Replies, list[Upload]]


@dataclass(frozen=True)
class UploadRequest:
    """What a round, or the final evaluation, asks of its sites, and how replies are read."""

    exchanged: Exchanged  # Into which reports and refusals are put
    sites: Sequence[str]
    cards: Mapping[str, SiteCard]
    contents: Callable[[Sequence[str]], Mapping[str, Records]]
    """Sites -> the records for each; those that receive the same have the same object."""
    about: Records  # Further records of every message of the round
    reader: ReplyReader
    at_once: int  # How many sites are asked at a time

    def question(self, contents: Mapping[str, Records], reader: ReplyReader) -> Question:
        kind = MessageType.EVALUATE if self.exchanged.final else MessageType.TRAIN
        return Question(kind, contents, largest=reader.largest)

    def read(self, replies: Replies, reader: ReplyReader) -> list[Upload]:
        """Return the valid uploads.

        Their reports, and the reasons why other replies are refused, are put into `exchanged`.
        """
        uploads: list[Upload] = []
        for site, content in replies.items():
            try:
                upload = reader.read(content, self.cards[site])
            except RefusedMessage as refusal:
                self.exchanged.refused[site] = str(refusal)
                continue
            uploads.append(upload)
            self.exchanged.reports[site] = upload.report
        return uploads


def uploads_of(request: UploadRequest) -> Flow:
    """Ask each site for its upload, `at_once` sites at a time, and return the valid uploads."""
    uploads: list[Upload] = []
    if not request.sites:  # an empty question lets the exchange wait for late replies
        yield request.question({}, request.reader)
    for start in range(0, len(request.sites), request.at_once):
        sites = request.sites[start : start + request.at_once]
        replies = yield request.question(request.contents(sites), request.reader)
        uploads += request.read(replies, request.reader)
        del replies  # frees their memory before the next are asked
    return uploads


AskForUploads = Callable[[UploadRequest], Flow]
"""`uploads_of`, or `SecureSums.flow`, which returns one upload: the mean of all."""
