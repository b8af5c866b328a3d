"""Every setting acts: changed alone, it changes what a small federation leaves behind."""

import re
import shutil

import pytest

from protofl_common.experiment.settings import default_run_config
from tests.support import ROOT, acting
from tests.support.acting import CASES

IN_THE_SECOND_ROUND = """
evaluate-every lr-schedule lr-step lr-decay keep-optimizer
fedproto.lambda fedproto.distance fedproto.granularity
fedplvm.lambda fedplvm.alpha fedplvm.temperature
fedplvm.contrast fedplvm.correction fedplvm.similarity-floor
fedtgp.lambda fedtgp.distance fedtgp.granularity
fedpcl.temperature fedpcl.denominator
fpl.lambda fpl.temperature fpl.contrast fpl.consistency
protofed.prototypes
fedproto-avg.lambda fedproto-avg.distance fedproto-avg.granularity
fedorgp.lambda fedsa.smoothing
moon.mu moon.temperature feddbe.kappa feddbe.momentum
feddap.lambda1 feddap.lambda2 feddap.temperature
feddistill.gamma feddistill.outputs fedgen.lambda fedkd.energy-start
"""
"""What acts only once the server has answered.

All else does so in a run of one round, which takes half the time.
"""

ELSEWHERE = {
    "test_federation: where the results are": "run-name out-dir",
    "test_resume": "resume",
    "test_first_run: beside the run, which they do not change": "baselines",
    "test_over_clients, test_outside: figures beside the run's": "metrics callback",
    "test_validation: which round is the best, and the model that is kept of it": (
        "early-stopping-metric keep-best"
    ),
    "test_outside: an algorithm of another package": "hparams",
    "tests/unit/report, test_report_page": "report",
    "test_federation, test_communication: who is waited for": (
        "num-clients min-replies join-timeout round-timeout"
    ),
    "test_site_faults: how many suffice, and how long the others are waited for": (
        "min-clients grace min-wait"
    ),
    "test_faults: who is left out": "max-silent-rounds",
    "test_studies: who takes part": (
        "study study-sites study-until study-runs study-purpose study-by study-signature"
    ),
    "test_secagg: what the server sees, and when a round has no sum": "secagg secagg-threshold",
    "test_shared_noise: what each site of a sum draws": "dp-honest-sites",
    "tests/unit/protofl_common/data: they need files": (
        "data-dir download cache-dir classes test-from text-length max-unreadable"
    ),
    "tests/unit/protofl_common/data/test_tables.py: they need a table": (
        "columns drop one-hot impute standardise"
    ),
    "test_privacy: noise without a seed": (
        "dp dp-epsilon dp-delta dp-clip dp-feature-clip gradient-noise"
    ),
    "test_several_labels: which labels are known": "task label-map uncertain annotated-labels",
    "test_forget": "gaussian.revocable gaussian.start-from",
    "test_algorithm: any value gives the same figures, up to rounding": "eval-batch-size",
    "test_federation, test_gpu, tests/system: the client's machine": (
        "device precision threads state-dir"
    ),
}
"""Where else it is tested that settings act -> these settings."""


def test_every_setting_is_here_or_elsewhere():
    """Each setting has a case or is in `ELSEWHERE`, which names test files that are there."""
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+", " ".join(ELSEWHERE))) <= files

    elsewhere = set(" ".join(ELSEWHERE.values()).split())
    assert not elsewhere & CASES.keys()
    assert elsewhere | CASES.keys() == default_run_config().keys()


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """Return a function: settings -> all that must repeat of what a run with them leaves.

    Each run is made once.
    """
    known = {}

    def run(changes):
        name = repr(sorted(changes.items()))
        if name not in known:
            folder = tmp_path_factory.mktemp("run")
            known[name] = acting.left_behind(folder, changes)
            shutil.rmtree(folder)
        return known[name]

    return run


def test_what_must_not_act_does_not(left_behind):
    """Settings that a run of `SMALL` does not read leave the same, and so does another folder.

    So any difference in the next test is that of the setting.
    """
    for changes in ({"round_timeout": 999.0}, {"fedtgp__lambda": 9.0}, {"alpha": 9.0}):
        assert left_behind(changes) == left_behind({})


@pytest.mark.parametrize("key", CASES)
def test_a_setting_acts(key, left_behind):
    """With another value than its default, a run leaves something else."""
    settings, other = CASES[key]
    if key in IN_THE_SECOND_ROUND.split():
        settings = {"rounds": 2} | settings
    changed = settings | {key.replace("-", "_").replace(".", "__"): other}

    assert other != default_run_config()[key]
    assert left_behind(changed) != left_behind(settings)
