"""Gaussian heads without a site that withdraws, and with one that comes later: the head of all that is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.models.trained import TrainedModel
from protofl_common.tools.cli import main
from tests.support.commands import output
from tests.support.given import Printed
from tests.support.harness import Outcome, client_of, refusal, run_config, run_federation

SMALL = {
    "algo": "gaussian",
    "rounds": 1,
    "dataset": "digits",
    "backbones": "glyphs",
    "partition": "dirichlet",
}
REVOCABLE = {"alpha": 0.5, "total_samples": 300, "test_samples": 10, "gaussian__revocable": True}


def federation(folder: Path, *partitions: int, **settings: Any) -> Outcome:
    """A run of some of four clients."""
    nodes = {1000 + one: {"partition-id": one, "num-partitions": 4} for one in partitions}
    there = {"num_clients": len(partitions), "min_clients": len(partitions)}
    return run_federation(run_config(folder, **SMALL | REVOCABLE | there | settings), nodes=nodes)


def features(outcome: Outcome, *partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    sets = [client_of(outcome.grid.run_config, one, 4).train_set for one in partitions]
    return torch.cat([one.in_memory for one in sets]), torch.cat([one.labels for one in sets])


def stored(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "checkpoints").glob("000001.safetensors")
    return load_file(file)


def assert_result_of(outcome: Outcome, head: str, *partitions: int) -> None:
    """The run has the moments of these clients' features together, and its models the head of these."""
    x, y = features(outcome, *partitions)
    state, moments = stored(outcome.folder), ClassMoments(10, x.shape[1], head)
    moments.measure(x, y)
    for name, value in moments.named_buffers():
        torch.testing.assert_close(
            state[f"moments/{name}"], value, rtol=0, atol=1e-9 * float(value.abs().max())
        )
    assert torch.equal(state["counts_C"], y.bincount(minlength=10))
    files = list(outcome.folder.glob("clients/*/model.safetensors"))
    assert files
    for file in files:
        model = TrainedModel.read(file).build()
        found = model(x)
        model.head.fit(moments, y.bincount(minlength=10), moments.shares, -1.0)  # type: ignore[operator]
        wanted = model(x)
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=1e-6 * float(wanted[wanted.isfinite()].abs().max())
        )


@pytest.mark.parametrize("head", ["naive-bayes", "lda", "qda"])
def test_the_result_without_a_site_is_that_of_the_others(head: str, tmp_path: Path) -> None:
    outcome = federation(tmp_path, 0, 1, 2, 3, gaussian__head=head)
    assert_result_of(outcome, head, 0, 1, 2, 3)
    assert main(["forget", str(outcome.folder), "--site", "site-1", "--by", "letter 7"]) == 0
    assert_result_of(outcome, head, 0, 2, 3)
    assert not [key for key in stored(outcome.folder) if "site-1" in key]
    assert len(list((outcome.folder / "checkpoints").glob("*.safetensors"))) == 1
    (line,) = (outcome.folder / "forgotten.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time")
    assert record == {"by": "letter 7", "site": "site-1", "left": ["site-0", "site-2", "site-3"]}


def test_what_is_used_and_exported_has_the_new_head_and_the_last_site_stays(
    tmp_path: Path, capsys: Printed
) -> None:
    outcome, out = federation(tmp_path, 0, 1, 2), str(tmp_path / "model")
    assert main(["forget", str(outcome.folder), "--site", "site-2"]) == 0
    assert main(["export", str(outcome.folder), "--site", "site-0", "--out", out]) == 0
    assert "less forgotten sites; figures are from before that" in capsys.readouterr().out
    exported = TrainedModel.read(tmp_path / "model" / "model.safetensors").weights
    for name, value in TrainedModel.read(
        outcome.folder / "clients" / "site-0" / "model.safetensors"
    ).weights.items():
        assert torch.equal(exported[name], value)
    assert main(["forget", str(outcome.folder), "--site", "site-1"]) == 0
    assert (
        "nobody else is left"
        in output(capsys, "forget", outcome.folder, "--site", "site-0", status=1).err
    )


def test_a_site_that_comes_later_is_asked_alone(tmp_path: Path) -> None:
    """One that takes part again counts anew, not twice; one that was forgotten stays so."""
    first = federation(tmp_path / "first", 0, 1, 2)
    assert main(["forget", str(first.folder), "--site", "site-0"]) == 0
    second = federation(tmp_path / "second", 3, gaussian__start_from=str(first.folder), rounds=1)
    assert (
        len([message for message, _ in second.grid.log if message.metadata.message_type == "train"])
        == 1
    )
    assert_result_of(second, "lda", 1, 2, 3)
    assert_result_of(
        federation(tmp_path / "third", 0, 3, gaussian__start_from=str(second.folder)),
        "lda",
        1,
        2,
        0,
        3,
    )


def test_noise_stays_in_what_is_left(tmp_path: Path) -> None:
    outcome = federation(tmp_path, 0, 1, 2, dp="sample")
    assert main(["forget", str(outcome.folder), "--site", "site-2"]) == 0
    state = stored(outcome.folder)
    moments = {
        key.removeprefix("moments/"): value
        for key, value in state.items()
        if key.startswith("moments/")
    }
    assert ClassMoments.of(moments).problem() == ""
    assert {key.split("/")[1] for key in state if key.startswith("sent/")} == {"site-0", "site-1"}


@pytest.mark.parametrize(("settings", "site", "said"), [
    ({}, "north", "--site north: not in the result; choose site-0, site-1, site-2"),
    ({"gaussian__revocable": False}, "site-1", "gaussian.revocable = false: what each site sent is not stored"),
    ({"gaussian__revocable": False, "secagg": True}, "site-1",
     "with secure aggregation the server has the sum of all"),
    ({"algo": "fedproto"}, "site-1", "algo = 'fedproto': only the sums of gaussian can be divided; make the"),
])  # fmt: skip
def test_what_must_stay_is_said(
    settings: Any, site: str, said: str, tmp_path: Path, capsys: Printed
) -> None:
    outcome = federation(tmp_path, 0, 1, 2, **settings)
    assert said in output(capsys, "forget", outcome.folder, "--site", site, status=1).err
    assert not (outcome.folder / "forgotten.jsonl").exists()


@pytest.mark.parametrize(("first", "second", "said"), [
    ({"gaussian__head": "qda"}, {}, "gaussian.head = 'lda': gaussian.start-from = .* has 'qda'"),
    ({"gaussian__revocable": False}, {},
     "what its sites sent is not stored; make it with gaussian.revocable = true"),
])  # fmt: skip
def test_no_other_run_is_continued(
    first: dict[str, Any], second: dict[str, Any], said: str, tmp_path: Path
) -> None:
    earlier = federation(tmp_path / "first", 0, 1, **first).folder
    with pytest.raises(SettingsError, match=said):
        federation(tmp_path / "second", 2, **second, gaussian__start_from=str(earlier))


@pytest.mark.parametrize(
    "more", [{"gaussian.revocable": True}, {"gaussian.start-from": "runs/first"}]
)
def test_secure_aggregation_has_nothing_of_single_sites(more: dict[str, Any]) -> None:
    said = refusal({"algo": "gaussian", "rounds": 1, "secagg": True, **more})
    assert "secagg = true hides what single sites send; to " in said
