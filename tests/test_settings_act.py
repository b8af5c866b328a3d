"""Every setting acts: changed alone, it changes what a small federation leaves behind.

A function may be right, tested and called by nobody; then its setting does nothing, and only this notices.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from protofl_common.experiment import plugins
from protofl_common.experiment.settings import default_run_config
from tests.declared import DECLARED
from tests.harness import run_config, run_federation
from tests.test_federation import without_times

SMALL: dict[str, Any] = {
    "models": "mnist-cnn",
    "image_size": 0,
    "train_samples": 10,
    "test_samples": 20,
    "clients": 2,
    "rounds": 1,
}
SHOTS = {"partition": "n-way-k-shot", "train_samples": 0, "shots": 6}
FEW_LABELS = {"positive_rate": 0.5, "train_samples": 20}
UNEQUAL = {"partition": "dirichlet", "alpha": 0.5, "train_samples": 0, "test_samples": 0, "total_samples": 200}
VALIDATED = {"validation_fraction": 0.3, "train_samples": 30}
CLUSTERS = {"algo": "fedplvm", "train_samples": 40}

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "algo": ({}, "fedavg"),
    "rounds": ({}, 3),
    "early-stopping": (VALIDATED | {"rounds": 4, "lr": 1e-9, "algo": "local"}, 1),
    "seed": ({}, 7),
    "participation": ({}, 0.34),
    "evaluate-every": ({}, 2),
    "liars": ({"initial_weights": "shared", "clients": 3}, 1),
    "max-prototype-norm": ({}, 1.0),
    "max-prototypes-per-class": (CLUSTERS, 1),
    "max-norm-ratio": ({"clients": 3}, 1.0001),
    "max-samples-ratio": (UNEQUAL | {"clients": 5}, 1.0),
    "max-samples-lead": (UNEQUAL | {"clients": 5, "alpha": 0.1}, 1.0),
    "max-update-ratio": ({"algo": "fedavg", "clients": 3}, 0.5),
    "merging": ({"clients": 3}, "median"),
    "trim-fraction": ({"merging": "trimmed-mean", "clients": 5}, 0.4),
    "dataset": ({"partition": "iid"}, "digits"),
    "image-size": ({}, 20),
    "partition": ({}, "label-shift"),
    "alpha": (UNEQUAL, 9.0),
    "classes-per-client": ({"partition": "pathological"}, 4),
    "ways": (SHOTS, 5),
    "ways-stdev": (SHOTS, 0),
    "shots": (SHOTS, 9),
    "shots-stdev": (SHOTS, 3),
    "clients-per-domain": ({}, "2,0,0,0,0"),
    "total-samples": ({}, 200),
    "train-samples": ({}, 20),
    "test-samples": ({}, 30),
    "train-fraction": ({}, 0.3),
    "validation-fraction": ({"train_samples": 30}, 0.3),
    "positive-rate": ({"train_samples": 20}, 0.5),
    "models": ({}, "htcnn-1"),
    "arch": ({}, "htcnn-1"),
    "feature-dim": ({}, 32),
    "head": ({}, "orthogonal-frozen"),
    "initial-weights": ({}, "shared"),
    "backbones": ({}, "glyphs"),
    "norm": ({"models": "resnet4-imagenet-stem"}, "group"),
    "local-epochs": ({}, 2),
    "local-steps": ({}, 2),
    "batch-size": ({}, 4),
    "drop-last": ({"batch_size": 8}, True),
    "augment": ({}, "flip"),
    "optimizer": ({}, "adam"),
    "lr": ({}, 0.02),
    "lr-schedule": ({}, "cosine"),
    "lr-step": ({"lr_schedule": "step"}, 1),
    "lr-decay": ({"lr_schedule": "step", "lr_step": 1}, 0.5),
    "momentum": ({"batch_size": 4}, 0.9),
    "weight-decay": ({}, 0.1),
    "keep-optimizer": ({}, True),
    "predict-among": (UNEQUAL | {"partition": "pathological", "clients": 5, "rounds": 3}, "own"),
    "pu-weight": (FEW_LABELS, 1.0),
    "pu-risk": (FEW_LABELS | {"pu_weight": 1.0, "local_epochs": 10}, "non-negative"),
    "min-class-samples": (UNEQUAL, 9),
    "prototype-noise": ({}, "laplace 0.05 0.1"),
    "image-noise": ({}, "gaussian 0.2 0.1"),
    "gaussian.priors": (UNEQUAL | {"algo": "gaussian"}, "personal"),
    "mpft.sample-ratio": ({"algo": "mpft", "train_samples": 30}, 0.9),
    "fedproto.lambda": ({}, 3.0),
    "fedproto.weighting": (UNEQUAL, "uniform"),
    "fedproto.distance": ({}, "l1"),
    "fedproto.granularity": ({}, "class"),
    "fedproto-avg.weighting": (UNEQUAL | {"algo": "fedproto-avg"}, "uniform"),
    "fedplvm.lambda": (CLUSTERS, 9.0),
    "fedplvm.alpha": (CLUSTERS, 0.9),
    "fedplvm.temperature": (CLUSTERS, 0.5),
    "fedplvm.contrast": (CLUSTERS, False),
    "fedplvm.correction": (CLUSTERS, "none"),
    "fedplvm.similarity-floor": (CLUSTERS, 0.9),
    "fedplvm.local-clusters": (CLUSTERS, "average"),
    "fedplvm.global-clusters": (CLUSTERS, "none"),
    "fedplvm.kmeans-clusters": (CLUSTERS | {"fedplvm__local_clusters": "kmeans"}, 3),
}
CASES |= {
    f"{algo}.{key}": ({"algo": algo, "local_epochs": 2, "clients": 2, "train_samples": 20}, other)
    for algo, declared in DECLARED.items()
    for key, other in declared.acts.items()
}
"""Key -> (the settings under which it acts, another value than its default)."""

IN_THE_SECOND_ROUND = """
evaluate-every lr-schedule lr-step lr-decay keep-optimizer
fedproto.lambda fedproto.distance fedproto.granularity fedplvm.lambda fedplvm.alpha fedplvm.temperature
fedplvm.contrast fedplvm.correction fedplvm.similarity-floor fedtgp.lambda fedtgp.distance fedtgp.granularity
fedpcl.temperature fedpcl.denominator fpl.lambda fpl.temperature fpl.contrast fpl.consistency protofed.prototypes
fedproto-avg.lambda fedproto-avg.distance fedproto-avg.granularity fedorgp.lambda fedsa.smoothing
feddistill.gamma feddistill.outputs fedgen.lambda fedkd.energy-start
"""
"""What acts only once the server has answered; all else does so in a run of one round, which takes half the time."""

ELSEWHERE = {
    "run-name out-dir": "test_federation: where the results are",
    "resume": "test_resume",
    "baselines": "test_first_run: beside the run, which they do not change",
    "metrics callback": "test_evaluation_metrics, test_outside: figures beside the run's",
    "early-stopping-metric keep-best": "test_validation: which round is the best, and the model that is kept of it",
    "hparams": "below, with an algorithm of another package",
    "report statistics": "tests/report, test_recording",
    "num-clients min-replies join-timeout round-timeout": "test_federation, test_communication: who is waited for",
    "min-clients grace": "test_site_faults: how many suffice, and how long the others are waited for",
    "bind-sites max-silent-rounds": "test_faults: who may be a site, and who is left out",
    "secagg secagg-threshold": "test_secagg: what the server sees, and when a round has no sum",
    "data-dir download cache-dir classes test-from text-length": "tests/protofl_common/data: they need files",
    "columns drop one-hot impute standardise": "tests/protofl_common/data/test_tables.py: they need a table",
    "dp dp-epsilon dp-delta dp-clip dp-feature-clip gradient-noise": "test_privacy: noise without a seed",
    "eval-batch-size": "test_evaluation: any value gives the same figures, up to rounding",
    "device precision threads state-dir": "test_federation, test_gpu, tests/system: the client's machine",
}


def test_every_setting_is_here_or_elsewhere() -> None:
    elsewhere = {key for keys in ELSEWHERE for key in keys.split()}
    assert not elsewhere & CASES.keys()
    assert elsewhere | CASES.keys() == default_run_config().keys()


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], object]:
    """Settings -> everything that a run with them leaves, but the time it took; each run once."""
    known: dict[str, object] = {}

    def run(changes: dict[str, Any]) -> object:
        name = repr(sorted(changes.items()))
        if name not in known:
            wanted = SMALL | changes
            clients = wanted.pop("clients")
            folder = tmp_path_factory.mktemp("run")
            outcome = run_federation(run_config(folder, **wanted), clients)
            known[name] = without_times(outcome.rows), digests(outcome.folder)
            shutil.rmtree(folder)
        return known[name]

    return run


def digests(folder: Path) -> dict[str, str]:
    """Of the global and the clients' prototypes and models, without what else their files tell."""
    found = {}
    for file in (*folder.glob("*.safetensors"), *folder.glob("clients/*/model.safetensors")):
        for name, tensor in load_file(file).items():
            digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
            found[f"{file.relative_to(folder)}: {name}"] = digest
    return found


def test_what_must_not_act_does_not(left_behind: Callable[[dict[str, Any]], object]) -> None:
    """Nor does another folder, or time: so a difference is the setting's."""
    for changes in ({"round_timeout": 999.0}, {"fedtgp__lambda": 9.0}, {"alpha": 9.0}):
        assert left_behind(changes) == left_behind({})


@pytest.mark.parametrize("key", CASES)
def test_a_setting_acts(key: str, left_behind: Callable[[dict[str, Any]], object]) -> None:
    under, other = CASES[key]
    under = ({"rounds": 2} if key in IN_THE_SECOND_ROUND.split() else {}) | under
    assert other != default_run_config()[key]
    named = key.replace("-", "_").replace(".", "__")
    assert left_behind(under | {named: other}) != left_behind(under)


def test_hparams_act_on_an_algorithm_of_another_package(
    left_behind: Callable[[dict[str, Any]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("moon", "outside_moon.method:ROW", plugins.GROUP)
    monkeypatch.syspath_prepend(Path(__file__).parent / "support" / "outside")
    monkeypatch.setattr(plugins, "installed", lambda: {"moon": point})
    plugins.algorithm_named.cache_clear()
    outside = {"algo": "moon", "rounds": 2}
    assert left_behind(outside | {"hparams": "mu=5.0"}) != left_behind(outside)
    assert left_behind(outside | {"hparams": "mu=0.0"}) != left_behind(outside)
    plugins.algorithm_named.cache_clear()
