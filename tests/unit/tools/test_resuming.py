"""Which runs a worker lets go on by itself."""

import os
import tomllib
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from protofl_common.basics.run_history import RunHistory
from protofl_common.basics.tensorfile import write_tensors
from protofl_common.experiment.node import code_at_server
from protofl_common.experiment.settings import default_run_config
from protofl_common.runs.folder import METRICS, SETTINGS, SUMMARY, RunFolder
from protofl_common.tools.flower import APP_ERROR
from protofl_common.tools.known_runs import runs_in
from protofl_common.tools.resuming import MOST_SECONDS, Resuming, crashed_runs
from server_app.run.checkpoint import Checkpoint
from tests.support.fakes import submission


def stopped(folder, history, last, code=""):
    """Write a run whose last checkpoint is of the round ``last``; return its folder.

    ``history`` names the Flower runs that made it; ``code`` is the digest of the code that ran, ""
    for that of this checkout.
    """
    folder.mkdir(parents=True)
    (folder / METRICS).touch()
    (folder / SETTINGS).touch()
    settings = {"algo": "fedproto"}
    code = code or code_at_server(default_run_config() | settings)
    Checkpoint(settings, history, last, code=code).write(folder)
    return folder


def resumed(folder, *flowers_runs):
    """Return the names of the runs that a worker would submit again."""
    return [run.path.name for run in crashed_runs(runs_in(folder), list(flowers_runs))]


def test_a_run_that_crashed_goes_on_once(tmp_path):
    """Flower run 7 has crashed. It is resumed, unless run 8, which resumes it, is there already."""
    stopped(tmp_path / "first", RunHistory(7), last=0)

    assert resumed(tmp_path, submission(7)) == ["first"]

    has_not_ended = submission(7, sub_status="")
    assert resumed(tmp_path, has_not_ended) == []

    again = submission(8, sub_status="", run_name="first", resume=True)
    assert resumed(tmp_path, submission(7), again) == []

    unknown_to_the_superlink = resumed(tmp_path)
    assert unknown_to_the_superlink == []


def write_zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def write_another_version(path):
    write_tensors(path, {}, {"format": "protofl-checkpoint-4", "facts": "{}"})


@pytest.mark.parametrize("spoil", [write_zeros, write_another_version])
def test_a_checkpoint_that_cannot_be_used_holds_up_nothing(spoil, tmp_path):
    """A power cut has left zeros, or a former version a checkpoint: other runs go on by themselves.

    The run with an older checkpoint that is whole goes on from that.
    """
    none_is_left = stopped(tmp_path / "lost", RunHistory(7), last=0)
    one_is_left = stopped(tmp_path / "older", RunHistory(8), last=1)
    (whole,) = RunFolder(one_is_left).checkpoints()
    newest = whole.with_name("000002.safetensors")
    newest.write_bytes(whole.read_bytes())
    stopped(tmp_path / "other", RunHistory(9), last=0)
    for path in (*RunFolder(none_is_left).checkpoints(), newest):
        spoil(path)

    submissions = [submission(number) for number in (7, 8, 9)]
    assert sorted(resumed(tmp_path, *submissions)) == ["older", "other"]
    facts = {run.path.name: run.checkpoint_facts() for run in runs_in(tmp_path)}
    assert facts["lost"] == {}
    assert facts["older"]["round"] == 1


@pytest.mark.parametrize(("sub_status", "details"), [
    ("stopped", ""), ("completed", ""), ("failed", f"{APP_ERROR}: 3 rounds changed nothing"),
])  # fmt: skip
def test_a_run_that_somebody_or_an_error_ended_is_not_resumed(sub_status, details, tmp_path):
    stopped(tmp_path / "first", RunHistory(7), last=2)
    assert resumed(tmp_path, submission(7, sub_status, details)) == []


@pytest.mark.parametrize(("last", "names"), [(2, []), (3, ["first"])])
def test_a_run_that_crashes_again_must_have_come_further(last, names, tmp_path):
    """Flower run 7 came to round 2, and 8, which resumed it, to round ``last``."""
    stopped(tmp_path / "first", RunHistory(8, ((7, 2),)), last)
    again = submission(8, run_name="first", resume=True)
    assert resumed(tmp_path, submission(7), again) == names


def test_other_code_and_old_runs_are_left_to_a_person(tmp_path):
    stopped(tmp_path / "other", RunHistory(7), last=2, code="0123abcd")  # not of this checkout
    old = stopped(tmp_path / "old", RunHistory(8), last=2)
    (checkpoint,) = RunFolder(old).checkpoints()
    os.utime(checkpoint, (0, checkpoint.stat().st_mtime - MOST_SECONDS - 1))

    assert resumed(tmp_path, submission(7), submission(8)) == []


def test_a_baseline_goes_on_with_its_run(tmp_path):
    """The run itself has finished, and its baselines have stopped: the run is submitted, once."""
    run = stopped(tmp_path / "first", RunHistory(7), last=5)
    (run / SUMMARY).write_text('{"rounds": 5}')
    (run / SETTINGS).write_text('baselines = "local,fedavg,fedprox"')
    stopped(tmp_path / "first-local", RunHistory(7), last=2)
    stopped(tmp_path / "first-fedavg", RunHistory(7), last=1)

    assert resumed(tmp_path, submission(7)) == ["first"]

    # the run, which had ended before, knows nothing of the Flower run that resumed it
    stopped(tmp_path / "first-fedprox", RunHistory(8), last=1)
    again = submission(8, run_name="first", resume=True)

    assert resumed(tmp_path, submission(7), again) == ["first"]


def test_a_run_that_cannot_be_submitted_does_not_hold_up_others(tmp_path, monkeypatch, capsys):
    """Each is tried once, however often the worker looks for crashed runs."""
    stopped(tmp_path / "first", RunHistory(7), last=2)
    stopped(tmp_path / "second", RunHistory(8), last=2)
    tried = []

    def fails(resuming, settings):
        tried.append(settings.parent.name)
        raise CalledProcessError(1, "flwr run")

    monkeypatch.setattr(Resuming, "_submit", fails)
    module = "protofl_common.tools.resuming"
    monkeypatch.setattr(f"{module}.submissions_of", lambda *_: [submission(7), submission(8)])
    resuming = Resuming(["--runtime-api-address", "127.0.0.1:1"], tmp_path)
    resuming.look()
    resuming.look()

    assert sorted(tried) == ["first", "second"]
    assert "first does not go on by itself" in capsys.readouterr().err


def test_a_path_may_have_any_sign_in_it(tmp_path, monkeypatch):
    """Flower reads the connection from a file that names the worker's certificates."""
    certificates = tmp_path / 'the ward\'s "keys"' / "ca.crt"
    written = []

    def reads_the_configuration(command, env, check):
        configuration = Path(env["FLWR_HOME"], "config.toml").read_text()
        written.append(tomllib.loads(configuration)["superlink"]["superlink"])

    monkeypatch.setattr("protofl_common.tools.resuming.subprocess.run", reads_the_configuration)
    options = ["--runtime-api-address", "127.0.0.1:1", "--root-certificates", str(certificates)]
    Resuming(options, tmp_path)._submit(tmp_path / "resume.toml")

    assert written == [{"address": "127.0.0.1:1", "root-certificates": str(certificates)}]
