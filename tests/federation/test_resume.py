"""A run that was stopped anywhere and resumed leaves bit for bit what an undisturbed one leaves."""

import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

from protofl_common.basics.code_version import code_version
from protofl_common.basics.files import TensorFileError
from protofl_common.config.datasets import PARTITIONS
from protofl_common.config.options import SettingsError
from protofl_common.data.store import data_key
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.runs.folder import CHECKPOINTS, RunFolder
from protofl_common.tools.arguments import read_recipe
from server_app.callbacks.checkpoints import as_toml
from server_app.network.membership import FederationError
from tests.support.accidents import CLIENTS, FINAL, PLACES, flip_a_bit, run_until_stopped
from tests.support.harness import federate, run_config, run_federation
from tests.support.results import assert_same

SMALL = {"models": "mnist-cnn", "train_samples": 10, "test_samples": 20}
LIVES_ON = {
    "models": "resnet4-imagenet-stem",
    "keep_optimizer": True,
    "rounds": 3,
    "participation": 0.5,
}
CENTRES = {"algo": "fesem", "fesem__centres": 11, "models": "htcnn-1", "train_samples": 20}
LATE = {"slow_rate": 0.5, "slow_factor": 2, "late": "next-round", "rounds": 5}
TRAINING = "while the clients train"
STORED = "after the checkpoint"
EVERYWHERE = {place: number for number, place in enumerate([*PLACES, FINAL], start=1)}
"""Every place in a round of its own."""
CASES = [
    *(({"algo": algo}, {TRAINING: 2, STORED: 3}) for algo in CATALOG),
    # an optimizer of two models, of a part of one, and with batch normalisation
    *(
        (LIVES_ON | {"algo": algo}, {TRAINING: 2})
        for algo in ("fedprox", "fedper", "fedrep", "fml", "fedkd", "fedfa", "per-fedavg")
    ),
    # replies that are held back
    *((LATE | {"algo": algo}, {STORED: 2, TRAINING: 4}) for algo in ("fedproto", "fedavg")),
    # a checkpoint orders centres by name, "10" before "2"
    (CENTRES | {"participation": 1.0}, {STORED: 1, TRAINING: 3}),
    # with half of the clients, some have no cluster yet
    (CENTRES | {"participation": 0.5}, {STORED: 1, TRAINING: 3}),
    *(({"algo": algo, "rounds": 6}, EVERYWHERE) for algo in ("fedtgp", "fesem", "fedkd")),
]
"""The settings of a run, and place -> the round in which it is stopped there."""


@pytest.mark.parametrize(("settings", "stops"), CASES)
def test_a_stopped_run_equals_a_whole_one(settings, stops, tmp_path):
    """A run is stopped at each place in turn, and resumed each time.

    A round is finished only if the server dies after its checkpoint.
    """
    settings = SMALL | {"rounds": 4, "run_name": "mine"} | settings
    wanted = federate(tmp_path / "whole", clients=CLIENTS, **settings)

    config = run_config(tmp_path / "parts", **settings)
    finished_rounds = []
    for run_id, (place, number) in enumerate(stops.items(), start=1):
        run_until_stopped(config | {"resume": run_id > 1}, place, number, run_id)
        finished_rounds.append(number if place in (STORED, FINAL) else number - 1)
    found = run_federation(config | {"resume": True}, clients=CLIENTS, run_id=9)

    assert_same(found, wanted)
    assert found.summary["resumed-after-rounds"] == finished_rounds
    assert found.summary["rounds"] == settings["rounds"]


def test_resume_toml_is_all_it_takes(tmp_path):
    """The file resumes a run even without a run-name, whose name is then its folder's.

    Files that a killed process has left half written are removed, and no others.
    """
    run_until_stopped(run_config(tmp_path, rounds=3, **SMALL), STORED, number=2)
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    (folder / "client-prototypes.safetensors.0a1b2c3d.tmp").mkdir()  # as a kill leaves it
    (folder / CHECKPOINTS / "000003.safetensors.0a1b2c3d.tmp").mkdir()
    own = folder / "draft.tmp"  # a file of somebody's own, whose name is not like that
    own.touch()

    recipe = read_recipe(str(folder / "resume.toml"))
    assert recipe.federation["num-supernodes"] == CLIENTS

    found = run_federation(default_run_config() | recipe.settings, clients=CLIENTS, run_id=2)

    assert found.folder == folder
    assert list(folder.rglob("*.tmp")) == [own]
    assert found.summary["resumed-after-rounds"] == [2]


def refusal(config):
    """Return the error of a run that is resumed with these settings, and refused."""
    with pytest.raises((SettingsError, TensorFileError)) as caught:
        run_federation(config | {"resume": True}, clients=CLIENTS, run_id=9)
    return str(caught.value)


def test_resume_toml_says_how_to_use_it():
    settings = Settings.from_run_config(default_run_config())
    command = "# flwr run . FEDERATION --run-config r.toml --stream\n"

    assert command in as_toml(settings, Path("r.toml"), 0)
    assert "num-supernodes=3" in as_toml(settings, Path("r.toml"), 3)


def test_a_stopped_run_goes_on_as_what_it_was_only(tmp_path):
    """A run that is resumed needs the same settings and clients, and no other process on it.

    Settings that do not change the result may differ. Flower simulates as many clients as before
    only if it is told so, so the error names the option.
    """
    config = run_config(tmp_path, rounds=3, run_name="mine", join_timeout=1e9, **SMALL)
    run_until_stopped(config, STORED, number=1)

    said = "holds a run already; choose another name, or let it go on with resume"
    with pytest.raises(SettingsError, match=said):
        run_federation(config, clients=CLIENTS)

    with FileLock(tmp_path / "runs" / ".mine.lock"):
        assert "another process is at work" in refusal(config)

    said = rf"divided among {CLIENTS} clients, not 2; .* 'num-supernodes={CLIENTS}'"
    with pytest.raises(FederationError, match=said):  # at once, not after ``join-timeout``
        run_federation(config | {"resume": True}, clients=2, run_id=2)

    said = refusal(config | {"lr": 0.5, "algo": "fedtgp", "round-timeout": 7.0})
    assert 'algo = "fedtgp": the run has algo = "fedproto"' in said
    assert "lr = 0.5: the run has lr = 0.05" in said
    assert "fedtgp.lambda = 0.1: the run has fedtgp.lambda = (not set)" in said
    assert "round-timeout" not in said

    same_result = {"round-timeout": 7.0, "min-replies": 2}
    found = run_federation(config | {"resume": True} | same_result, clients=CLIENTS, run_id=3)

    assert found.summary["resumed-after-rounds"] == [1]


def test_a_stopped_run_does_not_go_on_with_other_data(tmp_path):
    """A table has lost a row: divided anew, models would be tested on what has trained them."""
    lines = ["x,label\n", *(f"{row},{row % 2}\n" for row in range(60))]
    table = tmp_path / "mine.csv"
    table.write_text("".join(lines), encoding="utf-8")
    config = run_config(
        tmp_path,
        rounds=2,
        run_name="mine",
        dataset="arrays",
        data_dir=str(table),
        models="mlp-1",
        partition="iid",
        train_samples=0,
    )
    run_until_stopped(config, STORED, number=1)

    table.write_text("".join(lines[:-1]), encoding="utf-8")
    data_key.cache_clear()  # as in a new process

    assert re.search(r"the data are not those .*: site-\d has \S+ = .*, and had ", refusal(config))


def test_where_there_is_nothing_to_resume_it_says_so(tmp_path, capfd):
    """A run that is not there cannot be resumed; one that is finished can, and nothing is done."""
    config = run_config(tmp_path, rounds=1, run_name="mine", **SMALL)
    assert "nothing to resume, there is no" in refusal(config)
    assert "run-name must name the run" in refusal(config | {"run-name": ""})
    assert f"out-dir: {__file__} cannot be written" in refusal(config | {"out-dir": __file__})
    assert not list((tmp_path / "runs").iterdir())

    before = run_federation(config, clients=CLIENTS).summary
    assert "rounds = 2: the run has rounds = 1" in refusal(config | {"rounds": 2})

    outcome = run_federation(config | {"resume": True}, clients=CLIENTS, run_id=2)

    assert outcome.summary == before
    assert outcome.grid.log == [], "nobody was asked anything"

    shown = capfd.readouterr().out
    assert "mine is complete: nothing of it is left to do" in shown
    assert shown.count("result: ") == 2


@pytest.mark.parametrize(("place", "round_before"), [(TRAINING, 3), (STORED, 4)])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(
    place, round_before, tmp_path, capsys
):
    """The server dies in round 5, and its newest checkpoint is damaged: it goes back a round more.

    Clients keep the states that this needs, even where some had begun the next round.
    """
    settings = SMALL | {"rounds": 6, "run_name": "mine", "algo": "fedtgp"}
    wanted = federate(tmp_path / "whole", clients=CLIENTS, **settings)
    config = run_config(tmp_path / "parts", **settings)
    run_until_stopped(config, place, number=5)
    newest, _before, _before_that = RunFolder(tmp_path / "parts" / "runs" / "mine").checkpoints()

    flip_a_bit(newest, -99)  # in the numbers at its end

    resumed = run_federation(config | {"resume": True}, clients=CLIENTS, run_id=2)

    console = capsys.readouterr().out
    said = f"{newest.name} is damaged: its content does not have its checksum; going back a round"

    assert said in console
    assert f"resuming mine after round {round_before} of 6" in console
    assert_same(resumed, wanted)


def test_where_all_checkpoints_are_damaged_or_of_an_older_version_it_ends(tmp_path):
    """Each of three faults is one clear error: cut files, rows of metrics lost, another format."""
    config = run_config(tmp_path, run_name="mine", **SMALL)
    run_until_stopped(config, STORED, number=1)
    folder = tmp_path / "runs" / "mine"
    whole = {path: path.read_bytes() for path in RunFolder(folder).checkpoints()}

    assert [path.name for path in whole] == ["000001.safetensors", "000000.safetensors"]

    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    assert "000000.safetensors cannot be read" in refusal(config)

    for path, content in whole.items():
        path.write_bytes(content)
    (folder / "metrics.jsonl").write_text("")

    assert "metrics.jsonl lacks rows of the first 1 rounds" in refusal(config)

    old = folder / CHECKPOINTS / "000001.safetensors"
    metadata = {"format": "protofl-checkpoint-2", "facts": "{}"}
    save_file({"prototypes:means": torch.zeros(1, 2)}, old, metadata)
    said = f"{old} is of the version protofl-checkpoint-2, not protofl-checkpoint-6"

    assert said in refusal(config)


def test_a_resumed_run_says_from_where_and_from_what_code(tmp_path, capsys, monkeypatch):
    """Another way to divide the data is refused; other code, and other threads, are only said."""
    config = run_config(tmp_path, rounds=3, run_name="mine", **SMALL)
    monkeypatch.setattr("server_app.run.job.code_at_server", lambda _: "abad1dea")
    run_until_stopped(config, STORED, number=1)
    partition = config["partition"]
    monkeypatch.setitem(PARTITIONS, partition, replace(PARTITIONS[partition], version=9))

    assert "runs/mine: its clients had other samples: " in refusal(config)

    monkeypatch.undo()

    run_until_stopped(config | {"resume": True}, STORED, number=2, run_id=2)
    said = "resuming with other code: the run's last round was made by abad1dea, "

    assert f"{said}this is {code_version()}" in capsys.readouterr().out

    run_federation(config | {"resume": True, "threads": 1}, clients=CLIENTS, run_id=3)
    console = capsys.readouterr().out

    assert "resuming mine after round 2 of 3; round 3 is next" in console

    said = "resuming with threads = 1: the run has threads = 0; "
    assert f"{said}figures may differ in their last digits" in console
    assert console.count("resuming with") == 1, "nor with other code"


def test_a_full_disk_of_the_server_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """The disk is full when round 2's checkpoint is written: the run ends, and can be resumed.

    Before each checkpoint the simulated clients' files are synced to the disk, too.
    """
    settings = SMALL | {"rounds": 3, "run_name": "mine"}
    config = run_config(tmp_path, **settings)
    checkpoints_when_synced = []

    def save_unless_full(tensors, path, metadata):
        if path.parent.name == CHECKPOINTS and '"round": 2' in metadata["facts"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, metadata)

    def sync(path):
        assert path.name == "mine"  # the folder of a run
        checkpoints = RunFolder(tmp_path / "runs" / "mine").checkpoints()
        checkpoints_when_synced.append(len(checkpoints))

    monkeypatch.setattr("protofl_common.basics.tensorfile.save_file", save_unless_full)
    monkeypatch.setattr("server_app.callbacks.checkpoints.sync_disk_of", sync)
    said = r"checkpoints/000002.safetensors could not be written.*No space left"

    with pytest.raises(TensorFileError, match=said):
        run_federation(config, clients=CLIENTS, run_id=1)

    monkeypatch.setattr("protofl_common.basics.tensorfile.save_file", save_file)
    found = run_federation(config | {"resume": True}, clients=CLIENTS, run_id=2)

    # before rounds 1 and 2 are stored, and 2 and 3 once resumed; at last the clients' final models
    assert checkpoints_when_synced == [1, 2, 2, 3, 3]
    assert found.summary["resumed-after-rounds"] == [1]
    assert_same(found, federate(tmp_path / "whole", clients=CLIENTS, **settings))
