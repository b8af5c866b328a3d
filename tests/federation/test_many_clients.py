"""What must not grow with the number of clients and rounds.

Memory, files written again, models built to be counted.
"""

from typing import Any

import pytest
import torch

from client_app import introduction
from protofl_common.basics.tensorfile import read_tensors
from server_app import round as rounds
from server_app.callbacks import artifacts
from server_app.callbacks.base import ActiveRun
from server_app.network import membership
from server_app.network.admission import FederationError, must_agree
from tests.support.harness import federate, run_config, run_federation
from tests.support.plain import assert_equal
from tests.support.results import without_times

SMALL = {
    "dataset": "digits",
    "partition": "iid",
    "train_samples": 10,
    "test_samples": 10,
}


SITES = ["site-0", "site-1", "site-2"]


def noting(monkeypatch, place, name, argument):
    """Let a function of a module note the values of one of its arguments, by its position.

    Return the list that they are noted in.
    """
    function = getattr(place, name)
    values = []

    def noted(*arguments):
        values.append(arguments[argument])
        return function(*arguments)

    monkeypatch.setattr(place, name, noted)
    return values


def test_many_are_asked_in_turns_and_nothing_grows_with_them(tmp_path, monkeypatch):
    """Introductions and the final evaluation go to two of three clients at a time.

    Prototypes of single clients are written in every other round and at the end. The run leaves
    what an ordinary one leaves, and the server's memory keeps no rows of clients.
    """
    at_once = federate(tmp_path / "few", clients=3, rounds=3, **SMALL)

    monkeypatch.setattr(rounds, "SITES_AT_ONCE", 2)
    monkeypatch.setattr(membership, "SITES_AT_ONCE", 2)
    monkeypatch.setattr(artifacts, "MOST_VECTORS_EACH_ROUND", 0)
    monkeypatch.setattr(artifacts, "ROUNDS_BETWEEN_WRITES", 2)
    runs = []

    def remembered(*arguments):
        run = ActiveRun(*arguments)
        runs.append(run)
        return run

    monkeypatch.setattr("server_app.app.ActiveRun", remembered)
    asked = noting(monkeypatch, rounds, "_contents", argument=1)  # the sites
    introduced = noting(monkeypatch, membership, "push_each", argument=1)  # the messages
    rounds_written = noting(monkeypatch, artifacts, "_write_owned", argument=3)  # the round
    in_turns = federate(tmp_path / "many", clients=3, rounds=3, **SMALL)

    assert [len(messages) for messages in introduced] == [2, 1]
    # three rounds, and the final evaluation in two turns
    assert [list(sites) for sites in asked] == [SITES, SITES, SITES, SITES[:2], SITES[2:]]
    assert rounds_written == [2, 3]
    assert without_times(in_turns.rows) == without_times(at_once.rows)
    (run,) = runs
    assert [row["clients"] for row in run.rows] == [{}, {}, {}, {}]
    assert [len(row["clients"]) for row in in_turns.rows] == [3, 3, 3, 3]

    cpu = torch.device("cpu")
    found_tensors, found_facts = read_tensors(
        in_turns.folder / "client-prototypes.safetensors", cpu
    )
    tensors, facts = read_tensors(at_once.folder / "client-prototypes.safetensors", cpu)

    assert found_facts == facts
    assert_equal(found_tensors, tensors)


def test_introductions_build_a_model_of_each_kind_once(tmp_path, monkeypatch):
    """A model is built to learn if it works, once for all clients with the same architecture."""

    def cards(folder):
        """Make a run of four clients, and return how they introduce themselves."""
        config = run_config(tmp_path / folder, algo="fedavg", rounds=1, models="cnn4", **SMALL)
        outcome = run_federation(config, clients=4)
        return [reply.content["site"] for _, reply in outcome.exchanged("query")]

    class KnowsNothing(dict[Any, Any]):
        """Forgets at once what it is told, so that every client's model is built."""

        def __contains__(self, key):
            return False

    checked = noting(monkeypatch, introduction, "check_model", argument=1)  # the architecture
    monkeypatch.setattr(introduction, "_KNOWN_MODELS", {})
    found = cards("once")

    assert checked == ["cnn4"]

    monkeypatch.setattr(introduction, "_KNOWN_MODELS", KnowsNothing())
    assert cards("each") == found
    assert len(checked) == 1 + 4  # the one before, and one for each of four clients


def test_what_one_site_says_of_itself_does_not_flood_the_servers_log():
    """South names 100,000 classes; the error about classes that differ stays short."""
    said = {"north": "a, b", "south": ", ".join(map(str, range(100_000)))}
    with pytest.raises(FederationError) as error:
        must_agree("classes", said, str, "set `classes`")
    assert "north" in str(error.value)
    assert len(str(error.value)) < 2000
