"""Replies that come after their round has closed (``late``).

Over a network they come when they come. Among simulated clients, which all answer at once, the
server holds back those of slow ones (``slow-rate``) for ``slow-factor`` rounds, so that a run
repeats; a checkpoint has what is held back.
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
    """What has come of earlier rounds, and what is held back of slow clients."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.arrived: dict[str, LateReply] = {}  # Site -> its last late reply, not yet taken
        self.held: dict[str, dict[str, Tensor]] = dictionary_in(federation.start.state, "held")
        """Simulated client -> the round, and the bytes of its reply."""

    def note(self, site: str, message: Message, reply: Message) -> None:
        """Take in the reply to an earlier message, if that asked for training and it may count."""
        may_count = self.federation.settings.federation.late_replies_count
        if not may_count or message.metadata.message_type != MessageType.TRAIN:
            return
        number = int(message.metadata.group_id)
        known = self.arrived.get(site)
        if known is None or known.round < number:
            self.arrived[site] = LateReply(number, reply.content)

    def take(self, number: int) -> dict[str, LateReply]:
        """Return each reply that has come by round ``number`` and was not taken yet, by site."""
        slow_factor = self.federation.settings.federation.slow_factor
        for site, held in list(self.held.items()):
            asked_in = int(held["round"])
            if number >= asked_in + slow_factor:
                content = bytes(held["content"].numpy())
                read = recorddict_from_proto(recorddict_pb2.RecordDict.FromString(content))
                self.arrived[site] = LateReply(asked_in, read)
                del self.held[site]
        taken = {site: self.arrived[site] for site in in_order(self.arrived)}
        self.arrived = {}
        return taken

    def hold_back(self, number: int, replies: Mapping[str, Message]) -> dict[str, Message]:
        """Return the replies of a round without those of slow clients, which come later."""
        in_time = {}
        slow = self._slow_clients()
        for site, reply in replies.items():
            if site not in slow or reply.has_error():
                in_time[site] = reply
                continue
            content = bytearray(recorddict_to_proto(reply.content).SerializeToString())
            self.held[site] = {
                "round": torch.tensor(number),
                "content": torch.frombuffer(content, dtype=torch.uint8),
            }
        return in_time

    def _slow_clients(self) -> set[str]:
        federation = self.federation
        settings = federation.settings
        taking_part = federation.cards.keys() - federation.new_clients
        return slow_clients(taking_part, settings.federation.slow_rate, settings.run.seed)

    def present_state(self) -> dict[str, Tensor]:
        """What is held back, for a checkpoint."""
        return tensors_of(self, ("held",))
