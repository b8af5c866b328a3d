"""ProtoFed: Eq. 3's plain mean of what the clients' models make of their data."""

import pytest

from tests.support import plain
from tests.support.declaration import PLAIN, Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(PLAIN, weights=True, acts={"prototypes": "every-round"})


@pytest.mark.parametrize(
    ("when", "rounds"), [("last-round", ["3"]), ("every-round", ["1", "2", "3"])]
)
def test_prototypes_travel_when_it_is_time_and_without_counts(when, rounds, tmp_path):
    """``rounds`` of three: the last one, or every one."""
    config = run_config(tmp_path, algo="protofed", protofed__prototypes=when, rounds=3)
    outcome = run_federation(config, clients=2)
    with_prototypes = set()
    for message, reply in outcome.exchanged():
        if "prototypes" in reply.content:
            with_prototypes.add(message.metadata.group_id)
            assert set(reply.content["prototypes"]) == {"means", "labels"}

    assert sorted(with_prototypes) == rounds
    assert "prototype" in outcome.summary["accuracy"]
    assert ("prototype" in outcome.rows[1]["accuracy"]) == (when == "every-round")


def test_global_prototypes_are_the_plain_mean_of_equation_3(tmp_path):
    """A client's class means are taken with the model that it sent, after training."""
    few = {"partition": "pathological", "classes_per_client": 4, "rounds": 1}
    outcome, clients = plain.side_by_side(
        tmp_path, plain.PlainClient, "cnn4", algo="protofed", **few
    )
    for client, (_, reply) in zip(clients, outcome.exchanged(), strict=True):
        client.model.load_state_dict(plain.tensors(reply.content["weights"]))

    of_classes = plain.by_class(client.class_means() for client in clients)
    wanted = {label: sum(means) / len(means) for label, means in of_classes.items()}
    plain.assert_prototypes_left(outcome, wanted, rtol=1e-4, atol=1e-5)
