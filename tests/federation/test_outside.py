"""A package of somebody else's, installed beside this one: its method, network and data.

They act as our own do. It is `tests/support/outside`, of docs/extend.md and halves.md.
"""

import dataclasses
import json
import re
import shlex
import sys
from functools import partialmethod
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from client_app.algorithms.base import ClientAlgorithm, client_half
from client_app.learning.training import Batch, Step
from protofl_common.algorithms.base import Hparams
from protofl_common.basics.files import digest
from protofl_common.config.options import SettingsError, option
from protofl_common.config.python_code import version_of
from protofl_common.config.python_names import allow, load
from protofl_common.data.door import KEYS
from protofl_common.experiment import catalog as plugins
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import NODE_KEYS
from protofl_common.experiment.settings import check_settings_act, known_keys
from protofl_common.tools.arguments import read_assignments
from protofl_common.tools.cli import parsed
from protofl_common.tools.inference import Predictor
from protofl_common.tools.tables.plan import Runs, plan
from protofl_common.tools.tables.search import Search, check_search
from protofl_common.tools.tables.spec import read_table
from protofl_common.wire.schema import Counts, Entry, Exchange, Update, Vectors, VectorSets, Weights
from server_app.network.membership import FederationError
from server_app.run.replies import Upload
from server_app.strategies.base import ServerStrategy, server_half
from server_app.strategies.fedavg import FedAvg
from tests.support import ROOT
from tests.support.accidents import CLIENTS, PLACES, run_until_stopped
from tests.support.commands import export_model
from tests.support.fakes import server_of
from tests.support.harness import (
    client_of,
    federate,
    refusal,
    rows_without_a_reply,
    run_config,
    run_federation,
    settings_of,
)
from tests.support.installed import OUTSIDE, install_into, pyproject
from tests.support.plain import assert_close, weights_left
from tests.support.results import assert_same, assert_same_models, metrics, models_left
from tests.support.sites import real_sites

PAGE = "\n".join(
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("extend", "halves")
)
NOTEBOOK = ROOT / "docs" / "notebooks" / "scaffold.ipynb"
STRIPES = {
    "dataset": "outside_moon.data:stripes",
    "partition": "iid",
    "train_samples": 30,
}
VIT = "outside_moon.net:TinyViT"
MOON = {"algo": "my-moon", "models": VIT, **STRIPES}


def forget_package():
    """Let this process be as before it imported the package outside_moon."""
    for name in list(sys.modules):
        if name == "outside_moon" or name.startswith("outside_moon."):
            del sys.modules[name]
    plugins.algorithm_named.cache_clear()


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory):
    return install_into(tmp_path_factory.mktemp("site-packages"))


@pytest.fixture(autouse=True)
def _installed(site_packages, monkeypatch):
    forget_package()
    monkeypatch.syspath_prepend(site_packages)
    allow(["outside_moon"])
    yield
    forget_package()


# A user's own module: `brier` is a metric and `note` a callback, which note what they are given.
# The metrics `secretive` and `many` fail, `many` as it returns no number; so does `offline`.
OWN = """import json, numpy as np
given, rows = [], []
def brier(scores, labels):
    given.append((scores, labels))
    e = np.exp(scores - scores.max(1, keepdims=True))
    return ((e / e.sum(1, keepdims=True) - np.eye(scores.shape[1])[labels]) ** 2).sum(1).mean()
def secretive(scores, labels):
    raise ValueError('patient 7')
many = lambda scores, labels: scores
def note(row):
    rows.append(json.loads(json.dumps(row)))
    row.clear()
def offline(row):
    raise OSError('no network')
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write the module `OWN`, and return its name."""
    name = f"own_{digest(str(tmp_path))}"  # no other test has imported a module of this name
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def row():
    """Return the catalog's row of the package's method, MOON."""
    return plugins.algorithm_named("my-moon")


def half_of(config, number=2):
    """Return the half of a run's method at the first of four clients, in round ``number``."""
    site = client_of(config, partition=0, clients=4)
    return client_half(site.settings.row)(site, number)


def test_a_packages_method_is_found_by_its_entry_point(site_packages):
    """The modules that are imported are those of the installed package; its server is FedAvg's."""
    assert plugins.installed()["my-moon"].value == "outside_moon.method:ROW"
    assert row().title == "MOON"

    method = sys.modules[client_half(row()).__module__]
    for module in (method, import_module("outside_moon.net"), import_module("outside_moon.data")):
        assert Path(str(module.__file__)).is_relative_to(site_packages)
    assert server_half(row()) is server_half(CATALOG["fedavg"])


@pytest.mark.parametrize("models", ["cnn4", VIT])
def test_a_packages_method_never_takes_the_fused_step(models, tmp_path):
    """A step is fused only where the loss and the layers are this project's."""
    half = half_of(run_config(tmp_path, **MOON | {"models": models}))
    assert type(half.step()) is Step


@pytest.mark.parametrize(("changes", "reason"), [
    ({"algo": "my-mooon"},
     r"algo = 'my-mooon': choose one of ditto, .*, my-moon \(did you mean my-moon\?\)"),
    ({"my-moon.mu": 2.0},
     "^my-moon.mu: unknown key; hyper-parameters of a package's algorithm stand in hparams$"),
    ({"algo": "fedprox", "hparams": "mu=1"},
     r"only for algorithms of other packages; set fedprox\.KEY instead"),
])  # fmt: skip
def test_wrong_names_keys_and_hparams_of_a_packages_method_are_refused(changes, reason):
    assert re.search(reason, refusal({"algo": "my-moon"} | changes))


@pytest.mark.parametrize("models", ["small3", "resnet4-imagenet-stem", VIT])
def test_moon_without_its_contrast_is_fedavg_to_the_last_bit(models, tmp_path):
    """On a CPU FedAvg may take the fused step, and a package's method never does."""
    settings = STRIPES | {"models": models, "test_samples": 30}
    fedavg = run_config(tmp_path / "fedavg", algo="fedavg", **settings)
    moon = run_config(tmp_path / "moon", algo="my-moon", hparams="mu=0", **settings)

    wanted = run_federation(fedavg, clients=3)
    found = run_federation(moon, clients=3)

    assert metrics(found) == metrics(wanted)
    assert_same_models(models_left(found), models_left(wanted))
    for client in found.rows[1]["clients"].values():
        assert client["losses"]["contrast"] == 0.0


def test_the_packages_moon_is_ours_but_for_rounding(tmp_path):
    """Ours has an independent script. Its steps are fused where they can be, a package's never."""
    settings = STRIPES | {"models": "cnn4", "rounds": 3}
    own = settings | {"algo": "moon", "moon__mu": 3.0, "moon__temperature": 0.7}
    ours = federate(tmp_path / "ours", clients=3, **own)
    outside = settings | {"algo": "my-moon", "hparams": "mu=3.0, temperature=0.7"}
    theirs = federate(tmp_path / "theirs", clients=3, **outside)

    assert_close(weights_left(theirs), weights_left(ours))
    for found, wanted in zip(theirs.rows, ours.rows, strict=True):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-3)


def test_stopped_at_every_place_and_resumed_it_is_bit_for_bit_the_same(tmp_path, monkeypatch):
    """MOON's run is stopped once at each of `PLACES`, in rounds 1 to 5, and resumed each time.

    Both halves are made to draw from PyTorch's own generator: the client's half as it receives,
    the server's as it merges.
    """

    def drawing(owner, given, *, hook):
        """Call the hook of a half, and add one random number to all weights."""
        result = hook(owner, given)
        drawn = 0.01 * torch.randn(())
        is_server = isinstance(owner, FedAvg)
        weights = owner.weights.values() if is_server else owner.model.parameters()
        for value in weights:
            value.data += drawn
        return result

    for half, name in ((client_half(row()), "receive"), (FedAvg, "merge")):
        monkeypatch.setattr(half, name, partialmethod(drawing, hook=getattr(half, name)))
    more = {"rounds": 6, "run_name": "mine", "test_samples": 20, "participation": 0.5}
    settings = MOON | more | {"hparams": "mu=2.0"}
    wanted = federate(tmp_path / "whole", clients=CLIENTS, **settings)

    config = run_config(tmp_path / "parts", **settings)
    for number, place in enumerate(PLACES, start=1):
        run_until_stopped(config | {"resume": number > 1}, place, number, run_id=100 + number)

    with pytest.raises(SettingsError, match=r'hparams = "mu=1.0": the run has hparams = "mu=2.0"'):
        run_federation(config | {"resume": True, "hparams": "mu=1.0"}, clients=CLIENTS, run_id=200)

    found = run_federation(config | {"resume": True}, clients=CLIENTS, run_id=300)

    assert_same(found, wanted)
    # of the five places only the last, after the checkpoint, keeps its own round
    assert found.summary["resumed-after-rounds"] == [0, 1, 2, 3, 5]


NEGATIVE_MU = "hparams: mu = -1.0: must be a number at least 0"
HAS = "it has mu, temperature"


@pytest.mark.parametrize(("text", "reason"), [
    ("mu=-1", NEGATIVE_MU),
    ("temperature=0", "hparams: temperature = 0.0: must be a number above 0"),
    ("mu=much", "hparams: mu = 'much': must be a number at least 0"),
    ("mu=NaN",
     "hparams: mu = nan: must be a finite number at least 0 (in float32, up to 3.4e+38)"),
    ("nu=1", f"hparams: nu: unknown key; {HAS}"),
    ("mu=1, temprature=2",
     f"hparams: temprature: unknown key; did you mean temperature?; {HAS}"),
    ("mu", "hparams = 'mu': 'mu' is not KEY=VALUE"),
    ("mu=1, mu=2", "hparams = 'mu=1, mu=2': mu stands twice"),
    ("mu=-1, nu=3, temperature=-2",
     f"hparams: nu: unknown key; {HAS}\n{NEGATIVE_MU}\n"
     "hparams: temperature = -2.0: must be a number above 0"),
])  # fmt: skip
def test_wrong_hparams_are_all_named_with_key_and_value(text, reason):
    assert refusal({"algo": "my-moon", "hparams": text}) == reason


@dataclasses.dataclass(frozen=True)
class Choosing(Hparams):
    """Hyper-parameters of all four types."""

    similarity: str = option(default="cosine", choices=("cosine", "l2"))
    keep_last: int = option(default=1, minimum=1)
    lambda_: float = option(default=0.5)
    frozen: bool = option(default=True)


def read_as(kind, text):
    """Read a text as hyper-parameters of this class."""
    return plugins.read_hparams(dataclasses.replace(row(), hparams=kind), text)


def test_hparams_have_choices_and_every_kind_of_value():
    misspelt = r"^hparams: similarity = 'cosin': choose one of cosine, l2 \(did you mean"
    with pytest.raises(SettingsError, match=misspelt):
        read_as(Choosing, "similarity=cosin")
    assert read_as(Choosing, "") == Choosing()

    # spaces and an empty entry are no error; the field lambda_ is written lambda
    found = read_as(Choosing, " similarity = l2,keep-last=3, lambda=2,, frozen=false")
    assert found == Choosing(similarity="l2", keep_last=3, lambda_=2.0, frozen=False)


@dataclasses.dataclass(frozen=True)
class Plain(Hparams):
    """Fields without `option`, one of a type that no setting has."""

    mu: float = 1.0
    betas: list[float] = dataclasses.field(default_factory=list)


class Undecorated(Hparams):
    """Lacks @dataclass."""

    mu: float = option(default=1.0)


def test_hparams_need_no_option():
    """A field with a plain default is a hyper-parameter like one with `option`."""
    alone = dataclasses.make_dataclass("Alone", [("mu", float, 1.0)], bases=(Hparams,), frozen=True)
    assert read_as(alone, "mu=2") == alone(2.0)


def test_hparams_need_a_type_that_can_be_written():
    with pytest.raises(SettingsError) as caught:
        read_as(Plain, "mu=much, betas=3")
    assert str(caught.value).splitlines() == [
        "hparams: mu = 'much': must be a number",
        "hparams: betas = ['3']: its type is list[float]; a setting is a bool, int, float or str",
    ]


def test_hparams_need_their_decorator():
    missing = r"write @dataclass\(frozen=True\) above class Undecorated\(Hparams\)"
    with pytest.raises(SettingsError, match=missing):
        read_as(Undecorated, "")


def test_a_setting_of_another_algorithm_says_where_those_of_a_package_stand():
    no_effect = r"no effect on my-moon, which reads my-moon\.mu, my-moon\.temperature$"
    with pytest.raises(SettingsError, match=no_effect):
        check_settings_act({"fedprox.mu": 2.0}, settings_of({"algo": "my-moon"}))


def test_a_packages_hyper_parameters_are_keys_like_ours():
    """The key ``my-moon.mu`` wins over ``mu`` in hparams, and takes its place there."""
    config = {"algo": "my-moon", "hparams": "mu=3, temperature=0.1", "my-moon.mu": 2.5}
    assert plugins.with_hparams(config) == {
        "algo": "my-moon",
        "hparams": "mu=2.5,temperature=0.1",
    }
    assert plugins.with_hparams(config | {"algo": "fedavg", "hparams": ""})["hparams"] == ""
    assert "other.mu" in plugins.with_hparams({"algo": "my-moon", "other.mu": 1})


def test_a_packages_method_is_tuned_on_a_range_as_ours_are(tmp_path):
    """A table searches my-moon.mu and lr in three trials; the first has the default of mu."""
    path = tmp_path / "t.yaml"
    settings = {key.replace("_", "-"): value for key, value in MOON.items()}
    settings["validation-fraction"] = 0.2
    rows = {"Outside": {"settings": {"my-moon.temperature": 0.25}}}
    search = {"my-moon.mu": {"log": [0.5, 8]}, "lr": {"log": [0.001, 0.1]}}
    content = {"title": "T", "columns": {"A": {}}, "settings": settings, "rows": rows}
    path.write_text(json.dumps(content | {"search": search, "trials": 3}))
    table = read_table(path)
    (cell,) = plan(table)
    check_search(table, [cell])
    trials = Search(table, cell, Runs(tmp_path))
    chosen = [run.settings.hparams for number in range(3) for run in trials.runs_of(number)]
    assert len({hparams.mu for hparams in chosen}) == 3
    assert {hparams.temperature for hparams in chosen} == {0.25}
    assert all(0.5 <= hparams.mu <= 8 for hparams in chosen)
    assert trials.settings_of(0)["my-moon.mu"] == 1.0


def test_code_that_is_edited_during_its_import_is_refused(tmp_path, own):
    """Its version would else be that of another text than the one that was imported.

    An edit after the import does not change the version: it is that of the code that runs.
    """
    file = tmp_path / f"{own}.py"
    file.write_text(
        "from pathlib import Path\nfile = Path(__file__)\n"
        "file.write_text(file.read_text() + '#')\ndef metric(): ...\n"
    )
    allow([own])
    with pytest.raises(SettingsError, match="was edited during its import; start again"):
        load(f"{own}:metric", "metrics")

    file.write_text("def metric(): ...\n")
    load(f"{own}:metric", "metrics")
    version_that_runs = version_of(own)
    file.write_text("broken(\n")

    assert version_of(own) == version_that_runs


class Summing(FedAvg[Any]):
    """A server with a `merge` of its own, which notes of how many clients each upload is."""

    seen: ClassVar[list[list[int]]] = []

    def merge(self, uploads):
        self.seen.append([upload.clients for upload in uploads])
        return {"uploads": torch.tensor(len(uploads))}


def change_row(monkeypatch, **fields):
    """Give MOON's row these fields, and `Summing` as its server."""
    moon = dataclasses.replace(row(), server="tests.federation.test_outside:Summing", **fields)
    monkeypatch.setattr("protofl_common.experiment.settings.algorithm_named", lambda name: moon)


UNDECLARED = "the row of my-moon does not declare that its server merges by it; choose"


@pytest.mark.parametrize(("key", "value", "sent", "why"), [
    ("secagg", True, Weights(),
     "my-moon needs single uploads, for its row does not declare support for secagg; choo"),
    ("secagg", True, Vectors(),
     "for its server does more with the clients' prototypes than average them; choo"),
    ("secagg", True, Vectors(several=True),
     "for a sum has one vector of each class, where its clients send several"),
    ("merging", "median", Weights(), f"{UNDECLARED} mean"),
    ("merging", "trimmed-mean", Weights(), "the row of my-moon does not declare"),
    ("liars", 1, Weights(), f"liars = 1: {UNDECLARED} 0"),
    ("max-update-ratio", 2.0, Weights(),
     "max-update-ratio = 2.0: the row of my-moon does not declare"),
])  # fmt: skip
def test_what_a_row_does_not_declare_is_refused(key, value, sent, why, monkeypatch):
    """A server's own `merge` would take the mean of all clients for the upload of one.

    Or it would ignore the setting. So the row must declare that its server can do with either.
    """
    config = {"algo": "my-moon", key: value}
    assert settings_of(config).run.algo == "my-moon"  # MOON's own row declares it

    several = sent == Vectors(several=True)
    exchange = Exchange(up={"sent": sent})
    change_row(monkeypatch, supports=(), averages_prototypes=several, exchange=exchange)
    refused = refusal(config)

    assert why in refused

    # the error names the fields of a row with which secure aggregation is declared
    _why, _, fields = refused.partition("; or set ")
    named = re.findall(r"supports|averages_prototypes", fields)
    assert len(named) == (2 if key == "secagg" else 0)
    for word in named:
        assert f"`{word}`" in PAGE or f"`{word}=" in PAGE


@pytest.mark.parametrize(("secagg", "uploads"), [(False, [1, 1, 1, 1]), (True, [4])])
def test_an_upload_says_of_how_many_clients_it_is(secagg, uploads, tmp_path, monkeypatch):
    """Four clients: the server gets four uploads, or with secure aggregation one of all four."""
    change_row(monkeypatch, supports=("secagg",))
    monkeypatch.setattr(Summing, "seen", [])

    run = federate(tmp_path, clients=4, **MOON, secagg=secagg, rounds=1)

    assert Summing.seen == [uploads]
    assert run.rows[0]["server"] == {"uploads": float(len(uploads))}


def test_uploads_must_have_the_names_of_what_is_merged(tmp_path, monkeypatch):
    """MOON's clients are said to send steps as well, of which the server has nothing to merge."""
    change_row(monkeypatch, exchange=Exchange(up={"weights": Weights(), "steps": Weights()}))

    lacks = "Summing lacks steps: uploads must have its names and shapes"
    with pytest.raises(FederationError, match=lacks):
        federate(tmp_path, clients=1, **MOON, rounds=1)


def test_a_run_has_its_last_model_and_the_users_metric_and_callback(own, tmp_path):
    """What a client keeps is what it uploaded, and the contrast begins after its first round."""
    config = run_config(
        tmp_path,
        **MOON,
        metrics=f"auc, {own}:brier",
        callback=f"{own}:note",
        test_samples=24,
        rounds=3,
    )
    run = run_federation(config, clients=2)

    states = run.folder.glob("clients/*/000003-*.safetensors")
    kept = {path.parent.name: load_file(path) for path in states}

    assert set(kept) == {"site-0", "site-1"}

    for message, reply in run.exchanged(number=3):
        previous = kept[f"site-{message.metadata.dst_node_id - 1000}"]
        sent = {f"previous/{name}": array.data for name, array in reply.content["weights"].items()}
        assert {name: value.numpy().tobytes() for name, value in previous.items()} == sent
    *rounds, _final = run.rows
    first, second, third = [line["clients"]["site-0"]["losses"] for line in rounds]

    assert "contrast" not in first
    assert second["contrast"] > 0
    assert third["contrast"] > 0

    module = sys.modules[own]
    briers = []
    for line in run.rows:
        for client in line["clients"].values():
            briers.append(client["metrics"][f"head/{own}:brier"])

    assert len(briers) == len(module.given) == 2 * 4  # two clients in three rounds and at the end
    given = list(module.given)  # a copy: the calls below are noted as well
    assert briers == [module.brier(scores, labels) for scores, labels in given]
    for scores, labels in given:
        assert isinstance(scores, np.ndarray)
        assert scores.shape == (24, 3)  # of 24 test samples and three classes
        assert labels.shape == (24,)
    assert module.rows == run.rows
    assert [line["kind"] for line in run.rows] == ["round"] * 3 + ["final"]

    model = export_model(run.folder, tmp_path / "model")
    card = json.loads((model / "model.json").read_text())
    assert (card["algorithm"], card["arch"]) == ("my-moon", VIT)
    assert card["classes"] == ["horizontal", "rising", "falling"]

    # the exported model predicts as the client did
    data = client_of(config, partition=0, clients=2).data
    found = [prediction.label for prediction in Predictor.load(model).predict(data.test_inputs)]
    accuracy = run.summary["accuracy-of-clients"]["site-0"]["head"]

    assert np.mean(found == data.test_labels) == accuracy


@pytest.mark.parametrize(("name", "kind"), [("secretive", "ValueError"), ("many", "TypeError")])
def test_a_metric_that_fails_is_named_and_quotes_nothing(own, name, kind, tmp_path):
    config = run_config(tmp_path, **MOON, metrics=f"{own}:{name}", rounds=1)
    (row,) = rows_without_a_reply(config, clients=1)

    failed = f"it failed ({kind}); the log of the client says more"
    assert row["failed"] == {"site-0": f"metrics = '{own}:{name}': {failed}"}


def test_a_metric_that_is_not_there_is_refused_before_the_first_round(own, tmp_path):
    missing = f"1 client cannot take part: metrics = .*: {own} has no nothing"
    with pytest.raises(FederationError, match=missing):
        federate(tmp_path, clients=1, **MOON, metrics=f"auc, {own}:nothing")


def test_a_callback_that_fails_is_said_and_the_run_goes_on(own, tmp_path, capsys):
    run = federate(tmp_path, clients=2, **MOON, callback=f"{own}:offline")

    assert len(run.rows) == 3

    warning = f"callback: {own}:offline failed, OSError: no network"
    assert capsys.readouterr().out.count(warning) == 3


def test_a_callback_that_cannot_be_called_is_refused(own, tmp_path):
    with pytest.raises(SettingsError, match=r"callback = .*:rows': it is no function or class of "):
        federate(tmp_path, clients=2, **MOON, callback=f"{own}:rows")


def test_sites_take_part_where_their_operators_name_the_package(tmp_path):
    """A site whose node config lacks allow-python refuses the package's method."""
    nodes = real_sites(2, **{"allow-python": "outside_moon", "dataset": STRIPES["dataset"]})
    run = federate(tmp_path, nodes=nodes, **MOON)
    networks = {site: facts["arch"] for site, facts in run.summary["clients"].items()}

    assert networks == {"site-0": VIT, "site-1": VIT}
    assert run.rows[1]["losses"]["contrast"] > 0

    del nodes[1001]["allow-python"]
    refused = r"site-1 .*: algo = 'my-moon': not allowed on this site; .*name outside"

    with pytest.raises(FederationError, match=refused):
        federate(tmp_path / "refused", nodes=nodes, **MOON)


# -- the page docs/extend.md -----------------------------------------------------------------------
def blocks(language):
    """Return the pages' fenced blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def table(after):
    """Return the cells of the pages' first table after some words, without its head."""
    _before, _, text = PAGE.partition(after)
    _before, _, text = text.partition("\n|")
    text, _, _after = text.partition("\n\n")
    _head, _rule, *lines = text.splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_pages_row_and_entry_point_are_the_packages():
    """docs/extend.md shows the end of the package's method.py, with comments, and its pyproject."""
    shown, *_ = blocks("python")
    method = (OUTSIDE / "outside_moon" / "method.py").read_text(encoding="utf-8")
    uncommented = re.sub(r"  #.*", "", shown)

    assert uncommented.startswith("ROW = Algorithm(")
    assert method.endswith(uncommented)

    (points,) = blocks("toml")
    assert points in (OUTSIDE / "pyproject.toml").read_text(encoding="utf-8")
    assert "my-moon" in pyproject()["project"]["entry-points"][plugins.GROUP]


def test_the_pages_command_makes_a_run_that_learns(tmp_path):
    """The command stands on several lines; of three classes a third is right by chance."""
    command = re.search(r"^protofl run (?:[^\n]*\\\n)*[^\n]*", PAGE, re.MULTILINE)[0]
    _protofl, _run, *words = shlex.split(command.replace("\\\n", " "))
    arguments = parsed("run", words)
    config = run_config(tmp_path) | read_assignments(arguments.settings)
    outcome = run_federation(plugins.with_hparams(config), clients=arguments.clients)

    assert not outcome.trouble
    assert outcome.summary["accuracy"]["head"]["mean"] > 0.6
    assert all(row["losses"]["contrast"] > 0 for row in outcome.rows[1:-1])


def test_the_pages_hooks_exist_and_are_called_in_their_order(tmp_path, monkeypatch):
    """The client's hooks are called in the order of the page's table, which begins with `state`."""
    names = [re.match(r"`(\w+)", cells[0])[1] for cells in table("**The client half**")]
    state, *names_in_order = names
    assert state == "state"  # is no function that is called
    assert "fit" in names

    calls = []

    def watch(name):
        """Note the first call of a method, or the first use of a property, in round 2."""
        kind = client_half(row())
        original = getattr(kind, name)
        function = original.fget if isinstance(original, property) else original

        def noted(self, *rest):
            if self.client.name == "site-0" and self.round == 2 and name not in calls:
                calls.append(name)
            return function(self, *rest)

        monkeypatch.setattr(
            kind, name, property(noted) if isinstance(original, property) else noted
        )

    for name in names_in_order:
        watch(name)
    federate(tmp_path, clients=2, **MOON)

    assert calls == names_in_order

    _before, _, about_server = PAGE.partition("**The server half**")
    about_server, _, _after = about_server.partition("\n#")
    named = re.findall(r"`(\w+)(?:\([^`]*\))?`", about_server)
    hooks = [name for name in named if name not in ("ServerStrategy", "Upload")]
    fields_of_upload = {field.name for field in dataclasses.fields(Upload)}

    assert {"state", "payload_down", "payload_for", "merge"} <= set(hooks)
    for name in hooks:
        assert hasattr(ServerStrategy, name) or name in fields_of_upload, name
    for name in ("needs_gradients", "train", "step", "last_round"):
        assert hasattr(ClientAlgorithm, name)
        assert name in PAGE


@pytest.mark.parametrize("side", ["client", "server"])
def test_what_the_page_says_that_a_half_has_is_there(side, tmp_path):
    half = half_of(run_config(tmp_path, **MOON)) if side == "client" else server_of("fedavg")
    cells = " ".join(cells[0] for cells in table(f"## What the {side} half has"))

    named = re.findall(r"`(?:self\.)?(\w+)(?:\(|`| = |, )", cells)
    names = [name for name in named if name not in ("uploads", "payload")]  # are arguments

    assert len(names) > 6  # the table was found and read
    for name in names:
        assert hasattr(type(half), name) or hasattr(half, name), name


def test_what_the_page_says_that_an_upload_has_is_there():
    rows = table("## What the server half has")
    (text,) = [cells[1] for cells in rows if cells[0] == "`uploads`"]
    _upload, *names = re.findall(r"`(\w+)`", text)
    for name in names:
        assert hasattr(Upload, name) or name in Upload.__annotations__, name


def test_the_pages_example_of_a_half_has_the_loss_that_the_page_computes_by_hand(
    tmp_path, monkeypatch
):
    """The page's second block of Python is a half, Near, with a test of it."""
    _, near, *_ = blocks("python")
    (tmp_path / "near.py").write_text(near, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    module = import_module("near")
    module.test_near()
    losses = module.Near(client_of(run_config(tmp_path, algo="fedproto")), 1).fit()

    assert "near" not in losses  # in round 1 there are no prototypes to be near to


def test_the_scaffold_of_the_notebook_is_ours_but_for_rounding(tmp_path, monkeypatch):
    """The notebook's first cell of code writes SCAFFOLD as a package's method."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    scaffold, _project = re.findall(
        r'write_text\("""(.*?)"""\)', "".join(first["source"]), re.DOTALL
    )
    code = scaffold.replace("my_scaffold", "its_scaffold")  # no other test's module
    (tmp_path / "its_scaffold.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    points = {"mine": EntryPoint("mine", "its_scaffold:ROW", plugins.GROUP)}
    for module in ("catalog", "node"):
        monkeypatch.setattr(f"protofl_common.experiment.{module}.installed", lambda: points)
    settings = STRIPES | {
        "models": "cnn4",
        "rounds": 3,
        "local_epochs": 2,
        "partition": "dirichlet",
        "total_samples": 150,
    }

    def run_of(algo):
        return federate(tmp_path / algo, clients=3, algo=algo, **settings)

    ours = run_of("scaffold")
    theirs = run_of("mine")

    assert not theirs.trouble
    assert theirs.per_row("accuracy") == ours.per_row("accuracy")

    found = weights_left(theirs)
    other = weights_left(run_of("fedavg"))
    torch.testing.assert_close(found, weights_left(ours), atol=1e-6, rtol=1e-5)
    for name, value in found.items():
        assert not torch.allclose(value, other[name], atol=1e-4)


def test_the_pages_entries_of_an_exchange_say_the_defaults():
    """The page shows each kind of entry with all its own arguments at their defaults."""
    kinds = {kind.__name__: kind for kind in (Vectors, Counts, VectorSets, Weights, Update)}
    shown = [cells[0].strip("`") for cells in table("### What is exchanged")]

    entries = [eval(text, kinds) for text in shown]

    assert entries == [Vectors(), Counts(), VectorSets(), Weights(), Update()]

    for text, entry in zip(shown, entries, strict=True):
        # arguments that every entry has stand elsewhere on the page
        of_every_entry = {field.name for field in dataclasses.fields(Entry)}
        fields = [field.name for field in dataclasses.fields(entry)]
        own = [name for name in fields if name not in of_every_entry]
        assert re.findall(r"(\w+)=", text) == own


def test_the_pages_names_are_those_of_the_code():
    """The fields of a batch, the keys of data, the settings, and the files that it links to."""
    rows = table("**The client half**")
    (batch,) = [cells[1] for cells in rows if cells[0] == "`loss(batch)`"]
    _loss, _, fields = batch.partition("`batch` has")
    named = re.findall(r"`(\w+)`", fields)

    assert named == [field.name for field in dataclasses.fields(Batch)]

    _before, _, about_data = PAGE.partition("## Data:")
    about_data, _, _after = about_data.partition("\n## ")
    assert set(KEYS) <= set(re.findall(r"`(\w+)`", about_data))

    settings = set(re.findall(r"`([a-z-]+) ?= ?\"[^`]*`", PAGE))
    settings -= {"width", "similarity"}  # of Vectors, of a half

    assert {"arch", "dataset", "metrics", "callback", "models", "allow-python"} <= settings
    assert settings <= {*known_keys(), *NODE_KEYS}

    for path in re.findall(r"\]\((\.\./[^)]+)\)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
