"""A site with an operator of its own.

What a run, or a server, cannot make it read, write, download, remove or tell.
"""

import os
import re
import stat
import tomllib
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client_app.answers import reason_of
from client_app.protections.differential_privacy import charge_ledgers
from client_app.site.client import open_client
from client_app.site.privacy_ledger import ledgers_of
from client_app.site.state import StateFolder
from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import SettingsError, flatten
from protofl_common.experiment import catalog as plugins
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import DEFAULTS, LIMITED
from protofl_common.experiment.settings import (
    default_run_config,
    digest_of,
    needed_with,
)
from protofl_common.models.trained import TrainedModel
from protofl_common.privacy.plan import Mechanism
from protofl_common.tools.cli import main
from protofl_common.wire.records import pack_settings, unpack_site_card
from server_app.network.admission import FederationError, check_fit
from tests.support.attacks import interrupted
from tests.support.harness import (
    LocalGrid,
    client_of,
    federate,
    instructions,
    reason_in,
    refusal,
    run_config,
    run_federation,
    settings_of,
)
from tests.support.sites import make_site_keys, signed, write_images

NODE = 7
"""Flower's number of the site."""
SITE = {"site-name": "north"}
OWN = SITE | {"dataset": "image-folder", "classes": "sick,well"}
SIMULATED = {"partition-id": 0, "num-partitions": 1}
DIGITS = {"dataset": "digits", "partition": "iid", "train_samples": 10}
TABLE = {"partition": "own", "models": "table3", "dataset": "arrays"}
EVALUATED = ("correct", "metrics", "validation")  # the parts of a report that an evaluation gives


def question(config):
    content = RecordDict({**pack_settings(digest_of(config))})
    return Message(content, NODE, MessageType.QUERY, group_id="0")


def instruction(number, kind=MessageType.TRAIN, **entries):
    """Return what a server sends in a round of Flower run 4711; ``entries`` forge some of it."""
    return Message(instructions(number, **entries), NODE, kind, group_id=str(number))


def answer(node, config, message=None):
    """Return a site's reply to a message, or else to the question for its introduction."""
    return LocalGrid(config, {NODE: node}).ask(message or question(config))


def node_with_a_share(folder):
    """Return the node config of a site that takes its part of a common data set."""
    return SITE | SIMULATED | {"state-dir": str(folder / "state")}


# -- what an error tells ---------------------------------------------------------------------------
BACKBONES = {"json": "file:small:", "safetensors": "file:resnet18:", "pth": "file:resnet18:"}


@pytest.mark.parametrize("suffix", [*BACKBONES, "image"])
@pytest.mark.parametrize(
    "node", [SIMULATED, SITE | {"allow-backbones": "file:"}], ids=["simulated", "site"]
)
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.binary(min_size=16, max_size=300) | st.text('abc{}[]":,0', min_size=16).map(str.encode),
)
def test_no_file_content_leaves_in_an_error(suffix, node, tmp_path, content):
    """No eight bytes of a broken file of backbone weights, or of a broken image, leave the site."""
    if suffix == "image":
        file = tmp_path / "data/cats/x.png"
        data = {"data-dir": str(tmp_path / "data")}
        config = run_config(tmp_path, dataset="image-folder", partition="own") | data
        if "site-name" in node:
            node = node | data | {"dataset": "image-folder"}
    else:
        file = tmp_path / f"x.{suffix}"
        config = run_config(tmp_path, dataset="digits", partition="iid", train_samples=5)
        config["backbones"] = f"{BACKBONES[suffix]}{file}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)

    reply = answer(node, config)
    reason = str(reply.error.reason)

    assert reason.isprintable()
    assert len(reason_in(reply)) <= 600
    eight_bytes = {content[i : i + 8] for i in range(len(content) - 7)}
    for part in eight_bytes:
        escaped = repr(part).removeprefix("b")[1:-1]  # without quotes
        assert escaped not in reason
        assert part.decode("latin-1") not in reason


@pytest.mark.parametrize(("at_site", "lines"), [(True, 2), (False, 1)])
def test_a_reason_is_printable_and_in_a_simulation_logged_once(capsys, at_site, lines):
    """This holds for errors of settings, too, whose text leaves a site as it is.

    A site logs each refusal; in a simulation all clients would log the same.
    """
    reason = reason_of(SettingsError("\x1b[2J\n" + "x" * 10**6), at_site)
    assert len(reason) < 600
    assert reason.isprintable()

    with pytest.raises(RuntimeError) as too_large:
        torch.empty(2**50)  # 4 PB, more than any machine's memory

    no_memory = "the machine has no memory left; take a smaller batch-size"
    assert no_memory in reason_of(too_large.value, at_site)

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    reason_of_full_gpu = reason_of(error, at_site)

    assert "protofl run --gpus 1" in reason_of_full_gpu
    assert "batch-size" in reason_of_full_gpu

    for _ in range(2):
        reason_of(SettingsError("alpha = -7.5: must be above 0"), at_site)
    assert capsys.readouterr().err.count("alpha = -7.5") == lines


def test_the_server_learns_the_kind_of_error_and_the_sites_log_the_rest(tmp_path, capsys):
    """At a simulated client, whose data are the run's own, the whole text leaves."""
    patients = ("HIV positive/DOE_Jane_1961.png", "negative/ROE_Richard.png")
    data = write_images(tmp_path / "my scans", *patients)
    config = run_config(tmp_path, dataset="image-folder", partition="own")
    node = SITE | {"data-dir": str(data), "dataset": "image-folder"}
    more = "its data cannot be read or divided as the run asks; the log of the site says more"

    reason = reason_in(answer(node, config | {"classes": "positive,negative"}))
    assert reason == f"DataError (classes): {more}"

    log = capsys.readouterr().err
    assert "'HIV positive'" in log
    assert "DOE_Jane_1961.png" in log

    (data / "negative" / "ROE_Richard.png").write_bytes(b"no image")
    assert reason_in(answer(node, config)) == f"DataError: {more}"

    unreadable = "ROE_Richard.png is not a readable image"
    assert unreadable in capsys.readouterr().err
    assert unreadable in reason_in(answer(SIMULATED, config | {"data-dir": str(data)}))


# -- what a run chooses ----------------------------------------------------------------------------
FOLDERS = {
    "data-dir": "/home/jane/photos",
    "state-dir": "/srv/www",
    "cache-dir": "/srv/www",
    "out-dir": "/srv/www",
}


def folders_of(found):
    """Return the folders of settings, in the order of `FOLDERS`."""
    return [found.data.data_dir, found.machine.state_dir, found.data.cache_dir, found.run.out_dir]


@pytest.mark.parametrize(
    "node", [SITE, {**SIMULATED, "data-dir": ""}, {**SIMULATED, "arch": "cnn4"}]
)
def test_a_run_chooses_no_folder_of_a_site(node):
    """A node whose config says more than its partition is a site, even without a name."""
    assert folders_of(settings_of(FOLDERS, node)) == ["", "", "", "runs"]

    own = {"data-dir": "/data", "state-dir": "/state", "cache-dir": "/cache"}
    found = settings_of(FOLDERS | {"partition": "own"}, node | {"dataset": "image-folder"} | own)

    assert folders_of(found) == ["/data", "/state", "/cache", "runs"]

    # those of a simulated client it does
    assert folders_of(settings_of(FOLDERS, SIMULATED)) == list(FOLDERS.values())


def test_a_run_neither_reads_nor_writes_where_it_wants_on_a_site(tmp_path, monkeypatch):
    """Without data-dir of its own it refuses; with it, it reads there and writes below ``runs``."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    wanted = {key: str(tmp_path / "wanted" / key) for key in FOLDERS}
    names = [f"{kind}/{i}.png" for kind in "ab" for i in range(9)]
    write_images(Path(wanted["data-dir"]), *names)
    before = sorted(tmp_path.joinpath("wanted").rglob("*"))
    own = {"dataset": "image-folder", "partition": "own", "num_clients": 1, "classes": "a,b"}
    config = run_config(tmp_path, **own) | wanted
    node = SITE | {"dataset": "image-folder"}

    assert reason_in(answer(node, config)).startswith("DataError (data-dir): ")

    node |= {"data-dir": wanted["data-dir"], "cache-dir": str(tmp_path / "cache")}
    assert not answer(node, config, instruction(1)).has_error()

    assert sorted(tmp_path.joinpath("wanted").rglob("*")) == before
    assert list((tmp_path / "work/runs/mine-4711/clients/north").glob("*.safetensors"))
    assert list((tmp_path / "cache").rglob("inputs.npy"))


@pytest.mark.parametrize(("key", "value", "allow", "permission"), [
    ("download", True, "allow-download", True),
    ("backbones", "torchvision:resnet18@64", "allow-backbones", "torchvision:resnet18@64"),
    ("backbones", "torchvision:resnet18@64", "allow-backbones", "torchvision:"),
    ("backbones", "package:efficientnet-lite0", "allow-backbones", "package:efficientnet-lite0"),
    ("backbones", "package:efficientnet-lite0@96", "allow-backbones", "package:"),
    ("backbones", "glyphs,timm:hf-hub:any/repo", "allow-backbones", "x:y, timm:hf-hub:any/repo"),
    ("backbones", "file:small:/srv/weights/x.json", "allow-backbones", "file:small:/srv/weights/"),
    ("arch", "torchvision:resnet18", "allow-arch", "torchvision:"),
    ("models", "cnn4,timm:tiny.a", "allow-arch", "torchvision:, timm:tiny.a"),
    ("fml.meme", "torchvision:resnet18", "allow-arch", "torchvision:resnet18"),
])  # fmt: skip
def test_downloads_and_strange_weights_need_the_operators_word(key, value, allow, permission):
    """The error names the key of the node config; a simulated client needs no word."""
    run = {key: value}
    (line,) = refusal(run, SITE).splitlines()

    assert line.startswith(f"{key} = ")
    *_, refused_part = str(value).split(",")  # the last of a list is the one that is not allowed
    assert refused_part.lower() in line.lower()

    verb = "set" if key == "download" else "name it in"
    assert f"not allowed on this site; its operator may {verb} {allow}" in line

    settings_of(run, SITE | {allow: permission})
    settings_of(run, SIMULATED)


@pytest.mark.parametrize(
    ("key", "value"), [("columns", "a,b"), ("drop", "a,b"), ("one-hot", "a:x|y")]
)
def test_a_run_says_of_a_sites_table_what_the_operator_says_or_nothing(key, value):
    """A run could otherwise try out which columns and categories a site has."""
    arrays = SITE | {"dataset": "arrays"}
    own = arrays | {"data-dir": "/data"}
    shared = arrays | {"partition-id": 0, "num-partitions": 2}
    run = {"partition": "own"}

    for node in (own, own | {key: "c:x|y"}, shared):
        refused = refusal(run | {key: value}, node)
        assert re.match(f"{key} = '.*not allowed on this site; its operator may set it", refused)

    for accepted in (run | {key: value}, run):
        data = settings_of(accepted, own | {key: value}).data
        assert getattr(data, key.replace("-", "_")) == value
    settings_of({key: value}, SIMULATED)


@pytest.mark.parametrize(("backbones", "allowed"), [
    ("file:small:/srv/weights/../../etc/shadow", "file:small:/srv/weights/"),
    ("file:small:/srv/weights.json.old", "file:small:/srv/weights.json"),
    ("file:small:/srv/x.json", "timm:,torchvision:"),
    ("timm:hf-hub:any/repo", "timm:hf-hub"),
    ("timm:resnet18", ","),
    ("package:efficientnet-lite0@96", "package:efficientnet-lite0"),
])  # fmt: skip
def test_a_permission_covers_what_it_says_only(backbones, allowed):
    """Not a path that leads out of the allowed folder, a longer name, or another size of input."""
    node = SITE | {"allow-backbones": allowed}
    assert "not allowed on this site" in refusal({"backbones": backbones}, node)


@pytest.mark.parametrize("key", LIMITED)
def test_a_run_that_wants_too_much_of_a_site_is_refused(key):
    """The limit is the default one, or that of the node config; a simulated client has none."""
    limit = LIMITED[key]
    algo, _, _ = key.rpartition(".")  # of a setting such as fedtgp.server-epochs, or ""
    small = dict.fromkeys(LIMITED, 1) | {"algo": algo or "fedproto"}
    if key == "dp-honest-sites":  # has a meaning only with noise in a sum
        small |= {"algo": "gaussian", "dp": "sample", "secagg": True, "local-steps": 0}

    for node, most in ((SITE, DEFAULTS[limit]), (SITE | {limit: 7}, 7)):
        settings_of(small | {key: most}, node)
        may_raise = f"this site takes at most {most}; its operator may raise {limit} (node config)"
        too_much = small | {key: most + 1}
        assert refusal(too_much, node) == f"{key} = {most + 1}: {may_raise}"

    above_default = small | {key: DEFAULTS[limit] + 1}
    settings_of(above_default, SITE | {limit: 10**6})
    settings_of(above_default, SIMULATED)
    # the operator's own image-size may be above the limit for what runs ask for
    settings_of({"partition": "own"}, OWN | {"data-dir": "/srv/data", "image-size": 600})


def test_an_operator_chooses_the_algorithms():
    node = SITE | {"allow-algorithms": "fedproto, fedtgp"}
    settings_of({"algo": "fedtgp"}, node)

    may_name = "its operator may name it in allow-algorithms (node config)"
    line = f"algo = 'fedavg': not allowed on this site; {may_name}"

    assert refusal({"algo": "fedavg"}, node) == line


def test_a_wrong_permission_is_named():
    """An unknown algorithm in allow-algorithms, and values of a wrong type in other permissions."""
    unknown = refusal({}, SITE | {"allow-algorithms": "fedprotto"})
    choices = "choose from all, ditto, "

    assert unknown.startswith(f"node-config: allow-algorithms: 'fedprotto': {choices}")

    for key, value in (
        ("allow-download", "yes"),
        ("allow-download", 1),
        ("allow-backbones", True),
        ("allow-algorithms", 3),
        ("max-epochs", "7"),
        ("max-rounds", 0),
        ("min-class-samples", "many"),
    ):
        assert re.match(f"node-config: {key} = .* must be ", refusal({}, SITE | {key: value}))


def test_every_recipe_is_accepted_by_a_site_that_sets_no_limit():
    """With each algorithm that the recipe has settings for; the site's default limits hold."""
    for recipe in Path("configs/recipes").glob("*.toml"):
        content = tomllib.loads(recipe.read_text(encoding="utf-8"))
        run = flatten(content) | {"download": False}
        node = SITE | SIMULATED | {"dataset": run.get("dataset", "digits")}
        for algo in {content["algo"], *(content.keys() & CATALOG)}:
            settings_of(run | {"algo": algo}, node)


def test_a_run_makes_no_more_threads_than_a_site_has_processors(tmp_path):
    before = torch.get_num_threads()
    try:
        answer(SITE, run_config(tmp_path, threads=10**5))
        assert torch.get_num_threads() <= (os.cpu_count() or 1)
    finally:
        torch.set_num_threads(before)


VIT = "absent_moon.net:TinyViT"
PYTHON = {
    "algo": "my-moon",
    "arch": VIT,
    "models": f"cnn4, {VIT}",
    "metrics": "auc, absent_moon.figures:brier",
    "fml.meme": VIT,
    "fedkd.student": VIT,
}


@pytest.mark.parametrize("key", PYTHON)
def test_a_site_imports_what_its_operator_named_only(key, monkeypatch):
    """Nothing of the package is imported before the operator's word is asked for.

    There is no such package, so that an import would fail.
    """
    points = {"my-moon": EntryPoint("my-moon", "absent_moon.method:ROW", plugins.GROUP)}
    monkeypatch.setattr("protofl_common.experiment.node.installed", lambda: points)
    monkeypatch.setattr(plugins, "installed", lambda: points)
    plugins.algorithm_named.cache_clear()
    run = {key: PYTHON[key]}

    for node in (SITE, SITE | {"allow-python": "absent, absent_moo, my-moon"}):
        line = refusal(run, node)
        assert line.startswith(f"{key} = ")
        assert "name absent_moon" in line
        assert line.endswith("in allow-python (node config)")

    allowed = SITE | {"allow-python": "absent_moon"}
    if key == "algo":
        assert "ModuleNotFoundError" in refusal(run, allowed)
        return
    settings_of(run, allowed)
    settings_of(run, SIMULATED)
    settings_of({}, SITE | {"arch": VIT})  # of its own, by the operator's word


@pytest.mark.parametrize(
    "dataset", ["hf:x", "absent_moon.data:stripes", "image-folder", "text-csv"]
)
def test_a_run_names_none_but_public_data_sets_at_a_site(dataset):
    """Another one would choose how the operator's files are read, or look into a hub's cache."""
    python = {"allow-python": "absent_moon"}
    all_else = python | {"data-dir": "/srv/data", "allow-download": True}
    run = {"dataset": dataset, "partition": "own"}

    may_name = "its operator may name it as dataset (node config)"
    line = f"dataset = {dataset!r}: not allowed on this site; {may_name}"

    for node in (SIMULATED, SIMULATED | all_else, {}, python):
        assert refusal(run, SITE | node) == line

    settings_of(run, SITE | {"dataset": dataset})
    settings_of({"dataset": dataset}, SIMULATED)


# -- what a site's own data are --------------------------------------------------------------------
def card_of(node, config):
    reply = answer(node, config)
    assert not reply.has_error(), reason_in(reply)
    return unpack_site_card(reply.content)


@pytest.mark.parametrize("dataset", ["domain-folder", "text-csv", "digits", "image-folder"])
def test_a_run_does_not_choose_how_a_sites_files_are_read(dataset, tmp_path):
    """Its files are CLASS/PATIENT/image: read as DOMAIN/CLASS/image, patients would be classes."""
    patients = [f"{kind}/DOE_Jane_{day}" for kind in ("sick", "well") for day in range(3)]
    files = [f"{patient}/{i}.png" for patient in patients for i in range(2)]
    scans = write_images(tmp_path, *files)
    node = OWN | {"data-dir": str(scans), "image-size": 8}
    config = run_config(
        tmp_path,
        dataset=dataset,
        partition="own",
        classes="DOE_Jane_1,DOE_Jane_2",
        image_size=32,
        text_length=7,
    )

    card = card_of(node, config)

    assert card.classes == ("sick", "well")
    assert card.domain == ""
    assert card.input_shape == (3, 8, 8)


@pytest.mark.parametrize("dataset", ["image-folder", "digits"])
def test_a_site_that_does_not_say_what_its_data_are_takes_no_part(dataset, tmp_path):
    """The node config has data-dir alone: the run's data set is not taken for the site's."""
    data = write_images(tmp_path / "scans", "sick/1.png", "sick/2.png", "well/1.png", "well/2.png")
    config = run_config(tmp_path, dataset=dataset, partition="own")

    reason = reason_in(answer(SITE | {"data-dir": str(data)}, config))

    missing = "dataset: missing; with data of its own a site says how they are "
    assert reason.startswith(f"node-config: {missing}")


@pytest.mark.parametrize("kind", [MessageType.QUERY, MessageType.TRAIN])
def test_names_of_classes_and_domains_that_nobody_said_stay_there(kind, tmp_path, capsys):
    """A table's labels and clients are people's names: the site's log has them, its error has not.

    They leave once the node config, or the run, names the classes; the domain only from the site.
    """
    table = tmp_path / "records.csv"
    rows = [f"ward of Dr. Grey,DOE {i},{i}.5\n" for i in range(3)] * 2
    table.write_text("".join(["client,label,x\n", *rows]))
    node = SITE | {"data-dir": str(table), "dataset": "arrays"}
    config = run_config(tmp_path, **TABLE)
    LocalGrid(config, {})  # Flower's messages want a run

    message = instruction(1) if kind == MessageType.TRAIN else question(config)
    reason = reason_in(answer(node, config, message))

    assert "this site's data have 3 classes that nobody named; set classes" in reason
    assert "DOE" not in reason
    assert 'add classes="DOE 0,DOE 1,DOE 2" to its node config' in capsys.readouterr().err

    classes = {"classes": "DOE 0,DOE 1,DOE 2"}
    for card in (card_of(node | classes, config), card_of(node, config | classes)):
        assert card.classes == ("DOE 0", "DOE 1", "DOE 2")
        assert card.domain == ""

    domain = {"domain": "ward of Dr. Grey"}
    assert card_of(node | classes | domain, config).domain == "ward of Dr. Grey"


def test_weights_are_not_averaged_over_tables_whose_columns_differ(tmp_path, capsys):
    """Two tables have the columns age and dose in another order: FedProto may, FedAvg may not."""
    config = run_config(tmp_path, **TABLE, dp="sample", norm="group")
    cards = {}
    for names in ("age,dose", "dose,age"):
        table = tmp_path / f"{names}.csv"
        table.write_text(f"label,{names}\n" + "sick,1,2\nwell,3,5\n" * 4)
        cards[names] = card_of(OWN | {"data-dir": str(table), "dataset": "arrays"}, config)

    check_fit(settings_of({"algo": "fedproto"}), cards)
    differ = "differ in the names or the order of columns; rename or reorder them"

    with pytest.raises(FederationError, match=differ):
        check_fit(settings_of({"algo": "fedavg"}), cards)

    for card in cards.values():
        assert len(card.columns) == 4  # too few digits to find names by trying

    advice = "under dp its numbers are not standardised: scale them"
    assert capsys.readouterr().err.count(advice) == 2


@pytest.mark.parametrize(
    "demand", [{"min-class-samples": 9}, {"require-dp": "epsilon<=8"}, {"require-secagg": True}]
)
def test_a_site_with_demands_takes_no_names_of_classes_from_a_run(demand, tmp_path):
    """A run could try out names, so such a site must name its classes itself."""
    folders = {"data-dir": str(tmp_path), "state-dir": str(tmp_path)}
    node = SITE | {"dataset": "arrays"} | folders | demand
    run = {"partition": "own", "dataset": "arrays", "classes": "sick,well"}
    run |= {"dp": "sample", "norm": "group", "secagg": "require-secagg" in demand}
    # what other settings must be under secure aggregation
    run |= {key: only for key, (only, _) in needed_with("with_secagg").items()}

    missing = f"classes: missing; with {next(iter(demand))} a site names its classes"
    assert missing in refusal(run, node)

    settings_of(run, node | {"classes": "sick,well"})


@pytest.mark.parametrize("demand", [{}, {"require-dp": "epsilon<=8"}, {"require-secagg": True}])
def test_a_demand_that_rests_on_memory_is_met_only_where_the_site_has_been(
    demand, tmp_path, capsys
):
    """A state folder with nothing of the site in it may be a disk that is not mounted.

    Then the site's ledger and its key would begin anew, so it refuses runs that need these.
    """
    peers = make_site_keys(east=tmp_path / "east", south=tmp_path / "south")
    node = node_with_a_share(tmp_path) | demand | {"peers": peers}
    config = run_config(
        tmp_path,
        rounds=1,
        norm="group",
        dp="sample" if "require-dp" in demand else "none",
        dp_epsilon=8.0,
        secagg="require-secagg" in demand,
    )

    unmounted = answer(node, config)
    warned = "state has neither a privacy ledger nor a key of north" in capsys.readouterr().err
    own_key = make_site_keys(north=tmp_path / "state/sites/north")
    mounted = answer(node, signed(config, sites=f"{own_key},{peers}"))

    assert warned == bool(demand)
    assert unmounted.has_error() == bool(demand)
    assert not mounted.has_error()

    if demand:
        begins = "StateError (state-dir): its state (models, requests"
        assert reason_in(unmounted).startswith(begins)


def write_table_of_200_rows(folder):
    """Write a table of two classes and one column; return the node config of a site with it."""
    rows = [f"{kind},{np.sin(7 * i):.6f}" for i in range(100) for kind in ("sick", "well")]
    (folder / "records.csv").write_text("\n".join(["label,x", *rows]))
    return OWN | {"data-dir": str(folder / "records.csv"), "dataset": "arrays"}


def parts_of(node, config):
    """Return a client's samples by the part of the data that they are in."""
    data = client_of(config, **node).data
    names = ("train_inputs", "train_labels", "test_inputs", "test_labels", "validation_inputs")
    return {name: np.asarray(getattr(data, name)) for name in names}


def sizes(parts):
    return [len(part) for part in parts.values()]


def test_a_run_does_not_choose_who_is_a_test_sample_of_a_site(tmp_path, capsys):
    """Two runs that differ in one training sample would tell that sample."""
    node = write_table_of_200_rows(tmp_path)
    config = run_config(tmp_path, **TABLE, train_samples=0)
    runs = [
        {
            "train-samples": 120,
            "seed": 1,
            "train-fraction": 0.5,
            "total-samples": 150,
            "positive-rate": 0.5,
        },
        {
            "train-samples": 121,
            "seed": 2,
            "train-fraction": 0.6,
            "test-samples": 1,
            "validation-fraction": 0.5,
        },
        {"test-from": "balanced", "validation-fraction": 0.1, "positive-rate": 0.51},
    ]

    first = parts_of(node, config | runs[0])
    assert sizes(first) == [150, 150, 50, 50, 0]  # the default division: three quarters train

    for run in runs[1:]:
        others = parts_of(node, config | run)
        for name, values in first.items():
            assert others[name].tobytes() == values.tobytes(), name

    card_of(node, run_config(tmp_path, **TABLE) | runs[0])
    log = capsys.readouterr().err
    ignored = "its own data, and ignores the run's seed, total-samples, train-samples, "

    assert log.count(f"this site divides {ignored}") == 1
    assert log.count("its inputs, in this order: x\n") == 1


def test_a_site_divides_its_own_data_as_its_operator_says(tmp_path):
    """Of 200 samples half are for training, and a fifth of these are for validation."""
    node = write_table_of_200_rows(tmp_path)
    node |= {"train-fraction": 0.5, "validation-fraction": 0.2, "test-from": "balanced"}
    run = {"train_samples": 120, "total_samples": 150, "train_fraction": 0.6}
    config = run_config(tmp_path, **TABLE, **run, validation_fraction=0.5)

    assert sizes(parts_of(node, config)) == [80, 80, 100, 100, 20]


@pytest.mark.parametrize("partition", ["iid", "natural", "n-way-k-shot"])
def test_a_run_takes_no_part_of_a_sites_own_data(partition):
    """With ``natural`` the site would become one client of its data: a single patient."""
    refused = refusal({"partition": partition}, OWN | {"data-dir": "/srv/data"})
    reason = "this site has data of its own; choose 'own'"
    assert f"partition = '{partition}': {reason}" in refused


@pytest.mark.parametrize("key", ["test-from", "train-fraction", "validation-fraction"])
def test_a_site_does_not_divide_common_data_in_a_way_of_its_own(key):
    for node in (SITE, SITE | SIMULATED | {"data-dir": "/srv/data"}):
        refused = refusal({}, node | {key: default_run_config()[key]})
        assert f"node-config: {key}: only at a site with data of its own" in refused

    own = OWN | {"data-dir": "/srv/data"}
    assert f"{key} = 'thirds': " in refusal({"partition": "own"}, own | {key: "thirds"})


NEARLY_ALL = [Mechanism(rate=1.0, noise=3.0, times=1)]
"""Costs nearly all of an ε of 2: not twice."""


def with_ledgers(folder, demand, run_id=1, **facts):
    """Return a site that keeps its ledgers in a folder, in a run with ε = 2."""
    config = run_config(folder, partition="own", dp="sample", dp_epsilon=2.0)
    folders = {"state-dir": str(folder / "state"), "data-dir": str(folder / "data")}
    node = OWN | {"require-dp": demand} | folders | facts
    return open_client(Context(run_id, NODE, node, RecordDict(), config))


def test_neither_a_new_name_nor_a_copy_of_the_data_has_a_new_privacy_ledger(tmp_path, monkeypatch):
    """A site has a ledger under its name and one under its data, and each must allow a run.

    Only a copy of the data under another name has neither, like another site.
    """
    monkeypatch.chdir(tmp_path)
    south = {"site-name": "south"}
    copy = {"data-dir": str(tmp_path / "copy")}
    client = partial(with_ledgers, tmp_path, "epsilon<=2")

    def ledgers(**facts):
        return {*ledgers_of(client(**facts), "any")}

    def contents(**facts):
        return [file.read_text() for file in sorted(ledgers(**facts)) if file.exists()]

    assert ledgers() == ledgers(**{"data-dir": "data"})
    assert all(file.is_relative_to(tmp_path / "state/privacy") for file in ledgers())
    assert ledgers() & ledgers(**south)
    assert ledgers() & ledgers(**copy)
    assert not ledgers() & ledgers(**south, **copy)

    charge_ledgers(client(), "first", NEARLY_ALL)
    for facts in (south, copy):
        before = contents(**facts)
        with pytest.raises(SettingsError, match="require-dp, over all runs, = 2"):
            charge_ledgers(client(2, **facts), "second", NEARLY_ALL)
        assert contents(**facts) == before
    charge_ledgers(client(2, **south, **copy), "second", NEARLY_ALL)


def test_each_run_may_cost_its_epsilon_once_where_the_site_allows_more(tmp_path):
    """Runs that differ in both name and number have a budget each.

    A run that shares its name or its number with an earlier one spends from the same budget.
    """
    client = partial(with_ledgers, tmp_path, "epsilon<=9")
    charge_ledgers(client(1), "heart 2", NEARLY_ALL)
    charge_ledgers(client(2), "heart", NEARLY_ALL)

    for run_id, name in ((3, "heart"), (2, "another")):
        with pytest.raises(SettingsError, match="dp-epsilon = 2"):
            charge_ledgers(client(run_id), name, NEARLY_ALL)


@pytest.mark.parametrize("state", [{}, {"state-dir": "state"}, {"state-dir": "~/state"}])
def test_a_privacy_ledger_has_a_fixed_place(state):
    """With a relative folder, a site started from another place would begin at ε = 0 again."""
    refused = refusal({"dp": "sample"}, SITE | {"require-dp": "epsilon<=8"} | state)
    assert re.search("node-config: state-dir = .*: with require-dp it must be absolute", refused)


def test_a_runs_settings_forge_no_line_of_a_sites_log(tmp_path, capsys, monkeypatch):
    """A line break in a setting's name, or in an error's text, begins no line of the log."""
    forged = "2026-01-01T00:00:00+0000 INFO protofl: run 1, fedproto, train 1: sent nothing"
    text = f"x\n{forged}\x1b[2J"

    config = run_config(tmp_path) | {text: 1}
    assert answer(SITE, config).has_error()

    failing = MagicMock(side_effect=RuntimeError(text))
    monkeypatch.setattr("client_app.introduction.open_client", failing)

    assert answer(SITE, config).has_error()

    log = capsys.readouterr().err
    assert forged in log
    for line in log.splitlines():
        assert line.isprintable()
        assert not line.startswith(forged)


# -- what a server asks ----------------------------------------------------------------------------
@pytest.mark.parametrize(("run_name", "run_history"), [
    ("../../elsewhere", "4711"),
    ("{tmp}/elsewhere", "4711"),
    ("..", "4711"),
    ("mine", "4711:9,5"),
    ("mine", "12"),
])  # fmt: skip
def test_a_server_leads_no_site_elsewhere(run_name, run_history, tmp_path, monkeypatch):
    """A run's name is no path, and its history must end with the Flower run of the message.

    In the end the site has only the model that was there before, of run 12.
    """
    runs = tmp_path / "work" / "runs"
    runs.parent.mkdir()
    monkeypatch.chdir(runs.parent)
    model = save_model(runs / "mine-12/clients", 12)
    node = SITE | {"partition-id": 0, "num-partitions": 2, "state-dir": str(runs)}
    config = run_config(tmp_path, **DIGITS)
    LocalGrid(config, {})  # Flower's messages want a run

    message = instruction(1, run_name=run_name.format(tmp=tmp_path), run_history=run_history)
    assert reason_in(answer(node, config, message)).startswith("round.")

    reason = reason_in(answer(node, config, instruction(3)))
    assert reason == "round.round is 3 in a run of 2 rounds"

    files = [path for path in tmp_path.rglob("*") if path.is_file() and "sites" not in path.parts]
    assert files == [model]


def save_model(folder, run_id):
    """Write the state of the site after round 1 of a run, and return its file."""
    states = StateFolder(folder, "north", RunHistory(run_id))
    states.save(1, "cnn4", {"w": torch.ones(1)})
    (file,) = states.folder.iterdir()
    return file


def test_two_studies_of_one_name_do_not_meet_at_a_site(tmp_path, capfd, monkeypatch):
    """Flower runs 11 and 12 are both called mine; each has a folder, which `export` can name."""
    node = node_with_a_share(tmp_path)
    state = tmp_path / "state"
    setting = {"run_name": "mine", "keep_best": True, **DIGITS}
    older = save_model(state / "mine-11/clients", 10)
    models = {older: older.read_bytes()}

    federate(tmp_path / "a", nodes={NODE: node}, run_id=11, **setting)
    for name in ("model", "best"):
        file = state / f"mine-11/clients/north/{name}.safetensors"
        models[file] = file.read_bytes()
    begins = f"run mine (11) begins, in {state}/mine-11; "

    assert f"{begins}protections: one reply to each question\n" in capfd.readouterr().err

    monkeypatch.chdir(state)
    assert main(["export", "mine-11", "--out", str(tmp_path / "first")]) == 0

    federate(tmp_path / "b", nodes={NODE: node}, run_id=12, **setting, seed=7)
    assert f"run mine (12) begins, in {state}/mine-12; " in capfd.readouterr().err
    for file, content in models.items():
        assert file.read_bytes() == content

    for number in ("11", "12"):
        file = state / f"mine-{number}/clients/north/model.safetensors"
        card = TrainedModel.read(file).card
        assert (card.run, card.flower_run) == ("mine", number)

    assert main(["export", "mine-12", "--out", str(tmp_path / "model")]) == 0
    assert "Flower run 12" in (tmp_path / "model/README.md").read_text()


def test_a_server_that_claims_to_resume_a_run_replaces_no_model_of_it(tmp_path, monkeypatch):
    """Run 4711 claims to go on with run 11: its model takes the place of 11's, which is kept.

    The new model is on the disk (fsync) before the site answers.
    """
    node = node_with_a_share(tmp_path)
    config = run_config(tmp_path, run_name="mine", **DIGITS)
    run_federation(config, nodes={NODE: node}, run_id=11)
    model = tmp_path / "state/mine-11/clients/north/model.safetensors"
    former = model.read_bytes()
    synced = set()

    def note_file(descriptor):
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr("os.fsync", note_file)
    message = instruction(2, MessageType.EVALUATE, run_history="11:2,4711")

    assert not answer(node, config, message).has_error()

    # under a temporary name, which the model has until it is whole
    assert any(name.startswith(f"{model.name}.") for name in synced)
    assert model.with_name("model-before-4711.safetensors").read_bytes() == former


def refusal_when_asked(grid, kind, number, **records):
    """Ask a site to train or evaluate in a round; return the reason why it refuses, or "".

    ``records`` are further records of the message.
    """
    message = instruction(number, kind, run_history=str(grid.run_id))
    message.content.update({name: ConfigRecord(value) for name, value in records.items()})
    reply = grid.ask(message)
    return reason_in(reply)


def test_a_real_site_answers_each_question_once_in_a_flower_run(tmp_path, monkeypatch):
    """That is one training of each round, in order, and one final evaluation, of each algorithm.

    It holds after a restart of the site, and not for another Flower run.
    """
    train = MessageType.TRAIN
    evaluate = MessageType.EVALUATE
    baseline = {"baseline": {"algo": "local"}}
    settings = {"rounds": 3, "baselines": "local", "models": "mlp-1", "keep_best": True}
    config = run_config(tmp_path, algo="fedproto", **DIGITS | settings)
    node = node_with_a_share(tmp_path)
    grid = LocalGrid(config, {NODE: node}, run_id=5)

    for kind in (train, evaluate, MessageType.QUERY):  # which Flower gives to the same handler
        unknown = f"a message of the unknown kind '{kind}.default'"
        assert unknown in refusal_when_asked(grid, f"{kind}.default", 1)

    assert refusal_when_asked(grid, train, 1) == ""
    assert "this site has answered round 1 of this Flower run, and" in refusal_when_asked(
        grid, train, 1
    )
    # a model left by such a round could not be read again
    for number in (0, -1):
        for kind in (train, evaluate):
            assert (
                refusal_when_asked(grid, kind, number)
                == f"round.round is {number} in a run of 3 rounds"
            )
    assert refusal_when_asked(grid, train, 3) == ""

    grid = LocalGrid(config, {NODE: node}, run_id=5)  # the site was started again
    with monkeypatch.context() as patch:
        patch.setattr("client_app.site.workshop.open_client_data", None)  # it reads no data
        assert "this site has answered round 3 of" in refusal_when_asked(grid, train, 2)

    assert refusal_when_asked(grid, evaluate, 3) == ""
    for kind in (train, evaluate):
        assert "this site has answered the final evaluation" in refusal_when_asked(grid, kind, 3)
    # a model that is kept needs no data
    assert refusal_when_asked(grid, "query.best", 3, best={"after": 1, "on": "test"}) == ""
    assert refusal_when_asked(grid, train, 1, **baseline) == ""
    assert "this site has answered round 1 of" in refusal_when_asked(grid, train, 1, **baseline)

    assert refusal_when_asked(LocalGrid(config, {NODE: node}, run_id=6), train, 1) == ""

    (file,) = (tmp_path / "state/privacy").glob("north.answered")
    file.write_text("damaged")

    assert "StateError (state-dir)" in refusal_when_asked(
        LocalGrid(config, {NODE: node}, run_id=7), train, 1
    )


def test_a_site_evaluates_in_the_rounds_that_the_settings_plan_and_in_no_other(tmp_path):
    """Each evaluation tells a server something about weights of its choice.

    So evaluate-every decides, here for rounds 1 and 4, and no message can ask for one more.
    """
    config = run_config(
        tmp_path,
        rounds=4,
        evaluate_every=3,
        models="mlp-1",
        validation_fraction=0.5,
        metrics="macro-f1",
        **DIGITS,
    )
    grid = LocalGrid(config, {NODE: node_with_a_share(tmp_path)}, run_id=5)

    for number in (1, 2, 3, 4):
        extra = grid.ask(instruction(number, evaluate=True, run_history="5"))
        assert "no complete record 'round'" in reason_in(extra)
        assert refusal_when_asked(grid, MessageType.TRAIN, number) == ""
        _, reply = grid.log[-1]  # to the message that it has just had
        groups = {name.split(".")[0] for name in reply.content["report"]}
        assert bool(groups & {*EVALUATED}) == (number in (1, 4))

    assert refusal_when_asked(grid, MessageType.EVALUATE, 4) == ""
    _, final_reply = grid.log[-1]
    assert "correct.head" in final_reply.content["report"]


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
def test_an_error_is_an_answer_and_an_interruption_none(kind, tmp_path, monkeypatch):
    """A site that has failed does not answer again; one that was interrupted does.

    Else a server could send weights that fail on some samples only, again and again, and learn
    from each error.
    """
    grid = LocalGrid(run_config(tmp_path, **DIGITS), {NODE: node_with_a_share(tmp_path)}, run_id=5)

    with monkeypatch.context() as patch:
        patch.setattr("client_app.app.make_report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            refusal_when_asked(grid, kind, 1)
        # asked again, it works on the message, and fails
        patch.setattr("client_app.app.evaluate_model", lambda *_: 1 / 0)
        assert "ZeroDivisionError" in refusal_when_asked(grid, kind, 1)

    assert "of this Flower run, and answers nothing twice" in refusal_when_asked(grid, kind, 1)


def test_a_private_model_comes_into_no_algorithm_that_uploads_it(tmp_path):
    """FedProto's model stays at the site; FedPer would upload its body.

    So a server that names an earlier run of FedProto gets that model trained on by FedProto only.
    """
    node = node_with_a_share(tmp_path)
    setting = {"run_name": "mine", "models": "htcnn-1", **DIGITS}
    fedproto = run_config(tmp_path, algo="fedproto", rounds=1, **setting)
    run_federation(fedproto, nodes={NODE: node}, run_id=11)
    message = instruction(2, run_history="11:1,4711")

    fedper = run_config(tmp_path, algo="fedper", **setting)
    assert reason_in(answer(node, fedper, message)).startswith("StateError")

    fedproto = run_config(tmp_path, algo="fedproto", fedproto__lambda=2.0, **setting)
    assert not answer(node, fedproto, message).has_error()


@pytest.mark.parametrize("algo", ["fedproto", "fedpcl"])
def test_decoded_data_and_models_are_the_users_alone(algo, tmp_path):
    """No file or folder that a site writes can be read by other users, under the usual umask.

    Data and backbones that are embedded need no permission of the operator, so the site runs.
    """
    node = node_with_a_share(tmp_path / "a") | {"cache-dir": str(tmp_path / "b/cache")}
    config = run_config(tmp_path, algo=algo, **DIGITS | {"train_samples": 20})

    before = os.umask(0o022)
    try:
        run_federation(config, nodes={NODE: node})
    finally:
        os.umask(before)

    names = set()
    for top in (tmp_path / "a", tmp_path / "b"):
        for path in (top, *top.rglob("*")):
            names.add(path.name)
            if path.name.endswith(".lock"):  # is empty, so it may be readable
                continue
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected, path

    assert names >= {"inputs.npy", "meta.json", "model.safetensors"}
