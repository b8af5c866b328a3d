"""Would a test notice? One change of the mathematics at a time, in a copy: python -m tests.bench.mutants [NAME …]

Each mutant is a line of the product made wrong, and the tests that should fail for it. One that none of them notices is
named: it survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """What is made wrong, and who should notice."""

    name: str
    file: str
    line: str
    wrong: str
    tests: str
    """Arguments of pytest."""


def of(file: str, tests: str, *rows: tuple[str, ...]) -> list[Mutant]:
    """Mutants of one file: (name, line, wrong), and perhaps which of the tests."""
    return [Mutant(name, file, line, wrong, " ".join((tests, *which))) for name, line, wrong, *which in rows]


def of_algorithms(*rows: tuple[str, str, str, str, str]) -> list[Mutant]:
    """Mutants that an algorithm's independent script should notice: (name, half, algorithm, line, wrong)."""
    return [
        Mutant(name, f"{half}/{algo}.py", line, wrong, f"{REFERENCE}/test_{algo}.py")
        for name, half, algo, line, wrong in rows
    ]


C, S, P = "client_app/algorithms", "server_app/strategies", "protofl_common"
REFERENCE = "tests/unit/reference"
STUDIES = "tests/federation/test_studies.py -k"
SUMS, SECAGG = "tests/unit/protofl_common/privacy/test_privacy_sums.py", "tests/federation/test_secagg.py -k"
MUTANTS = [
    # differential privacy
    Mutant(
        "a gradient that is not finite passes the clip",
        "client_app/protections/private_step.py",
        "gradient.nan_to_num_(0.0, 0.0, 0.0)",
        "gradient",
        "tests/unit/client_app/test_private_training.py",
    ),
    *of(
        f"{P}/privacy/release.py",
        "tests/unit/protofl_common/privacy/test_release.py",
        (
            "features that are not finite pass the clip",
            "torch.where(lengths_N1.isfinite(), rows_ND / lengths_N1.clamp(min=1), 0.0)",
            "rows_ND / lengths_N1.clamp(min=1)",
        ),
        ("two kinds of prediction have the noise of one", "math.sqrt(len(correct)) * noise", "noise"),
    ),
    Mutant(
        "any step may train what leaves under differential privacy",
        "client_app/protections/differential_privacy.py",
        "isinstance(step, PrivateStep) and",
        "",
        "tests/federation/test_privacy.py -k covered_row",
    ),
    Mutant(
        "evaluations are not charged",
        f"{P}/privacy/plan.py",
        "*self.of_evaluation() * evaluates",
        "*self.of_evaluation() * 0",
        "tests/unit/protofl_common/privacy/test_accountant.py",
    ),
    # secure aggregation
    *of(
        f"{P}/privacy/masks.py",
        SUMS,
        ("no mask of its own", "vector + own_mask(part(secret, OWN), len(vector))", "+vector"),
        ("masks do not cancel", "if site < peer else 0 - stream", "if site != peer else stream"),
    ),
    Mutant(
        "counts weigh nothing",
        f"{P}/wire/payloads.py",
        "torch.ones(len(value)) if counts_P is None",
        "torch.ones(len(value)) if True",
        SUMS,
    ),
    *of(
        "client_app/protections/secure_sum.py",
        SECAGG,
        (
            "a second upload under one secret",
            "(progress.run_id, progress.sum, progress.stage) != (self.run_id, self.sum_number, stage)",
            "progress.sum != self.sum_number",
            "tries",
        ),
        ("keys for a second upload", "if sent >= self.sum_number:", "if sent > self.sum_number:", "tries"),
        (
            "the next sum forgets what was sent",
            'self.next_sum, self.sum_number, "advertise"',
            'self.next_sum, -1, "advertise"',
            "tries",
        ),
        ("unmasking a site alone", "or len(sent) < self._threshold(progress.keys)", "", "tries"),
        ("figures in the clear", "return content, without_figures(report)", "return content, report", "no_single"),
        ("the secret of an upload stays", 'stage="mask", secret=b"", ', 'stage="mask", ', "forgotten"),
        (
            "a training that ends late opens its sum again",
            'self._passed("share")  # As when',
            "pass  # As when",
            "twice",
        ),
        ("two unmaskings at once", "locked(self.path) if", "nullcontext() if", "twice"),
        (
            "one secret for a round and the final evaluation",
            "2 * client.instructions.round + final",
            "2 * client.instructions.round",
            "tries",
        ),
    ),
    *of(
        "server_app/protections/secure_sum.py",
        SECAGG,
        ("lost ones' masks stay", "total -= masks.pair_mask", "masks.pair_mask", "missed"),
        ("two sites with the same keys", "publics.count(own[: masks.PUBLIC]) == 1", "True", "same_keys"),
    ),
    *of(
        "client_app/introduction.py",
        SECAGG,
        ("held classes are told", "and not hidden", "", "every_byte"),
    ),
    Mutant(
        "an error is no answer",
        "client_app/app.py",
        "if error is None or isinstance(error, Exception):",
        "if error is None:",
        "tests/federation/test_sites.py -k error_is_an_answer",
    ),
    Mutant(
        "control variates are not cut",
        "server_app/strategies/scaffold.py",
        "self.cut(uploads, ",
        "(lambda _, sets, start: sets)(uploads, ",
        "tests/federation/test_robust_merging.py -k scaffolds",
    ),
    # consent, the audit log, and who is in a sum
    *of(
        "client_app/consent.py",
        STUDIES,
        (
            "an upgrade of the code is not asked about",
            "request.decision == APPROVED and request.code != code_of(config)",
            "False",
            "anew",
        ),
        ("a denial is not looked up", "if request.decision == DENIED:", "if False:", "denial"),
        ("an approval never ends", "if is_past(request.until):", "if False:", "ends"),
        ("a study never ends", "if is_past(study.until):", "if False:", "ends"),
        ("runs are not counted", "if most and len(now) > most:", "if False:", "ends"),
        ("messages are not counted", "**{kind: number}", "**{kind: 0}", "asks_no_more"),
        ("each run has messages of its own", "min(len(now), MOST_RUNS)", "len(now)", "asks_no_more"),
        (
            "a study without this site",
            "if study.sites and study.sites.get(name) != in_text(site_key(folder).public_key()):",
            "if False:",
            "third",
        ),
        (
            "another key of this site in a study",
            "study.sites.get(name) != in_text(site_key(folder).public_key())",
            "name not in study.sites",
            "another_key",
        ),
    ),
    Mutant(
        "final evaluations are not counted as runs",
        "client_app/client.py",
        '"counts": message.metadata.message_type != MessageType.QUERY',
        '"counts": self.trains_now',
        f"{STUDIES} alone_counts",
    ),
    Mutant(
        "a site evaluates in every round",
        "client_app/client.py",
        "self.settings.evaluates(self.instructions.round)",
        "True",
        "tests/federation/test_sites.py -k evaluates_in",
    ),
    Mutant(
        "a question is refused after the data were read",
        "client_app/app.py",
        "                protection.before()",
        "                client.train_set and protection.before()",
        "tests/federation/test_sites.py -k answers_each_question_once",
    ),
    *of(
        "client_app/audit.py",
        STUDIES,
        (
            "a line of the log that was moved",
            'if entry and entry.get("before") != before:',
            "if False:",
            "somebody_changed",
        ),
        (
            "a reply that could not be recorded leaves",
            'raise AuditError(f"state-dir: {path.absolute()} cannot be written ({error})") from error',
            "return START",
            "recorded",
        ),
    ),
    *of(
        "client_app/protections/secure_sum.py",
        STUDIES,
        ("a sum with one site fewer", "if 0 < len(few) < FEWEST_SUMMED", "if 0 < len(few) < 0", "difference"),
        (
            "another study's sum is another sum",
            'use = f"{[entry.words for entry in settings.exchange.up.values()]}: {self.sum_number}"',
            'use = f"{self.client.study.id}: {self.sum_number}"',
            "difference",
        ),
        (
            "keys for the next sum that are signed for this one",
            "content.update(self._keys(following, self.next_sum, NEXT_SUM))",
            "content.update(self._keys(following, self.sum_number, NEXT_SUM))",
            "sum_is_with",
        ),
        (
            "keys for a sum that nobody signed",
            "if not is_from_site(self.client.settings.study, site, self.run_id, purpose, both[masks.PUBLIC :]):",
            "if False:",
            "sum_is_with",
        ),
        (
            "the threshold of a study counts only who is shown",
            "needed(max(len(keys), len(self.client.named_sites)),",
            "needed(len(keys),",
            "few_others",
        ),
    ),
    *of(
        f"{P}/experiment/study.py",
        STUDIES,
        ("a study that nobody signed", "if name and not is_signed(", "if False and not is_signed(", "signature"),
    ),
    # prototypes
    Mutant(
        "class means by sum",
        f"{P}/maths/prototypes.py",
        "/ counts_C[labels_P].unsqueeze(1)",
        "",
        f"{REFERENCE}/test_fedproto.py",
    ),
    Mutant(
        "counts do not weigh",
        f"{P}/maths/aggregation.py",
        "weights_P = every.counts.double()",
        "weights_P = torch.ones(len(every), dtype=torch.float64)",
        f"{REFERENCE}/test_fedproto.py",
    ),
    Mutant(
        "an absent class is lost",
        f"{P}/maths/aggregation.py",
        "merged.completed_by(previous)",
        "merged",
        "tests/unit/protofl_common/maths/test_prototypes.py",
    ),
    Mutant(
        "cosine without lengths",
        f"{P}/maths/prototypes.py",
        "normalize(features_ND, dim=1), normalize(means, dim=1)",
        "features_ND, means",
        "tests/unit/protofl_common/maths/test_prototypes.py",
    ),
    Mutant(
        "FINCH by L2",
        f"{P}/maths/prototypes.py",
        'distance="cosine"',
        'distance="euclidean"',
        "tests/unit/protofl_common/maths/test_clustering.py",
    ),
    # losses
    Mutant(
        "classes without a prototype count",
        f"{P}/maths/losses.py",
        "(distances_B * present_C[labels_B]).sum()",
        "distances_B.sum()",
        "tests/unit/protofl_common/maths/test_losses.py",
    ),
    Mutant(
        "margin subtracted",
        f"{P}/maths/losses.py",
        "distances_PK + margin * own_PK",
        "distances_PK - margin * own_PK",
        f"{REFERENCE}/test_fedtgp.py",
    ),
    *of(
        f"{P}/maths/losses.py",
        "tests/unit/protofl_common/maths",
        (
            "FedPLVM's denominator without the own class",
            "torch.logsumexp(scaled_BG, dim=1) - own_B",
            "torch.logsumexp(scaled_BG.masked_fill(own_BG, -torch.inf), dim=1) - own_B",
        ),
        ("FedPCL's A(y) with y", "if with_own else present_BMC & ~own_B1C", "if with_own else present_BMC"),
    ),
    Mutant(
        "KL the other way round",
        f"{P}/maths/losses.py",
        "kl_div(log_softmax(logits_BC, dim=1), targets_BC,",
        "kl_div(targets_BC, log_softmax(logits_BC, dim=1),",
        "tests/unit/protofl_common/maths/test_distillation.py",
    ),
    # training and evaluation
    Mutant(
        "one order of batches for all clients",
        f"{C}/base.py",
        "derive_seed(self.settings.run.seed, purpose, self.client.name, self.round)",
        "derive_seed(self.settings.run.seed, purpose, self.round)",
        f"{REFERENCE}/test_fedproto.py",
    ),
    Mutant(
        "evaluated in training mode",
        "client_app/evaluation.py",
        "    model.eval()\n    hits",
        "    hits",
        "tests/federation/test_inference.py -k exported",
    ),
    Mutant(
        "prototypes in training mode",
        "client_app/evaluation.py",
        "    model.eval()\n    return torch.cat",
        "    return torch.cat",
        f"{REFERENCE}/test_fedpcl.py",
    ),
    Mutant(
        "evaluated after training",
        "client_app/app.py",
        "        self.evaluated = Evaluated(self.algorithm)\n",
        "        self.algorithm.fit()\n        self.evaluated = Evaluated(self.algorithm)\n",
        "tests/unit/client_app/test_algorithm.py -k come_in_their_order",
    ),
    Mutant(
        "predict-among = own looks at test labels",
        "client_app/app.py",
        "torch.from_numpy(client.large_classes).to(client.device)",
        "client.test_set.labels.unique()",
        "tests/unit/client_app/test_evaluation.py",
    ),
    Mutant(
        "best round chosen on test data",
        f"{P}/runs/over_clients.py",
        "validated = any(kind in _choosing(row, validated=True) for row in considered)",
        "validated = False",
        "tests/unit/protofl_common/runs/test_over_clients.py tests/unit/tools/tables/test_figure.py",
    ),
    Mutant(
        "trained on validation data",
        f"{P}/data/division.py",
        "return train[stay], train[aside]",
        "return train, train[aside]",
        "tests/unit/protofl_common/data/test_division.py",
    ),
    Mutant(
        "learning rate of the first round in all",
        "client_app/training.py",
        "passed = settings.training, max(0, number - 1)",
        "passed = settings.training, 0",
        "tests/unit/client_app/test_training.py -k learning_rate",
    ),
    Mutant(
        "worst tenth is the best",
        f"{P}/runs/over_clients.py",
        'reverse=end == "best"',
        'reverse=end == "worst"',
        "tests/unit/protofl_common/runs/test_over_clients.py",
    ),
    # averaging
    Mutant(
        "statistics are not averaged",
        f"{P}/maths/aggregation.py",
        "values = [weights[name] for weights in sets]",
        'values = [weights[name] if "running" not in name else one for weights in sets]',
        f"{REFERENCE}/test_fedavg.py",
    ),
    Mutant(
        "the averaged model is not loaded",
        f"{C}/base.py",
        "module.load_state_dict(weights, strict=False)",
        "module.load_state_dict({}, strict=False)",
        f"{REFERENCE}/test_fedavg.py",
    ),
    Mutant(
        "the trimmed mean drops one end",
        f"{P}/maths/aggregation.py",
        "ordered[dropped : len(ordered) - dropped]",
        "ordered[dropped:]",
        "tests/federation/test_robust_merging.py -k numpy",
    ),
    *of_algorithms(
        ("clients are not weighted", S, "fedavg", "upload.train_samples / total for", "1 / len(sent) for"),
    ),
    # algorithms
    Mutant(
        "FedTGP sends the prototypes of the round before",
        f"{S}/base.py",
        'return self.global_weights if name == "weights" else getattr(self, name, None)',
        "before, self.before = getattr(self, 'before', None), getattr(self, name, None)\n        return before",
        f"{REFERENCE}/test_fedtgp.py",
    ),
    Mutant(
        "FPL averages in place of FINCH",
        f"{P}/experiment/catalog.py",
        'kmeans_clusters = "finch"',
        'kmeans_clusters = "average"',
        f"{REFERENCE}/test_fpl.py",
    ),
    Mutant(
        "FedTGP's default sums over classes",
        "pyproject.toml",
        'granularity = "class-mean"',
        'granularity = "class"',
        f"{REFERENCE}/test_fedtgp.py",
    ),
    Mutant(
        "FedPLVM forgets classes",
        f"{S}/fedplvm.py",
        "merged.completed_by(self.prototypes)",
        "merged",
        "tests/unit/server_app/test_absent.py",
    ),
    Mutant(
        "FedPCL forgets clients",
        f"{S}/fedpcl.py",
        "self.sets |= {",
        "self.sets = {",
        "tests/unit/server_app/test_absent.py",
    ),
    Mutant(
        "Ditto pushes away",
        "client_app/training.py",
        "grad.add_(parameter - centre, alpha",
        "grad.sub_(parameter - centre, alpha",
        f"{REFERENCE}/test_ditto.py",
    ),
    Mutant(
        "FedGH: the optimizer's sign",
        "server_app/training.py",
        "value.backward()",
        "(-value).backward()",
        f"{REFERENCE}/test_fedgh.py",
    ),
    Mutant(
        "FedFA: coefficients upside down",
        f"{P}/models/augmentation.py",
        "part_C = variance_C / (variance_C + 1)",
        "part_C = 1 / (variance_C + 1)",
        f"{REFERENCE}/test_fedfa.py tests/unit/protofl_common/models",
    ),
    Mutant("FedORGP: γ's sign", f"{P}/maths/losses.py", "+ gamma *", "- gamma *", f"{REFERENCE}/test_fedorgp.py"),
    Mutant(
        "FedSA: an absent class moves its anchor",
        f"{S}/fedsa.py",
        'means = self.merged(uploads, "uniform", None)',
        'means = self.merged(uploads, "uniform", self.prototypes)',
        f"{REFERENCE}/test_fedsa.py tests/unit/server_app",
    ),
    Mutant(
        "private heads start apart",
        "client_app/client.py",
        '"global" if self.settings.starts_alike else self.name',
        "self.name",
        f"{REFERENCE}/test_fedper.py",
    ),
    Mutant(
        "MPFT rounds the number of clusters down",
        f"{P}/maths/prototypes.py",
        "math.ceil(ratio * len(rows_ND))",
        "int(ratio * len(rows_ND))",
        f"{REFERENCE}/test_mpft.py",
    ),
    *of_algorithms(
        (
            "FedTGP begins anew in each round",
            S,
            "fedtgp",
            "        samples_PD, labels_P = together(uploads)\n        margin",
            "        self.__init__(self.federation)\n        samples_PD, labels_P = together(uploads)\n        margin",
        ),
        ("FedTGP begins at 0", S, "fedtgp", "torch.randn(self.num_classes, dim)", "torch.zeros(self.num_classes, dim)"),
        (
            "FedTGP's margin of client prototypes",
            S,
            "fedtgp",
            "centres_KD = class_means(samples_PD, labels_P, self.num_classes).means",
            "centres_KD = samples_PD",
        ),
        ("FedPCL unweighted", S, "fedpcl", 'self.merged(uploads, "counts"', 'self.merged(uploads, "uniform"'),
        (
            "FedPCL predicts by global prototypes",
            C,
            "fedpcl",
            "return chosen(self.local_prototypes(), large_K).to(self.client.device)",
            "return self.global_prototypes or self.local_prototypes()",
        ),
        ("FedProx pulls half as much", C, "fedprox", "self.hparams.mu / 2 *", "self.hparams.mu / 4 *"),
        (
            "FML's targets learn",
            C,
            "fml",
            "divergence(logits_BC, target_BC.detach())",
            "divergence(logits_BC, target_BC)",
        ),
        (
            "FedKD's targets learn",
            C,
            "fedkd",
            "divergence(batch.logits, student_BC.detach())",
            "divergence(batch.logits, student_BC)",
        ),
        ("Per-FedAvg evaluates w", C, "per_fedavg", "        return self._adapted\n", "        return self.model\n"),
        (
            "pFedMe's β reversed",
            S,
            "pfedme",
            "torch.lerp(before[name], self.weights[name]",
            "torch.lerp(self.weights[name], before[name]",
        ),
        (
            "FedDistill: the own output teaches",
            S,
            "feddistill",
            "for other in in_order(self.outputs) if other != site",
            "for other in in_order(self.outputs)",
        ),
        (
            "FedGen: labels alike",
            S,
            "fedgen",
            "torch.stack(counts).sum(dim=0)",
            "torch.stack(counts).sum(dim=0).clamp(max=1)",
        ),
        ("FedNH: ρ reversed", S, "fednh", "rho * previous_PD + (1 - rho) *", "(1 - rho) * previous_PD + rho *"),
        (
            "FedSA: anchors follow at once",
            S,
            "fedsa",
            "means.means.lerp(self.anchors_CD[means.labels], self.hparams.smoothing)",
            "means.means",
        ),
        (
            "FeSEM clusters anew in each round",
            S,
            "fesem",
            "self._nearest(points) if self.cluster_of else self._first_clusters(points)",
            "self._first_clusters(points)",
        ),
        ("FPL: cosines below zero count as zero", C, "fpl", "floor=-1.0", "floor=0.0"),
        (
            "FedRep: evaluation fits the head",
            C,
            "fedrep",
            "    def _fit_head(self)",
            "    def evaluation_model(self):\n        self._fit_head()\n        return self.model\n\n"
            "    def _fit_head(self)",
        ),
        ("Per-FedAvg: one pass an epoch", C, "per_fedavg", "2 * training.local_epochs", "training.local_epochs"),
        ("MPFT forgets clients", S, "mpft", "self.centres |= ", "self.centres = "),
        ("MPFT sends averages", C, "mpft", "ratio=ratio", "clusters=1"),
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if not options.names or any(part in one.name for part in options.names)]
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        killed = list(pool.map(notice, chosen))
    survivors = [one.name for one, found in zip(chosen, killed, strict=True) if not found]
    share = 100 * sum(killed) / max(1, len(chosen))
    print(f"{sum(killed)} of {len(chosen)} killed ({share:.0f} %) in {time.monotonic() - start:.0f} s")
    print(f"survive: {'; '.join(survivors) or 'none'}")
    return bool(survivors)


def notice(mutant: Mutant) -> bool:
    """Whether a test fails for it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, tracked.stdout.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        text = (copy / mutant.file).read_text(encoding="utf-8")
        if text.count(mutant.line) < 1:
            raise SystemExit(f"{mutant.name}: {mutant.file} has no {mutant.line!r} any more")
        (copy / mutant.file).write_text(text.replace(mutant.line, mutant.wrong), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        done = subprocess.run([*command, *mutant.tests.split()], cwd=copy, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
        print(f"{'killed  ' if done.returncode else 'SURVIVES'}  {mutant.name}", flush=True)
        return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
