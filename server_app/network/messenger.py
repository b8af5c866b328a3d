"""The messages of one round: what all of them carry, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict

from protofl_common.basics.text import printable
from protofl_common.wire.payloads import payload_bytes
from protofl_common.wire.records import Instructions, pack_baseline, pack_instructions
from server_app.network.membership import Federation
from server_app.result import RoundResult

Records = Mapping[str, Any]
"""Records of a message, by name."""
Send = Callable[[Mapping[str, Message], float], dict[str, Message]]
"""(message of each site, timeout in seconds) -> the replies that came, by site."""


@dataclass(frozen=True)
class Messenger:
    """Asks the sites of a round, or of the final evaluation."""

    federation: Federation
    run_name: str
    send: Send
    result: RoundResult
    """Takes the bytes, and the errors of sites that could not do their work."""
    evaluate: bool
    """Whether the sites are to evaluate what they receive."""

    def ask(self, kind: str, contents: Mapping[str, Records], stage: str = "") -> dict[str, RecordDict]:
        """Send each site its records, and return what its reply holds; ``stage``: what an error came in."""
        federation, result = self.federation, self.result
        instructions = Instructions(result.number, self.run_name, self.evaluate, federation.run_history)
        common = {"round": pack_instructions(instructions), **pack_baseline(federation.baseline)}
        messages, answers = dict[str, Message](), dict[str, RecordDict]()
        for site, records in contents.items():
            content = RecordDict({**records, **common})
            result.bytes_down += payload_bytes(content)
            messages[site] = Message(content, federation.node_of[site], kind, group_id=str(result.number))
        for site, reply in self.send(messages, federation.settings.federation.round_timeout).items():
            if reply.has_error():
                result.failed[site] = stage + printable(str(reply.error.reason))
            else:
                result.bytes_up += payload_bytes(reply.content)
                answers[site] = reply.content
        return answers
