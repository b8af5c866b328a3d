"""FedDistill's server by hand: who teaches whom, with absent clients and classes that one client alone holds."""

import pytest
import torch

from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.replies import Upload
from server_app.strategies.feddistill import FedDistill
from tests.support.fakes import server_of


def upload(site: str, rows: dict[int, list[float]]) -> Upload:
    sent = Prototypes(torch.tensor(list(rows.values())), torch.tensor(list(rows)))
    return Upload(site, Payload(outputs=sent), Report(1, 10, 5))


def teacher(server: FedDistill, site: str) -> dict[int, list[float]] | None:
    sent = server.payload_for(site, server.payload_down()).vectors("outputs")
    return None if sent is None else dict(zip(sent.labels.tolist(), sent.means.tolist(), strict=True))


def test_the_others_teach() -> None:
    server = server_of("feddistill", feddistill__outputs="probabilities")
    assert teacher(server, "site-0") is None
    server.merge([upload("site-0", {0: [1.0, 0.0], 1: [0.25, 0.75]})])
    assert teacher(server, "site-0") is None, "nobody else has sent anything"
    server.merge([upload("site-1", {0: [0.5, 0.5]}), upload("site-2", {0: [0.0, 1.0]})])
    assert teacher(server, "site-0") == {0: [0.25, 0.75]}, "class 1 is its own alone"
    assert teacher(server, "site-1") == {0: [0.5, 0.5], 1: [0.25, 0.75]}, "site-0 was not asked, and still teaches"
    assert teacher(server, "new") == {0: [pytest.approx(0.5)] * 2, 1: [0.25, 0.75]}
    restored = server_of("feddistill", feddistill__outputs="probabilities")
    restored.restore(server.present_state())
    assert teacher(restored, "site-1") == teacher(server, "site-1")


def test_with_logits_all_teach_all() -> None:
    server = server_of("feddistill", feddistill__outputs="logits")
    server.merge([upload("site-0", {0: [3.0, -1.0]}), upload("site-1", {0: [5.0, -3.0], 1: [0.0, 8.0]})])
    assert teacher(server, "site-0") == teacher(server, "site-1") == {0: [4.0, -2.0], 1: [0.0, 8.0]}
