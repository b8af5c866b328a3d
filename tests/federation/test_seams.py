"""Attacks where two protections of a site meet.

The messages and settings of a hostile server or submitter are well-formed; what must hold is what
the site answers.
"""

import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType

from protofl_common.experiment.settings import Settings, digest_of
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.trained import TrainedModel
from protofl_common.wire.payloads import Payload, pack_payload
from protofl_common.wire.records import pack_settings
from tests.support.attacks import interrupted
from tests.support.harness import CACHE, RUN_ID, LocalGrid, instructions, reason_in, run_config
from tests.support.sites import make_site_keys

PATIENTS = 120
NODE = 7
"""Flower's number of the site."""


def write_table(folder, rare, rare_tested, sign):
    """Write records of which ``rare`` training and ``rare_tested`` test samples are of class 2.

    All others are of 0 and 1. The inputs of the test samples of class 2 are multiplied by ``sign``.
    """
    index = np.arange(PATIENTS)
    split = np.array(["train", "test"])[index // 2 % 2]  # two for training, two for testing, …
    labels = (index % 2).astype(np.int64)
    training = np.flatnonzero(split == "train")
    labels[training[:rare]] = 2
    tested = np.flatnonzero((split == "test") & (labels == 1))[:rare_tested]
    labels[tested] = 2

    inputs = np.random.default_rng(5).normal(size=(PATIENTS, 6)).astype(np.float32)
    inputs[tested] *= sign

    folder.mkdir(exist_ok=True)
    np.savez(folder / "data.npz", inputs=inputs, labels=labels, split=split)
    return folder / "data.npz"


def write_site(folder, rare=0, rare_tested=None, sign=1, **node):
    """Write a table by `write_table`, and return the node config of a site with it.

    ``rare_tested`` is ``rare`` unless given; ``node`` are further entries.
    """
    data = write_table(folder, rare, rare if rare_tested is None else rare_tested, sign)
    facts = {
        "site-name": "north",
        "dataset": "arrays",
        "classes": "0,1,2",
        "data-dir": str(data),
        "state-dir": str(folder / "state"),
        **CACHE,
    }
    if "partition-id" not in node:  # of a share of common data, the run chooses the test samples
        facts["test-from"] = "official-own"
    return facts | node


def study(folder, **settings):
    """Return the settings of a run on tables of `write_table`."""
    facts = {
        "dataset": "arrays",
        "partition": "own",
        "classes": "0,1,2",
        "models": "mlp-1",
        "feature_dim": 4,
        "train_samples": 0,
        "test_samples": 0,
        "rounds": 3,
    }
    return run_config(folder, **facts | settings)


def ask(node, config, kind, number=1, history="", run_id=RUN_ID, name="study", **records):
    """Ask a site with a message of this kind and round, and return its reply.

    ``history`` is what the server says of the run's history, by default that it has none before
    ``run_id``; ``name`` is the run's, and ``records`` are further records of the message.
    """
    grid = LocalGrid(config, {NODE: node}, run_id=run_id)
    content = instructions(number, run_name=name, run_history=history or str(run_id))
    content.update({**pack_settings(digest_of(config)), **records})
    return grid.ask(Message(content, NODE, kind, group_id=str(number)))


def prototypes_of(*labels):
    """Return a message's records with one prototype of each label, the last at the origin.

    The others are 30 and more away in each of four numbers: the last is the nearest to every
    sample.
    """
    numbers = torch.linspace(90, 0, len(labels) + 1)[1:]  # for three labels 60, 30 and 0
    means = numbers[:, None].repeat(1, 4)
    payload = Payload(prototypes=Prototypes(means, torch.tensor(labels)))
    settings = Settings.from_run_config(study(Path("."), algo="fedproto"))
    return pack_payload(payload, settings.exchange.down)


# -- what a site says of a hostile message or setting --------------------------------------------

SHARE = {"partition-id": 0, "num-partitions": 1}
"""With a ``partition-id`` the run would choose who is a test sample."""
DP = {"dp": "sample", "norm": "group"}

REFUSED = {
    "small classes alone": (
        {"min-class-samples": 31},
        {"algo": "fedavg"},
        "min-class-samples = 31: this client has no class of",
    ),
    "a share of common data, of which small classes are hidden": (
        {"min-class-samples": 9, **SHARE},
        DP,
        "node-config: partition-id: ",
    ),
    "a share of common data under noise": (
        {"require-dp": "epsilon<=8", **SHARE},
        DP,
        "node-config: partition-id: ",
    ),
    "a share of common data under masks": (
        {"require-secagg": True, "peers": f"south:{'S' * 43}, east:{'E' * 43}", **SHARE},
        {**DP, "secagg": True},
        "node-config: partition-id: ",
    ),
}
"""Case -> the site's own settings, the run's, and what the site says."""


@pytest.mark.parametrize("kind", [MessageType.QUERY, MessageType.TRAIN, MessageType.EVALUATE])
@pytest.mark.parametrize("case", REFUSED)
def test_a_site_refuses_whichever_message_comes_first(case, kind, tmp_path):
    """A server that sends a training at once gets the refusal that the introduction would give."""
    node, settings, line = REFUSED[case]

    reply = ask(write_site(tmp_path, **node), study(tmp_path, **settings), kind)

    assert line in reason_in(reply)


def test_a_private_run_does_not_go_on_from_a_model_trained_without_noise(tmp_path):
    """The ledger was not charged for that model, which a private run's uploads would tell."""
    node = write_site(tmp_path)
    without_noise = study(tmp_path, algo="fedper", norm="group")

    assert not ask(node, without_noise, MessageType.TRAIN).has_error()

    private = without_noise | {"dp": "sample", "dp-epsilon": 8.0}
    node |= {"require-dp": "epsilon<=8"}
    # run 4712 says that it goes on with the first after its round 1
    history = f"{RUN_ID}:1,4712"
    reply = ask(node, private, MessageType.TRAIN, number=2, history=history, run_id=4712)

    assert "StateError" in reason_in(reply)


def test_a_server_that_changes_the_name_of_a_run_has_no_new_budget(tmp_path, monkeypatch):
    """Asked for one round under name after name, the site is charged for each, until it refuses.

    Each time it is killed before its answer is ready: that is charged, too.
    """
    config = study(tmp_path, algo="fedavg", norm="group", dp="sample")
    node = write_site(tmp_path)
    monkeypatch.setattr("client_app.app.make_report", interrupted)

    refused = []
    for number in range(20):
        with suppress(KeyboardInterrupt):
            reply = ask(node, config, MessageType.TRAIN, name=f"study-{number}")
            refused.append(reason_in(reply))

    assert 0 < len(refused) < 20
    assert refused[0].startswith("dp-epsilon = 8: this message would bring this client to ε = 8")


NETWORK = """
import torch
class Talkative(torch.nn.Module):
    def __init__(self, input_shape, feature_dim):
        super().__init__()
        self.layer = torch.nn.Linear(input_shape[0], feature_dim)
    def forward(self, x):
        if len(x) == 2:
            raise ValueError(f"numbers {x.tolist()}")
        return self.layer(x)
"""


def test_the_first_look_at_a_network_shows_it_no_sample(tmp_path, monkeypatch):
    """A network is tried on zeros: its error goes to the server, and may quote what it was given.

    `Talkative` quotes two samples of six numbers.
    """
    (tmp_path / "talkative.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "talkative", raising=False)
    node = write_site(tmp_path, **{"allow-python": "talkative"})

    reply = ask(node, study(tmp_path, arch="talkative:Talkative"), MessageType.QUERY)

    zeros = "[0.0, 0.0, 0.0, 0.0, 0.0, 0.0]"
    assert f"numbers [{zeros}, {zeros}]" in reason_in(reply)


# -- what figures tell of a small class ----------------------------------------------------------


@pytest.mark.parametrize(
    ("among", "sent", "right"), [("own", (0, 2), PATIENTS // 4), ("all", (0, 1, 2), 0)]
)
def test_figures_do_not_tell_a_small_class(among, sent, right, tmp_path):
    """Whether the site has no sample of class 2 or one, it reports as many right predictions.

    The prototype of class 2, sent last, is the nearest to every sample, so otherwise the server
    would see whether the site has the class, or how often. Among its own classes the site predicts
    0 each time, which is right for half of its test samples, a quarter of the patients; among all
    it predicts 2, which never counts as right.
    """
    config = study(tmp_path, algo="fedproto", predict_among=among)
    for rare in (0, 1):
        node = write_site(tmp_path / str(rare), rare, **{"min-class-samples": 5})
        reply = ask(node, config, MessageType.TRAIN, **prototypes_of(*sent))

        assert not reply.has_error()
        assert reply.content["report"]["correct.prototype"] == right


@pytest.mark.parametrize(
    ("rare_tested", "test_samples", "head_metrics", "same"),
    [
        (3, 57, 5, ("metrics", "test_samples", "correct")),
        (12, 60, 3, ("metrics", "test_samples")),
    ],
)
def test_no_metric_tells_a_small_class(rare_tested, test_samples, head_metrics, same, tmp_path):
    """The site has nine training samples of class 2, and few test samples.

    Metrics are the same whatever inputs the test samples of class 2 have (``sign``). With three,
    fewer than min-class-samples, these samples are no test samples at all. Twelve are too few for
    metrics, and only the number of right predictions counts them.
    """
    config = study(tmp_path, algo="fedproto", metrics="balanced-accuracy,macro-f1,auc,recall")
    figures = {}
    for sign in (1, -3):
        hiding = {"min-class-samples": 5}
        node = write_site(
            tmp_path / str(sign), rare=9, rare_tested=rare_tested, sign=sign, **hiding
        )
        reply = ask(node, config, MessageType.TRAIN, **prototypes_of(0, 1, 2))
        report = reply.content["report"]
        figures[sign] = {name: report[name] for name in report if name.startswith(same)}

    found = figures[1]
    assert found == figures[-3]
    assert found["test_samples"] == test_samples
    assert len([name for name in found if name.startswith("metrics.head/")]) == head_metrics


def test_exact_numbers_do_not_tell_a_small_class_under_dp(tmp_path):
    """Whether class 2 has five samples, the least, or four, depends on a single one.

    So under dp the introduction names all classes and all samples in both cases.
    """
    config = study(tmp_path, algo="fedproto", norm="group", dp="sample", min_class_samples=5)
    for rare in (4, 5):
        reply = ask(write_site(tmp_path / str(rare), rare), config, MessageType.QUERY)

        card = reply.content["site"]
        assert card["train_samples"] == card["test_samples"] == PATIENTS // 2
        assert card["found"] == PATIENTS
        assert card["present"] == [0, 1, 2]


def test_no_loss_leaves_where_small_classes_must_not(tmp_path):
    """With the prototype of class 2 alone, the prototype loss is that of its single sample.

    A site without min-class-samples reports its losses.
    """
    config = study(tmp_path, algo="fedproto")

    hiding = write_site(tmp_path, rare=1, **{"min-class-samples": 5})
    hidden = ask(hiding, config, MessageType.TRAIN, **prototypes_of(2))
    told = ask(write_site(tmp_path), config, MessageType.TRAIN, number=2, **prototypes_of(2))

    assert not [name for name in hidden.content["report"] if name.startswith("losses.")]
    assert "losses.prototype" in told.content["report"]


def test_however_many_questions_get_no_more_answers_than_the_ledger_pays(tmp_path):
    """A server asks 400 times: to train and to evaluate after rounds 1 to 4, of forty Flower runs.

    Each Flower run has ten questions, some of them twice.
    """
    epsilon = 0.2
    config = study(tmp_path, algo="fedavg", norm="group", dp="sample", dp_epsilon=epsilon, rounds=4)
    node = write_site(tmp_path, **{"require-dp": f"epsilon<={epsilon}"})
    # with require-dp a site without a key takes its disk for one that is not mounted
    make_site_keys(north=tmp_path / "state/sites/north")

    answered = []
    for question in range(400):
        kind = MessageType.EVALUATE if question % 2 else MessageType.TRAIN
        number = 1 + question // 2 % 4  # 1, 1, 2, 2, 3, 3, 4, 4, 1, …
        reply = ask(node, config, kind, number, run_id=RUN_ID + question // 10)
        if not reply.has_error():
            answered.append(question)

    assert len(answered) < 50
    assert answered[-1] < 250  # once the ledger is spent, no further run is answered


# -- a hostile run that names a Flower run of before as its own beginning --------------------------

THIEF = {"history": f"{RUN_ID}:1,4712", "run_id": 4712}
"""Flower run 4712, which says that it goes on with the study's run after its round 1."""


def best_after(number):
    """Return the record that asks to keep the model after a round as the best on test data."""
    return {"best": ConfigRecord({"after": number, "on": "test"})}


def test_another_run_does_not_replace_the_best_model_of_a_study(tmp_path):
    """The study's run has kept its best model when the other one asks to keep another."""
    node = write_site(tmp_path)
    config = study(tmp_path, algo="fedproto", keep_best=True)
    ask(node, config, MessageType.TRAIN)
    ask(node, config, MessageType.EVALUATE)
    ask(node, config, "query.best", **best_after(1))
    (model,) = tmp_path.rglob("best.safetensors")
    best = model.read_bytes()

    ask(node, config, MessageType.EVALUATE, number=3, **THIEF)
    ask(node, config, "query.best", number=3, **THIEF, **best_after(3))

    assert best in [file.read_bytes() for file in model.parent.glob("best*.safetensors")]


def test_another_run_does_not_remove_what_may_become_the_best_model_of_a_study(tmp_path):
    """While the study's run trains, other runs that say they go on with it ask to keep a model.

    The study's own candidate, its model after round 0, stays until the study asks for it.
    """
    node = write_site(tmp_path)
    config = study(tmp_path, algo="fedproto", keep_best=True)
    ask(node, config, MessageType.TRAIN)
    (candidate,) = tmp_path.rglob("evaluated-0*.safetensors")

    ask(node, config, MessageType.TRAIN, number=2, **THIEF)
    ask(node, config, "query.best", number=2, **THIEF, **best_after(1))

    assert candidate.exists()

    third_run = {"history": f"{RUN_ID}:0,4713", "run_id": 4713}
    ask(node, config, MessageType.TRAIN, number=1, **third_run)
    assert len(list(tmp_path.rglob("evaluated-0*.safetensors"))) == 2

    ask(node, config, "query.best", **best_after(0))
    (model,) = tmp_path.rglob("best.safetensors")
    card = TrainedModel.read(model).card

    assert (card.round, card.flower_run) == (0, str(RUN_ID))
