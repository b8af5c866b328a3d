"""What a server remembers of clients and classes that a round lacks, by hand."""

from types import SimpleNamespace

import torch

from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.protections.bounds import Bounds
from server_app.replies import Upload
from server_app.strategies.fedpcl import FedPCL
from server_app.strategies.fedplvm import FedPLVM
from server_app.strategies.fedsa import FedSA


def upload(site: str, rows: dict[int, list[float]], counts: bool, weights: dict[str, torch.Tensor] | None) -> Upload:
    labels, means = torch.tensor(list(rows)), torch.tensor(list(rows.values()))
    sent = Prototypes(means, labels, torch.ones_like(labels) if counts else None)
    return Upload(site, Payload(prototypes=sent, weights=weights), Report(1, 10, 5))


def test_fedpcl_hands_on_the_last_set_of_a_client_that_was_not_asked() -> None:
    settings = Settings.from_run_config(default_run_config() | {"algo": "fedpcl", "feature-dim": 2})
    card = SimpleNamespace(classes=("a", "b"))
    server = FedPCL(SimpleNamespace(settings=settings, reference=card, bounds=Bounds()))  # type: ignore[arg-type]
    server.merge([upload("site-0", {0: [1.0, 0.0]}, True, None), upload("site-1", {1: [0.0, 1.0]}, True, None)])
    server.merge([upload("site-1", {1: [0.0, 3.0]}, True, None)])
    down = server.payload_down()
    everybody = down.vectors()
    assert everybody.means.tolist() == [[1.0, 0.0], [0.0, 3.0]], "class 0, which nobody sent, stays"
    first, second = down.sets("local_sets")
    assert first.means.tolist() == [[1.0, 0.0], [0.0, 3.0]], "its own class 0, completed by the global class 1"
    assert second.means.tolist() == [[1.0, 0.0], [0.0, 3.0]]


def test_fedplvm_keeps_the_prototypes_of_a_class_that_nobody_sent() -> None:
    config = {"algo": "fedplvm", "feature-dim": 2, "models": "mlp-1"}
    settings = Settings.from_run_config(default_run_config() | config)
    card = SimpleNamespace(classes=("a", "b"), arch="mlp-1", input_shape=(3,))
    server = FedPLVM(SimpleNamespace(settings=settings, reference=card, bounds=Bounds()))  # type: ignore[arg-type]
    weights = server.weights
    server.merge([upload("site-0", {0: [1.0, 0.0], 1: [0.0, 1.0]}, False, weights)])
    server.merge([upload("site-0", {1: [0.0, 5.0]}, False, weights)])
    kept = server.global_prototypes
    assert dict(zip(kept.labels.tolist(), kept.means.tolist(), strict=True)) == {0: [1.0, 0.0], 1: [0.0, 5.0]}


def test_fedsas_anchor_of_a_class_that_nobody_sent_stays_where_it_is() -> None:
    config = {"algo": "fedsa", "feature-dim": 2, "fedsa.smoothing": 0.5}
    settings = Settings.from_run_config(default_run_config() | config)
    card = SimpleNamespace(classes=("a", "b"))
    server = FedSA(SimpleNamespace(settings=settings, reference=card, bounds=Bounds()))  # type: ignore[arg-type]
    server.merge([upload("site-0", {0: [8.0, 0.0], 1: [0.0, 8.0]}, False, None)])
    before = server.anchors_CD.clone()
    server.merge([upload("site-0", {1: [0.0, 8.0]}, False, None)])
    assert server.anchors_CD[0].equal(before[0])
    assert server.anchors_CD[1].tolist() == [before[1, 0] / 2, before[1, 1] / 2 + 4]
