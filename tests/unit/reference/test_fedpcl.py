"""FedPCL, three rounds: contrast, prototypes, padding and inference written again from the equations."""

from pathlib import Path

import pytest

from protofl_common.experiment.settings import Settings
from tests.support.declaration import COUNTED, Declared
from tests.support.harness import run_config, run_federation
from tests.support.plain import CLIENTS, assert_prototypes_left, class_averages
from tests.support.plain_fedpcl import FedPCLClient, Table

DECLARED = Declared(
    COUNTED,
    losses=("contrast", "global", "local", "cross-entropy", "prototype"),
    minimised=("global", "local"),  # the others are ablations
    acts={"temperature": 0.5, "prototypes": "global", "loss": "ce-protodist", "denominator": "all"},
)


@pytest.mark.parametrize("alpha", [0.3, 100.0])
def test_three_rounds_equal_an_independent_script(alpha: float, tmp_path: Path) -> None:
    config = run_config(tmp_path, algo="fedpcl", rounds=3, feature_dim=16, lr=0.01)
    config |= {"partition": "feature-label-shift", "alpha": alpha, "train-samples": 40}
    outcome = run_federation(config, clients=CLIENTS)

    clients = [FedPCLClient(Settings.from_run_config(config), index) for index in range(CLIENTS)]
    labels, overall = [client.y for client in clients], Table()
    sets: list[Table] = []
    for number in (1, 2, 3):
        for client in clients:
            client.train(number, overall, sets)
        own = [client.prototypes() for client in clients]
        counts = [{c: (mean, y.count(c)) for c, mean in one.items()} for y, one in zip(labels, own, strict=True)]
        overall = class_averages(counts)  # Eq. 6 without its further 1/|N_j|
        sets = [overall | one for one in own]  # Eq. 7

    assert_prototypes_left(outcome, overall)
    for client in clients:
        reported = outcome.summary["accuracy-of-clients"][client.name]
        assert set(reported) == {"prototype"}
        one = 1.01 / len(client.y_test)  # a borderline sample may fall to the other side
        assert reported["prototype"] == pytest.approx(client.accuracy(), abs=one)
