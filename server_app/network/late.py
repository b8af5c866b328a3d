"""Replies that come after their round has closed (``late``).

Simulated clients all answer at once, so the server holds back the replies of slow ones
(``slow-rate``) for ``slow-factor`` rounds: such a run repeats exactly. Checkpoints contain what is
held back.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.app import Message, MessageType, RecordDict
from torch import Tensor

from protofl_common.basics.text import in_order
from protofl_common.flower import recorddict_from_proto, recorddict_pb2, recorddict_to_proto
from protofl_common.runs.attributes import dictionary_in, tensors_of
from server_app.network.admission import slow_clients
from server_app.network.membership import Federation


@dataclass(frozen=True)
class LateReply:
    """A client's reply to the training message of an earlier round, not yet checked."""

    round: int
    content: RecordDict


class LateReplies:
    """The late replies that have come, and those that are held back of slow simulated clients."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.arrived: dict[str, LateReply] = {}  # Site -> its last late reply, not yet taken
        self.held: dict[str, dict[str, Tensor]] = dictionary_in(federation.start.state, "held")
        """Simulated client -> the round, and the bytes of its reply."""

    def note(self, site: str, message: Message, reply: Message) -> None:
        """Keep a reply to a training message for `take`, if late replies count (``late``).

        Of several replies of a site only that to the newest round is kept.
        """
        may_count = self.federation.settings.federation.late_replies_count
        if not may_count or message.metadata.message_type != MessageType.TRAIN:
            return
        number = int(message.metadata.group_id)  # the round that it was sent in
        earlier = self.arrived.get(site)
        if earlier is None or earlier.round < number:
            self.arrived[site] = LateReply(number, reply.content)

    def take(self, number: int) -> dict[str, LateReply]:
        """Return the late replies that have come by round ``number``, by site, and forget them.

        Those held back for ``slow-factor`` rounds are among them.
        """
        slow_factor = self.federation.settings.federation.slow_factor
        for site, held in list(self.held.items()):
            asked_in = int(held["round"])
            if number >= asked_in + slow_factor:
                packed = bytes(held["content"].numpy())
                content = recorddict_from_proto(recorddict_pb2.RecordDict.FromString(packed))
                self.arrived[site] = LateReply(asked_in, content)
                del self.held[site]
        taken = {site: self.arrived[site] for site in in_order(self.arrived)}
        self.arrived = {}
        return taken

    def hold_back(self, number: int, replies: Mapping[str, Message]) -> dict[str, Message]:
        """Hold back a round's replies of slow clients for later rounds, and return the others.

        Errors are never held back.
        """
        in_time = {}
        slow = self._slow_clients()
        for site, reply in replies.items():
            if site not in slow or reply.has_error():
                in_time[site] = reply
                continue
            # a checkpoint takes tensors only; `frombuffer` needs a buffer that may be written to
            packed = bytearray(recorddict_to_proto(reply.content).SerializeToString())
            self.held[site] = {
                "round": torch.tensor(number),
                "content": torch.frombuffer(packed, dtype=torch.uint8),
            }
        return in_time

    def _slow_clients(self) -> set[str]:
        federation = self.federation
        settings = federation.settings
        taking_part = federation.cards.keys() - federation.new_clients
        return slow_clients(taking_part, settings.federation.slow_rate, settings.run.seed)

    def present_state(self) -> dict[str, Tensor]:
        """Return what is held back as tensors, for a checkpoint."""
        return tensors_of(self, ("held",))
