"""Gaussian heads when a site withdraws, and when one comes later: the head of all that is left."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.models.trained import TrainedModel
from protofl_common.tools.cli import main
from tests.support.commands import export_model, output
from tests.support.harness import client_of, federate, refusal
from tests.support.plain import assert_equal

SMALL = {
    "algo": "gaussian",
    "rounds": 1,
    "dataset": "digits",
    "backbones": "glyphs",
    "partition": "dirichlet",
    "alpha": 0.5,
    "total_samples": 300,
    "test_samples": 10,
    "gaussian__revocable": True,
}


def federation(folder, *partitions, **settings):
    """Run gaussian heads with these of four clients."""
    nodes = {1000 + n: {"partition-id": n, "num-partitions": 4} for n in partitions}
    number = {"num_clients": len(partitions), "min_clients": len(partitions)}
    return federate(folder, nodes=nodes, **SMALL | number | settings)


def features(outcome, *partitions):
    """Return the training features and labels of these clients, one after the other."""
    sets = [
        client_of(outcome.grid.run_config, partition=n, clients=4).train_set for n in partitions
    ]
    inputs = torch.cat([train_set.in_memory for train_set in sets])
    labels = torch.cat([train_set.labels for train_set in sets])
    return inputs, labels


def tensors_of_checkpoint(run):
    """Return the tensors of the checkpoint after the only round."""
    return load_file(run / "checkpoints" / "000001.safetensors")


def assert_result_of(outcome, *partitions):
    """The run has the moments of all features of these clients, and its models have their head.

    To 10⁻⁹ of the largest moment, and to 10⁻⁶ of the largest score.
    """
    x, y = features(outcome, *partitions)
    counts = y.bincount(minlength=10)
    moments = ClassMoments(10, x.shape[1])
    moments.measure(x, y)

    state = tensors_of_checkpoint(outcome.folder)
    for name, value in moments.named_buffers():
        tolerance = 1e-9 * float(value.abs().max())
        torch.testing.assert_close(state[f"moments/{name}"], value, rtol=0, atol=tolerance)
    assert torch.equal(state["counts_C"], counts)

    files = list(outcome.folder.glob("clients/*/model.safetensors"))
    assert files
    for file in files:
        model = TrainedModel.read(file).build()
        found = model(x)
        of_the_oracle = -1.0  # a shrinkage below 0 asks for the oracle's
        model.head.fit(moments, counts, moments.shares, of_the_oracle, torch.clone)
        wanted = model(x)
        tolerance = 1e-6 * float(wanted[wanted.isfinite()].abs().max())
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def forget(outcome, site, *options):
    """Take a site out of a result by the command, which must succeed."""
    assert main(["forget", str(outcome.folder), "--site", site, *options]) == 0


def test_the_result_without_a_site_is_that_of_the_others(tmp_path):
    """Nothing that site-1 has sent is left, and it is on record who took it out."""
    outcome = federation(tmp_path, 0, 1, 2, 3)
    assert_result_of(outcome, 0, 1, 2, 3)

    forget(outcome, "site-1", "--by", "letter 7")

    assert_result_of(outcome, 0, 2, 3)
    assert not [key for key in tensors_of_checkpoint(outcome.folder) if "site-1" in key]
    assert len(list((outcome.folder / "checkpoints").glob("*.safetensors"))) == 1

    (line,) = (outcome.folder / "forgotten.jsonl").read_text().splitlines()
    record = json.loads(line)

    assert record.pop("time")
    assert record == {"by": "letter 7", "site": "site-1", "left": ["site-0", "site-2", "site-3"]}


def test_what_is_used_and_exported_has_the_new_head_and_the_last_site_stays(tmp_path, capsys):
    """After site-2 is forgotten, the exported model has the head of the other two.

    Of these one can be forgotten, and then nobody.
    """
    outcome = federation(tmp_path, 0, 1, 2)
    forget(outcome, "site-2")

    out = export_model(outcome.folder, tmp_path / "model")
    assert "less forgotten sites; figures are from before that" in capsys.readouterr().out

    found = TrainedModel.read(out / "model.safetensors").weights
    kept = TrainedModel.read(outcome.folder / "clients" / "site-0" / "model.safetensors").weights

    assert_equal(found, kept)

    forget(outcome, "site-1")
    error = output(capsys, "forget", outcome.folder, "--site", "site-0", status=1).err

    assert "nobody else is left" in error


def test_a_site_that_comes_later_is_asked_alone(tmp_path):
    """A run goes on from an earlier one's moments, and asks only the new site.

    A site that was forgotten is not in it. In the third run it takes part again and counts, and
    site-3, which takes part a second time, counts once.
    """
    first = federation(tmp_path / "first", 0, 1, 2)
    forget(first, "site-0")

    second = federation(tmp_path / "second", 3, gaussian__start_from=str(first.folder))
    assert len(second.exchanged()) == 1
    assert_result_of(second, 1, 2, 3)

    third = federation(tmp_path / "third", 0, 3, gaussian__start_from=str(second.folder))
    assert_result_of(third, 1, 2, 0, 3)


def test_noise_stays_in_what_is_left(tmp_path):
    """Under dp, too, a site can be forgotten: what is left is moments that could be, with noise."""
    outcome = federation(tmp_path, 0, 1, 2, dp="sample")
    forget(outcome, "site-2")

    moments = {}
    sites = set()
    for key, value in tensors_of_checkpoint(outcome.folder).items():
        if key.startswith("moments/"):
            moments[key.removeprefix("moments/")] = value
        if key.startswith("sent/"):
            sites.add(key.split("/")[1])

    assert ClassMoments.of(moments).why_impossible() == ""
    assert sites == {"site-0", "site-1"}


@pytest.mark.parametrize(
    ("settings", "site", "said"),
    [
        ({}, "north", "--site north: not in the result; choose site-0, site-1, site-2"),
        (
            {"gaussian__revocable": False},
            "site-1",
            "gaussian.revocable = false: what each site sent is not stored",
        ),
        (
            {"gaussian__revocable": False, "secagg": True},
            "site-1",
            "with secure aggregation the server has the sum of all",
        ),
        (
            {"algo": "fedproto"},
            "site-1",
            "algo = 'fedproto': only the sums of gaussian can be divided; make the",
        ),
    ],
)
def test_a_result_that_no_site_can_be_taken_out_of_says_why(settings, site, said, tmp_path, capsys):
    outcome = federation(tmp_path, 0, 1, 2, **settings)
    assert said in output(capsys, "forget", outcome.folder, "--site", site, status=1).err
    assert not (outcome.folder / "forgotten.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"backbones": "fractals"},
            "backbones = '.*': gaussian.start-from = .* has 'fractals'",
        ),
        (
            {"gaussian__revocable": False},
            "what its sites sent is not stored; make it with gaussian.revocable = true",
        ),
    ],
)
def test_a_run_that_cannot_be_continued_is_refused(settings, said, tmp_path):
    """The earlier run has another backbone, or has not stored what its sites sent."""
    earlier = federation(tmp_path / "first", 0, 1, **settings).folder
    with pytest.raises(SettingsError, match=said):
        federation(tmp_path / "second", 2, gaussian__start_from=str(earlier))


@pytest.mark.parametrize(
    "more", [{"gaussian.revocable": True}, {"gaussian.start-from": "runs/first"}]
)
def test_secure_aggregation_excludes_forgetting_and_going_on(more):
    said = refusal({"algo": "gaussian", "rounds": 1, "secagg": True, **more})
    assert "secagg = true hides what single sites send; to " in said
