"""What a server remembers of clients and classes that a round lacks, by hand."""

import torch

from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.replies import Upload
from tests.support.fakes import server_of


def upload(site: str, rows: dict[int, list[float]], counts: bool, weights: dict[str, torch.Tensor] | None) -> Upload:
    labels, means = torch.tensor(list(rows)), torch.tensor(list(rows.values()))
    sent = Prototypes(means, labels, torch.ones_like(labels) if counts else None)
    return Upload(site, Payload(prototypes=sent, weights=weights), Report(1, 10, 5))


def test_fedpcl_hands_on_the_last_set_of_a_client_that_was_not_asked() -> None:
    server = server_of("fedpcl")
    server.merge([upload("site-0", {0: [1.0, 0.0]}, True, None), upload("site-1", {1: [0.0, 1.0]}, True, None)])
    server.merge([upload("site-1", {1: [0.0, 3.0]}, True, None)])
    down = server.payload_down()
    everybody = down.vectors()
    assert everybody.means.tolist() == [[1.0, 0.0], [0.0, 3.0]], "class 0, which nobody sent, stays"
    first, second = down.sets("local_sets")
    assert first.means.tolist() == [[1.0, 0.0], [0.0, 3.0]], "its own class 0, completed by the global class 1"
    assert second.means.tolist() == [[1.0, 0.0], [0.0, 3.0]]


def test_fedplvm_keeps_the_prototypes_of_a_class_that_nobody_sent() -> None:
    server = server_of("fedplvm")
    weights = server.weights
    server.merge([upload("site-0", {0: [1.0, 0.0], 1: [0.0, 1.0]}, False, weights)])
    server.merge([upload("site-0", {1: [0.0, 5.0]}, False, weights)])
    kept = server.global_prototypes
    assert dict(zip(kept.labels.tolist(), kept.means.tolist(), strict=True)) == {0: [1.0, 0.0], 1: [0.0, 5.0]}


def test_fedsas_anchor_of_a_class_that_nobody_sent_stays_where_it_is() -> None:
    server = server_of("fedsa", fedsa__smoothing=0.5)
    server.merge([upload("site-0", {0: [8.0, 0.0], 1: [0.0, 8.0]}, False, None)])
    before = server.anchors_CD.clone()
    server.merge([upload("site-0", {1: [0.0, 8.0]}, False, None)])
    assert server.anchors_CD[0].equal(before[0])
    assert server.anchors_CD[1].tolist() == [before[1, 0] / 2, before[1, 1] / 2 + 4]
