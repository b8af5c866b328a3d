"""The client's private files: which state counts, how many are kept, atomicity, clear errors."""

import errno

import pytest
import torch

from client_app.site.record import StateError
from client_app.site.state import LostStateError, StateFolder
from protofl_common.basics.run_history import RunHistory
from tests.support.accidents import flip_a_bit

CPU = torch.device("cpu")
FIRST = RunHistory(11)


def state_after(round_number=3):
    """Return the arguments of `StateFolder.save`: round, architecture, and tensors.

    All weights are the round's number, so that a test can tell which state it has.
    """
    model = {"model/w": torch.full((3, 2), float(round_number)), "model/n": torch.tensor(4)}
    return round_number, "cnn4", {**model, "optimizer/0.m": torch.ones(2)}


def states_of(path, run_history=FIRST, wary=False):
    """Return the states of site-1 below ``path``; a real site is ``wary``, a simulated one not."""
    return StateFolder(path, "site-1", run_history, is_site=wary)


def save_after_rounds(states, *rounds):
    """Save a state after each of these rounds; return the folder of states, for a short line."""
    for number in rounds:
        states.save(*state_after(number))
    return states


def round_started_from(states, before):
    """Return the round whose state a client would start from in round ``before``."""
    tensors, number = states.load(before, "cnn4", CPU)
    assert float(tensors["model/w"][0, 0]) == number
    return number


def names(path):
    return sorted(file.name for file in (path / "site-1").iterdir())


def test_a_state_comes_back_as_it_was_saved(tmp_path):
    """Before round 4 the newest is that of round 3; the file's name has the Flower run, 11."""
    states = states_of(tmp_path / "new" / "folder")

    assert states.load(4, "cnn4", CPU) is None

    saved_round, arch, wanted = state_after(round_number=3)
    states.save(saved_round, arch, wanted)
    tensors, number = states.load(4, "cnn4", CPU)

    assert number == 3
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(tensors[name], value)
    assert names(tmp_path / "new" / "folder") == ["000003-11.safetensors"]


def test_a_round_starts_from_the_last_state_before_it(tmp_path):
    states = save_after_rounds(states_of(tmp_path), 2, 5)

    assert round_started_from(states, before=6) == 5
    for before in (5, 4, 3):
        assert round_started_from(states, before) == 2
    assert states.load(2, "cnn4", CPU) is None

    of_another_run = states_of(tmp_path, RunHistory(12))
    assert of_another_run.load(9, "cnn4", CPU) is None


@pytest.mark.parametrize("wary", [False, True])
def test_three_states_are_kept_and_half_a_one_of_a_killed_client_goes(wary, tmp_path):
    """The half one is a temporary file. A real site (``wary``) keeps as many of its states."""
    states = save_after_rounds(StateFolder(tmp_path, "site-1", FIRST, is_site=wary), 1)
    (tmp_path / "site-1" / "000002-11.safetensors.77.tmp" / "half").mkdir(parents=True)

    assert round_started_from(states, 3) == 1

    for number in (2, 4, 5, 7):
        states.save(*state_after(number))
        assert len(list((tmp_path / "site-1").glob("*.safetensors"))) <= 3

    assert names(tmp_path) == [
        "000004-11.safetensors",
        "000005-11.safetensors",
        "000007-11.safetensors",
    ]

    states.finish(7)

    assert names(tmp_path) == ["000007-11.safetensors"]


def test_a_resumed_run_does_not_use_what_the_stopped_one_left_of_rounds_that_do_not_count(tmp_path):
    """Run 12 goes on from round 5 of run 11, whose round 6 does not count."""
    save_after_rounds(states_of(tmp_path), 4, 5, 6)  # the server died before it could merge round 6
    again = states_of(tmp_path, FIRST.continued_by(12, 5))

    assert round_started_from(again, 6) == 5
    assert round_started_from(again, 7) == 5  # not asked in round 6

    again.save(*state_after(6))

    assert names(tmp_path) == [
        "000004-11.safetensors",
        "000005-11.safetensors",
        "000006-12.safetensors",
    ]


def test_a_client_still_at_work_for_the_stopped_run_disturbs_nothing(tmp_path):
    """Run 12 goes on from round 5 of run 11, of which a process still writes round 6.

    Run 12 starts from its own round 6, and in the end three states remain, all of run 12.
    """
    stopped = states_of(tmp_path)
    again = states_of(tmp_path, FIRST.continued_by(12, 5))
    stopped.save(*state_after(5))
    again.save(*state_after(6))
    _, arch, other_weights = state_after(99)
    stopped.save(6, arch, other_weights)

    assert round_started_from(again, 7) == 6  # with the weights of run 12

    save_after_rounds(again, 7, 8)

    assert names(tmp_path) == [
        "000006-12.safetensors",
        "000007-12.safetensors",
        "000008-12.safetensors",
    ]


@pytest.mark.parametrize(
    ("arch", "use", "said"),
    [
        ("resnet10", "local (0a)", "arch = 'cnn4', not 'resnet10'; put the right one in its place"),
        ("cnn4", "fedper (0b)", r"use = 'local \(0a\)', not 'fedper \(0b\)'"),
    ],
)
def test_a_state_of_another_network_or_algorithm_is_an_error(arch, use, said, tmp_path):
    StateFolder(tmp_path, "site-1", FIRST, use="local (0a)").save(*state_after())

    with pytest.raises(StateError, match=f"was stored with {said}"):
        StateFolder(tmp_path, "site-1", FIRST, use=use).load(4, arch, CPU)


def test_a_damaged_file_is_an_error_unless_there_is_a_state_before_it(tmp_path, capsys):
    """One bit is flipped in the first case; in the second the file is something else."""
    of_round_3 = tmp_path / "site-1" / "000003-11.safetensors"
    states = save_after_rounds(states_of(tmp_path), 3)
    flip_a_bit(of_round_3, -3)
    said = r"000003-11\.safetensors is damaged: .* checksum; remove it to start afresh"

    with pytest.raises(StateError, match=said):
        states.load(4, "cnn4", CPU)

    states = save_after_rounds(states_of(tmp_path), 2, 3)
    of_round_3.write_bytes(b"not a state at all")

    assert round_started_from(states, 4) == 2
    assert "000003-11.safetensors cannot be read" in capsys.readouterr().err


IS_MISSING = r"site-1: .*/site-1/000004-\*, its state after round 4, is missing; "


def test_a_state_older_than_the_round_that_counted_last_is_lost(tmp_path):
    """``counted``, the last argument of `load`: the round in which the server last counted a reply.

    A real site (``wary``) does not take its state for lost by a server's word alone.
    """
    states = save_after_rounds(states_of(tmp_path), 2, 3)

    for counted in (0, 2, 3):
        _, loaded_round = states.load(4, "cnn4", CPU, counted=counted)
        assert loaded_round == 3

    newest = r"the newest is of round 3\. Put this folder"

    with pytest.raises(LostStateError, match=IS_MISSING + newest):
        states.load(5, "cnn4", CPU, counted=4)
    with pytest.raises(LostStateError, match=IS_MISSING + "there is none"):
        states_of(tmp_path / "elsewhere").load(5, "cnn4", CPU, counted=4)

    _, loaded_round = states_of(tmp_path, wary=True).load(5, "cnn4", CPU, counted=4)
    assert loaded_round == 3


def test_a_state_under_the_name_of_another_round_is_an_error(tmp_path):
    states = save_after_rounds(states_of(tmp_path), 2)
    own = tmp_path / "site-1"
    (own / "000002-11.safetensors").rename(own / "000003-11.safetensors")

    with pytest.raises(StateError, match=r"000003-11\.safetensors was stored with round = '2'"):
        states.load(4, "cnn4", CPU)


def test_a_damaged_state_that_counted_is_lost_though_there_is_an_older_one(tmp_path):
    states = save_after_rounds(states_of(tmp_path), 2, 3)
    (tmp_path / "site-1" / "000003-11.safetensors").write_bytes(b"not a state at all")

    _, loaded_round = states.load(4, "cnn4", CPU, counted=2)
    assert loaded_round == 2
    with pytest.raises(LostStateError, match=r"^site-1: .*000003-11\.safetensors cannot be read"):
        states.load(4, "cnn4", CPU, counted=3)


@pytest.mark.parametrize("earlier", [(), ((4711, 0),), ((4711, 2),), ((4711, 99),)])
def test_a_site_removes_nothing_of_other_flower_runs_whatever_run_history_the_server_tells(
    earlier, tmp_path
):
    """``earlier``: the Flower runs that run 12 is said to go on from, each with its last round."""
    save_after_rounds(states_of(tmp_path, RunHistory(4711)), 1, 2)

    states = StateFolder(tmp_path, "site-1", RunHistory(12, earlier), is_site=True)
    save_after_rounds(states, 1, 2, 3, 4).finish(9)

    of_the_other = {"000001-4711.safetensors", "000002-4711.safetensors"}

    assert of_the_other | {"000004-12.safetensors"} <= set(names(tmp_path))


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "where", ["os.replace", "protofl_common.basics.tensorfile.save_file", "os.fsync"]
)
def test_a_full_disk_leaves_the_old_state(where, tmp_path, monkeypatch):
    """Writing fails at the place ``where``."""
    is_site = where == "os.fsync"  # simulated clients wait for no disk
    states = save_after_rounds(states_of(tmp_path, wary=is_site), 2, 3)

    monkeypatch.setattr(where, full_disk)
    said = (
        "round 4 is lost .* has the state after round 3: "
        ".*site-1.* could not be written.*No space left"
    )

    with pytest.raises(StateError, match=said):
        states.save(*state_after(4))

    monkeypatch.undo()

    assert round_started_from(states, 4) == 3
    assert names(tmp_path) == ["000002-11.safetensors", "000003-11.safetensors"]
