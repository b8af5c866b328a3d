"""A site with an operator of its own: what a run, or a server, cannot make it read, write, download, remove or tell."""

import os
import re
import stat
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client_app.answers import reason_of
from client_app.client import Client, open_client
from client_app.privacy_ledger import ledgers_of
from client_app.protections.differential_privacy import charge
from client_app.state import StateFolder
from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import SettingsError
from protofl_common.experiment import catalog as plugins
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.node import LIMITED, LIMITS
from protofl_common.experiment.settings import (
    WITH_SECAGG,
    Settings,
    default_run_config,
    digest_of,
    flatten,
)
from protofl_common.models.trained import TrainedModel
from protofl_common.privacy.plan import Mechanism
from protofl_common.tools.cli import main
from protofl_common.wire.records import SiteCard, pack_settings, unpack_site_card
from server_app.network.admission import FederationError, check_fit
from tests.support.attacks import interrupted
from tests.support.given import Patch, Printed
from tests.support.harness import LocalGrid, refusal, run_config, run_federation, settings_of
from tests.support.sites import images, named

SITE: dict[str, Any] = {"site-name": "north"}
OWN = SITE | {"dataset": "image-folder", "classes": "sick,well"}
SIMULATED: dict[str, Any] = {"partition-id": 0, "num-partitions": 1}
DIGITS: dict[str, Any] = {"dataset": "digits", "partition": "iid", "train_samples": 10}
EVALUATED = ("correct", "metrics", "validation")  # the parts of a report that an evaluation gives


def question(config: dict[str, Any]) -> Message:
    return Message(
        RecordDict({**pack_settings(digest_of(config))}), 7, MessageType.QUERY, group_id="0"
    )


def instruction(number: int, kind: str = MessageType.TRAIN, **words: Any) -> Message:
    """What a server sends in a round; 4711 is the Flower run of these messages."""
    said = {
        "round": number,
        "run_name": "mine",
        "run_history": "4711",
        "counted": 0,
        "part": 1.0,
    } | words
    return Message(RecordDict({"round": ConfigRecord(said)}), 7, kind, group_id=str(number))


def answer(node: dict[str, Any], config: dict[str, Any], message: Message | None = None) -> Message:
    return LocalGrid(config, {7: node}).asked(message or question(config))


def sharing(folder: Path) -> dict[str, Any]:
    return SITE | SIMULATED | {"state-dir": str(folder / "state")}


# -- what an error tells ----------------------------------------------------------------------------------------------

SOURCES = {"json": "file:small:{file}", "safetensors": "file:resnet18:{file}", "pth": "file:resnet18:{file}",
    "image": ""}  # fmt: skip


@pytest.mark.parametrize("suffix", SOURCES)
@pytest.mark.parametrize(
    "node", [SIMULATED, SITE | {"allow-backbones": "file:"}], ids=["simulated", "site"]
)
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.one_of(
        st.binary(min_size=16, max_size=300), st.text('abc{}[]":,0', min_size=16).map(str.encode)
    )
)
def test_no_file_content_leaves_in_an_error(
    suffix: str, node: dict[str, Any], tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / ("data/cats/x.png" if suffix == "image" else f"x.{suffix}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    if suffix == "image":
        data = {"data-dir": str(tmp_path / "data")}
        config = run_config(tmp_path, dataset="image-folder", partition="own") | data
        reply = answer(
            node | (data | {"dataset": "image-folder"} if "site-name" in node else {}), config
        )
    else:
        config = run_config(tmp_path, dataset="digits", partition="iid", train_samples=5)
        reply = answer(node, config | {"backbones": SOURCES[suffix].format(file=file)})
    reason = str(reply.error.reason)
    assert reason.isprintable()
    assert len(reason) <= 600
    for run in {content[i : i + 8] for i in range(len(content) - 7)}:
        assert repr(run)[2:-1] not in reason
        assert run.decode("latin-1") not in reason


@pytest.mark.parametrize(("at_site", "lines"), [(True, 2), (False, 1)])
def test_a_reason_is_printable_and_in_a_simulation_logged_once(
    capsys: Printed, at_site: bool, lines: int
) -> None:
    """Also where a text may leave as it is."""
    reason = reason_of(SettingsError("\x1b[2J\n" + "x" * 10**6), at_site)
    assert len(reason) < 600
    assert reason.isprintable()
    with pytest.raises(RuntimeError) as huge:
        torch.empty(2**50)
    assert "the machine has no memory left; take a smaller batch-size" in reason_of(
        huge.value, at_site
    )
    full = reason_of(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), at_site
    )
    assert "protofl run --gpus 1" in full
    assert "batch-size" in full
    for _ in range(2):
        reason_of(SettingsError("alpha = -7.5: must be above 0"), at_site)
    assert capsys.readouterr().err.count("alpha = -7.5") == lines


def test_the_server_learns_the_kind_of_error_and_the_sites_log_the_rest(
    tmp_path: Path, capsys: Printed
) -> None:
    data = images(
        tmp_path / "my scans", "HIV positive/DOE_Jane_1961.png", "negative/ROE_Richard.png"
    )
    config = run_config(
        tmp_path, dataset="image-folder", partition="own", classes="positive,negative"
    )
    node = SITE | {"data-dir": str(data), "dataset": "image-folder"}
    reason = answer(node, config).error.reason
    said = "its data cannot be read or divided as the run asks; the log of the site says more"
    assert reason == f"site north: DataError (classes): {said}"
    assert "'HIV positive'" in (log := capsys.readouterr().err)
    assert "DOE_Jane_1961.png" in log
    (data / "negative" / "ROE_Richard.png").write_bytes(b"no image")
    assert answer(node, config | {"classes": ""}).error.reason == f"site north: DataError: {said}"
    assert "ROE_Richard.png is not a readable image" in capsys.readouterr().err
    simulated = answer(SIMULATED, config | {"classes": "", "data-dir": str(data)}).error.reason
    assert "ROE_Richard.png is not a readable image" in simulated


# -- what a run chooses -----------------------------------------------------------------------------------------------

FOLDERS = {
    "data-dir": "/home/jane/photos",
    "state-dir": "/srv/www",
    "cache-dir": "/srv/www",
    "out-dir": "/srv/www",
}


def folders_of(found: Settings) -> list[str]:
    return [found.data.data_dir, found.machine.state_dir, found.data.cache_dir, found.run.out_dir]


@pytest.mark.parametrize(
    "node", [SITE, {**SIMULATED, "data-dir": ""}, {**SIMULATED, "arch": "cnn4"}]
)
def test_a_run_chooses_no_folder_of_a_site(node: dict[str, Any]) -> None:
    assert folders_of(settings_of(FOLDERS, node)) == ["", "", "", "runs"]
    own = {"data-dir": "/data", "state-dir": "/state", "cache-dir": "/cache"}
    read = {"dataset": "image-folder"}
    assert folders_of(settings_of(FOLDERS | {"partition": "own"}, node | read | own)) == [
        *own.values(),
        "runs",
    ]
    assert folders_of(settings_of(FOLDERS, SIMULATED)) == list(FOLDERS.values())


def test_a_run_neither_reads_nor_writes_where_it_wants_on_a_site(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    wanted = {key: str(tmp_path / "wanted" / key) for key in FOLDERS}
    images(Path(wanted["data-dir"]), *(f"{kind}/{i}.png" for kind in ("a", "b") for i in range(9)))
    before = sorted(tmp_path.joinpath("wanted").rglob("*"))
    config = (
        run_config(tmp_path, dataset="image-folder", partition="own", num_clients=1, classes="a,b")
        | wanted
    )
    node = SITE | {"dataset": "image-folder"}
    assert answer(node, config).error.reason.startswith("site north: DataError (data-dir): ")
    own = {"data-dir": wanted["data-dir"], "cache-dir": str(tmp_path / "cache")}
    assert not answer(node | own, config, instruction(1)).has_error()
    assert sorted(tmp_path.joinpath("wanted").rglob("*")) == before
    assert list((tmp_path / "work/runs/mine-4711/clients/north").glob("*.safetensors"))
    assert list((tmp_path / "cache").rglob("inputs.npy"))


@pytest.mark.parametrize(("run", "permission"), [
    ({"download": True}, {"allow-download": True}),
    ({"backbones": "torchvision:resnet18@64"}, {"allow-backbones": "torchvision:resnet18@64"}),
    ({"backbones": "torchvision:resnet18@64"}, {"allow-backbones": "torchvision:"}),
    ({"backbones": "package:efficientnet-lite0"}, {"allow-backbones": "package:efficientnet-lite0"}),
    ({"backbones": "package:efficientnet-lite0@96"}, {"allow-backbones": "package:"}),
    ({"backbones": "glyphs,timm:hf-hub:any/repo"}, {"allow-backbones": "x:y, timm:hf-hub:any/repo"}),
    ({"backbones": "file:small:/srv/weights/x.json"}, {"allow-backbones": "file:small:/srv/weights/"}),
    ({"arch": "torchvision:resnet18"}, {"allow-arch": "torchvision:"}),
    ({"models": "cnn4,timm:tiny.a"}, {"allow-arch": "torchvision:, timm:tiny.a"}),
    ({"fml.meme": "torchvision:resnet18"}, {"allow-arch": "torchvision:resnet18"}),
])  # fmt: skip
def test_downloads_and_strange_weights_need_the_operators_word(
    run: dict[str, Any], permission: dict[str, Any]
) -> None:
    (key, value), (allow, _) = *run.items(), *permission.items()
    (line,) = refusal(run, SITE).splitlines()
    assert line.startswith(f"{key} = ")
    assert str(value).split(",")[-1].lower() in line.lower()
    assert (
        f"not allowed on this site; its operator may {'set' if key == 'download' else 'name it in'} {allow}"
        in line
    )
    settings_of(run, SITE | permission)
    settings_of(run, SIMULATED)


@pytest.mark.parametrize("key", ["columns", "drop", "one-hot"])
def test_a_run_says_of_a_sites_table_what_the_operator_says_or_nothing(key: str) -> None:
    """Else it could try out which columns and categories a site has."""
    value, site = (
        "a:x|y" if key == "one-hot" else "a,b",
        SITE | {"dataset": "arrays", "data-dir": "/data"},
    )
    for node in (
        site,
        site | {key: "c:x|y"},
        SITE | {"dataset": "arrays", "partition-id": 0, "num-partitions": 2},
    ):
        said = refusal({key: value, "partition": "own"}, node)
        assert re.match(f"{key} = '.*not allowed on this site; its operator may set it", said)
    for run in ({key: value}, {}):
        data = settings_of(run | {"partition": "own"}, site | {key: value}).data
        assert getattr(data, key.replace("-", "_")) == value
    settings_of({key: value}, SIMULATED)


@pytest.mark.parametrize(("backbones", "allowed"), [
    ("file:small:/srv/weights/../../etc/shadow", "file:small:/srv/weights/"),
    ("file:small:/srv/weights.json.old", "file:small:/srv/weights.json"),
    ("file:small:/srv/x.json", "timm:,torchvision:"), ("timm:hf-hub:any/repo", "timm:hf-hub"), ("timm:resnet18", ","),
    ("package:efficientnet-lite0@96", "package:efficientnet-lite0"),
])  # fmt: skip
def test_a_permission_covers_what_it_says_only(backbones: str, allowed: str) -> None:
    assert "not allowed on this site" in refusal(
        {"backbones": backbones}, SITE | {"allow-backbones": allowed}
    )


@pytest.mark.parametrize("key", LIMITED)
def test_a_run_that_wants_too_much_of_a_site_is_refused(key: str) -> None:
    limit = LIMITED[key]
    for node, most in ((SITE, LIMITS[limit]), (SITE | {limit: 7}, 7)):
        small = dict.fromkeys(LIMITED, 1) | {"algo": key.rpartition(".")[0] or "fedproto"}
        settings_of(small | {key: most}, node)
        said = f"{key} = {most + 1}: this site takes at most {most}; its operator may raise {limit} (node config)"
        assert refusal(small | {key: most + 1}, node) == said
    settings_of(small | {key: LIMITS[limit] + 1}, SITE | {limit: 10**6})
    settings_of(small | {key: LIMITS[limit] + 1}, SIMULATED)
    settings_of(
        {"partition": "own"}, OWN | {"data-dir": "/srv/data", "image-size": 600}
    )  # its own, not a run's


def test_an_operator_chooses_the_algorithms_and_a_wrong_permission_is_named() -> None:
    node = SITE | {"allow-algorithms": "fedproto, fedtgp"}
    settings_of({"algo": "fedtgp"}, node)
    line = "algo = 'fedavg': not allowed on this site; its operator may name it in allow-algorithms (node config)"
    assert refusal({"algo": "fedavg"}, node) == line
    unknown = refusal({}, SITE | {"allow-algorithms": "fedprotto"})
    assert unknown.startswith(
        "node-config: allow-algorithms: 'fedprotto': choose from all, local, "
    )
    wrong = {"allow-backbones": True, "allow-algorithms": 3, "max-epochs": "7", "max-rounds": 0}
    for key, value in (("allow-download", "yes"), ("allow-download", 1), *wrong.items()):
        assert re.match(f"node-config: {key} = .* must be ", refusal({}, SITE | {key: value}))


def test_every_recipe_is_accepted_by_a_site_that_sets_no_limit() -> None:
    for recipe in Path("configs/recipes").glob("*.toml"):
        content = tomllib.loads(recipe.read_text(encoding="utf-8"))
        run = flatten(content) | {"download": False}
        for algo in {content["algo"], *(content.keys() & CATALOG)}:
            settings_of(
                run | {"algo": algo}, SITE | SIMULATED | {"dataset": run.get("dataset", "digits")}
            )


def test_a_run_makes_no_more_threads_than_a_site_has_processors(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        answer(SITE, run_config(tmp_path, threads=10**5))
        assert torch.get_num_threads() <= (os.cpu_count() or 1)
    finally:
        torch.set_num_threads(before)


VIT = "absent_moon.net:TinyViT"
PYTHON = {"algo": "moon", "arch": VIT, "models": f"cnn4, {VIT}", "metrics": "auc, absent_moon.figures:brier",
    "fml.meme": VIT, "fedkd.student": VIT}  # fmt: skip


@pytest.mark.parametrize("key", PYTHON)
def test_a_site_imports_what_its_operator_named_only(key: str, monkeypatch: Patch) -> None:
    """Nothing of the package is imported before the operator's word is asked for: there is none, an import fails."""
    points = {"moon": EntryPoint("moon", "absent_moon.method:ROW", plugins.GROUP)}
    monkeypatch.setattr("protofl_common.experiment.node.installed", lambda: points)
    monkeypatch.setattr(plugins, "installed", lambda: points)
    plugins.algorithm_named.cache_clear()
    run, allowed = {key: PYTHON[key]}, SITE | {"allow-python": "absent_moon"}
    for node in (SITE, SITE | {"allow-python": "absent, absent_moo, moon"}):
        line = refusal(run, node)
        assert line.startswith(f"{key} = ")
        assert "name absent_moon" in line
        assert line.endswith("in allow-python (node config)")
    if key == "algo":
        assert "ModuleNotFoundError" in refusal(run, allowed)
    else:
        settings_of(run, allowed)
        settings_of(run, SIMULATED)
        settings_of({}, SITE | {"arch": VIT})  # of its own, by the operator's word


@pytest.mark.parametrize(
    "dataset", ["hf:x", "absent_moon.data:stripes", "image-folder", "text-csv"]
)
def test_a_run_names_none_but_public_data_sets_at_a_site(dataset: str) -> None:
    """It would choose how the operator's files are read, or look into the cache of a hub."""
    strange = {"allow-python": "absent_moon", "data-dir": "/srv/data", "allow-download": True}
    for node in (
        SITE | SIMULATED,
        SITE | SIMULATED | strange,
        SITE,
        SITE | {"allow-python": "absent_moon"},
    ):
        line = f"dataset = {dataset!r}: not allowed on this site; its operator may name it as dataset (node config)"
        assert refusal({"dataset": dataset, "partition": "own"}, node) == line
    settings_of({"dataset": dataset, "partition": "own"}, SITE | {"dataset": dataset})
    settings_of({"dataset": dataset}, SIMULATED)


# -- what a site's own data are ----------------------------------------------------------------------------------------
def card_of(node: dict[str, Any], config: dict[str, Any]) -> SiteCard:
    reply = answer(node, config)
    assert not reply.has_error(), reply.error.reason
    return unpack_site_card(reply.content)


@pytest.mark.parametrize("dataset", ["domain-folder", "text-csv", "digits", "image-folder"])
def test_a_run_does_not_choose_how_a_sites_files_are_read(dataset: str, tmp_path: Path) -> None:
    """Read as DOMAIN/CLASS/image, the folders of the patients would be the classes."""
    scans = [
        f"{kind}/DOE_Jane_{day}/{i}.png"
        for kind in ("sick", "well")
        for day in range(3)
        for i in range(2)
    ]
    node = OWN | {"data-dir": str(images(tmp_path / "scans", *scans)), "image-size": 8}
    config = run_config(tmp_path, dataset=dataset, partition="own", classes="DOE_Jane_1,DOE_Jane_2")
    config |= {"image-size": 32, "text-length": 7}
    card = card_of(node, config)
    assert (card.classes, card.domain, card.input_shape) == (("sick", "well"), "", (3, 8, 8))


@pytest.mark.parametrize("dataset", ["image-folder", "digits"])
def test_a_site_that_does_not_say_what_its_data_are_takes_no_part(
    dataset: str, tmp_path: Path
) -> None:
    data = images(tmp_path / "scans", "sick/1.png", "sick/2.png", "well/1.png", "well/2.png")
    config = run_config(tmp_path, dataset=dataset, partition="own")
    said = (
        "site north: node-config: dataset: missing; with data of its own a site says how they are "
    )
    assert answer(SITE | {"data-dir": str(data)}, config).error.reason.startswith(said)


@pytest.mark.parametrize("kind", [MessageType.QUERY, MessageType.TRAIN])
def test_names_of_classes_and_domains_that_nobody_said_stay_there(
    kind: str, tmp_path: Path, capsys: Printed
) -> None:
    rows = [f"ward of Dr. Grey,DOE {i},{i}.5\n" for i in range(3)] * 2
    (tmp_path / "records.csv").write_text("".join(["client,label,x\n", *rows]))
    config = run_config(tmp_path, partition="own", models="table3", dataset="arrays")
    node = SITE | {"data-dir": str(tmp_path / "records.csv"), "dataset": "arrays"}
    LocalGrid(config, {})  # Flower's messages want a run
    reason = str(
        answer(node, config, instruction(1) if kind == MessageType.TRAIN else None).error.reason
    )
    assert "this site's data have 3 classes that nobody named; set classes" in reason
    assert "DOE" not in reason
    assert 'add classes="DOE 0,DOE 1,DOE 2" to its node config' in capsys.readouterr().err
    named = {"classes": "DOE 0,DOE 1,DOE 2"}
    for card in (card_of(node | named, config), card_of(node, config | named)):
        assert (card.classes, card.domain) == (("DOE 0", "DOE 1", "DOE 2"), "")
    assert (
        card_of(node | named | {"domain": "ward of Dr. Grey"}, config).domain == "ward of Dr. Grey"
    )


def test_weights_are_not_averaged_over_tables_whose_columns_differ(
    tmp_path: Path, capsys: Printed
) -> None:
    cards, config = (
        dict[str, SiteCard](),
        run_config(tmp_path, partition="own", models="table3", dataset="arrays"),
    )
    for names in ("age,dose", "dose,age"):
        (tmp_path / f"{names}.csv").write_text(f"label,{names}\n" + "sick,1,2\nwell,3,5\n" * 4)
        node = OWN | {"data-dir": str(tmp_path / f"{names}.csv"), "dataset": "arrays"}
        cards[names] = card_of(node, config | {"dp": "sample", "norm": "group"})
    check_fit(settings_of({"algo": "fedproto"}), cards)
    with pytest.raises(
        FederationError, match="differ in the names or the order of columns; rename or reorder them"
    ):
        check_fit(settings_of({"algo": "fedavg"}), cards)
    assert {len(card.columns) for card in cards.values()} == {
        4
    }  # too few digits to find names by trying
    assert (
        capsys.readouterr().err.count("under dp its numbers are not standardised: scale them") == 2
    )


@pytest.mark.parametrize(
    "demand", [{"min-class-samples": 9}, {"require-dp": "epsilon<=8"}, {"require-secagg": True}]
)
def test_a_site_with_demands_takes_no_names_of_classes_from_a_run(
    demand: dict[str, Any], tmp_path: Path
) -> None:
    """It accepts a run that names all its classes and no other: a run could try names out."""
    strict = (
        SITE | {"data-dir": str(tmp_path), "dataset": "arrays", "state-dir": str(tmp_path)} | demand
    )
    run = {
        "partition": "own",
        "classes": "sick,well",
        "dataset": "arrays",
        "dp": "sample",
        "norm": "group",
    }
    run |= {"secagg": "require-secagg" in demand} | {
        key: only for key, (only, _) in WITH_SECAGG.items()
    }
    assert f"classes: missing; with {next(iter(demand))} a site names its classes" in refusal(
        run, strict
    )
    settings_of(run, strict | {"classes": "sick,well"})


@pytest.mark.parametrize("demand", [{}, {"require-dp": "epsilon<=8"}, {"require-secagg": True}])
def test_a_demand_that_rests_on_memory_is_met_only_where_the_site_has_been(
    demand: dict[str, Any], tmp_path: Path, capsys: Printed
) -> None:
    node, dp = sharing(tmp_path) | demand, "sample" if "require-dp" in demand else "none"
    config = run_config(
        tmp_path, norm="group", dp=dp, dp_epsilon=8.0, secagg="require-secagg" in demand, rounds=1
    )
    unmounted = answer(node, config)
    assert (
        "state has neither a privacy ledger nor a key of north" in capsys.readouterr().err
    ) == bool(demand)
    named(north=tmp_path / "state/sites/north")
    assert [unmounted.has_error(), answer(node, config).has_error()] == [bool(demand), False]
    if demand:
        assert (
            "site north: StateError (state-dir): its state (models, requests"
            in unmounted.error.reason
        )


def test_a_run_does_not_choose_who_is_a_test_sample_of_a_site(
    tmp_path: Path, capsys: Printed
) -> None:
    """Two runs that differ in one training sample would tell that sample."""
    rows = [f"{kind},{np.sin(7 * i):.6f}" for i in range(100) for kind in ("sick", "well")]
    (tmp_path / "records.csv").write_text("\n".join(["label,x", *rows]))
    node = OWN | {"data-dir": str(tmp_path / "records.csv"), "dataset": "arrays"}
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

    def data(run: dict[str, Any], **facts: Any) -> list[bytes]:
        config = (
            run_config(tmp_path, partition="own", models="table3", dataset="arrays")
            | {"train-samples": 0}
            | run
        )
        data = open_client(Context(1, 7, node | facts, RecordDict(), config)).data
        parts = (
            data.train_inputs,
            data.train_labels,
            data.test_inputs,
            data.test_labels,
            data.validation_inputs,
        )
        return [np.asarray(part).tobytes() for part in parts]

    first, *others = [data(run) for run in runs]
    assert others == [first, first]
    assert [len(part) for part in first] == [150 * 4, 150 * 8, 50 * 4, 50 * 8, 0]
    own = data(
        runs[0], **{"train-fraction": 0.5, "validation-fraction": 0.2, "test-from": "balanced"}
    )
    assert [len(part) // size for part, size in zip(own, (4, 8, 4, 8, 4), strict=True)] == [
        80,
        80,
        100,
        100,
        20,
    ]
    card_of(
        node, run_config(tmp_path, partition="own", models="table3", dataset="arrays") | runs[0]
    )
    told = (
        "this site divides its own data, and ignores the run's seed, total-samples, train-samples, "
    )
    assert told in (log := capsys.readouterr().err)
    assert (log.count(told), log.count("its inputs, in this order: x\n")) == (1, 1)


@pytest.mark.parametrize("partition", ["iid", "natural", "n-way-k-shot"])
def test_a_run_takes_no_part_of_a_sites_own_data(partition: str) -> None:
    """With ``natural`` the first client that the data name would be all: one patient."""
    said = refusal({"partition": partition}, OWN | {"data-dir": "/srv/data"})
    assert f"partition = '{partition}': this site has data of its own; choose 'own'" in said


@pytest.mark.parametrize("key", ["test-from", "train-fraction", "validation-fraction"])
def test_a_site_does_not_divide_common_data_in_a_way_of_its_own(key: str) -> None:
    for node in (SITE, SITE | SIMULATED | {"data-dir": "/srv/data"}):
        said = refusal({}, node | {key: default_run_config()[key]})
        assert f"node-config: {key}: only at a site with data of its own" in said
    assert f"{key} = 'thirds': " in refusal(
        {"partition": "own"}, OWN | {"data-dir": "/srv/data", key: "thirds"}
    )


def test_neither_a_new_name_nor_a_copy_of_the_data_has_a_new_privacy_ledger(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_config(tmp_path, partition="own", dp="sample", dp_epsilon=2.0)

    def client(run_id: int = 1, **facts: Any) -> Client:
        facts = {"state-dir": str(tmp_path / "state"), "data-dir": str(tmp_path / "data"), **facts}
        return open_client(
            Context(run_id, 7, OWN | {"require-dp": "epsilon<=2"} | facts, RecordDict(), config)
        )

    def ledgers(**facts: Any) -> set[Path]:
        return {*ledgers_of(client(**facts), "any")}

    south, copy = {"site-name": "south"}, {"data-dir": str(tmp_path / "copy")}
    assert ledgers() == ledgers(**{"data-dir": "data"})
    assert all(file.is_relative_to(tmp_path / "state/privacy") for file in ledgers())
    assert [bool(ledgers() & ledgers(**facts)) for facts in (south, copy, south | copy)] == [
        True,
        True,
        False,
    ]
    nearly_all = [Mechanism(1.0, 3.0, 1)]
    charge(client(), "first", nearly_all)
    for facts in (south, copy):
        before = [file.read_text() for file in sorted(ledgers(**facts)) if file.exists()]
        with pytest.raises(SettingsError, match="require-dp, over all runs, = 2"):
            charge(client(2, **facts), "second", nearly_all)
        assert before == [file.read_text() for file in sorted(ledgers(**facts)) if file.exists()]
    charge(client(2, **south, **copy), "second", nearly_all)
    free = {"require-dp": "epsilon<=9", "state-dir": str(tmp_path / "free")}
    for run_id, name in (
        (1, "heart 2"),
        (2, "heart"),
    ):  # each may cost dp-epsilon: neither pays for the other
        charge(client(run_id, **free), name, nearly_all)
    for run_id, name in ((3, "heart"), (2, "another")):
        with pytest.raises(SettingsError, match="dp-epsilon = 2"):
            charge(client(run_id, **free), name, nearly_all)


@pytest.mark.parametrize("state", [{}, {"state-dir": "state"}, {"state-dir": "~/state"}])
def test_a_privacy_ledger_has_a_fixed_place(state: dict[str, Any]) -> None:
    """Started in another folder, the site would begin at zero."""
    said = refusal({"dp": "sample"}, SITE | {"require-dp": "epsilon<=8"} | state)
    assert re.search("node-config: state-dir = .*: with require-dp it must be absolute", said)


def test_a_runs_settings_forge_no_line_of_a_sites_log(
    tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    forged = "2026-01-01T00:00:00+0000 INFO protofl: run 1, fedproto, train 1: sent nothing"
    config = run_config(tmp_path) | {f"x\n{forged}\x1b[2J": 1}
    assert answer(SITE, config).has_error()
    monkeypatch.setattr(
        "client_app.introduction.open_client",
        MagicMock(side_effect=RuntimeError(f"x\n{forged}\x1b[2J")),
    )
    assert answer(SITE, config).has_error()
    log = capsys.readouterr().err
    assert forged in log
    assert not [
        line for line in log.splitlines() if line.startswith(forged) or not line.isprintable()
    ]


# -- what a server asks -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("run_name", "run_history"), [("../../elsewhere", "4711"), ("{tmp}/elsewhere", "4711"),
    ("..", "4711"), ("mine", "4711:9,5"), ("mine", "12")])  # fmt: skip
def test_a_server_leads_no_site_elsewhere(
    run_name: str, run_history: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (old,) = _saved(tmp_path / "work/runs/mine-12/clients", 12)
    node = SITE | {
        "partition-id": 0,
        "num-partitions": 2,
        "state-dir": str(tmp_path / "work" / "runs"),
    }
    config = run_config(tmp_path, **DIGITS)
    LocalGrid(config, {})  # Flower's messages want a run
    told = instruction(1, run_name=run_name.format(tmp=tmp_path), run_history=run_history)
    assert answer(node, config, told).error.reason.startswith("round.")
    assert (
        answer(node, config, instruction(3)).error.reason == "round.round is 3 in a run of 2 rounds"
    )
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and "sites" not in path.parts
    ] == [old]


def _saved(folder: Path, run_id: int) -> list[Path]:
    states = StateFolder(folder, "north", RunHistory(run_id))
    states.save(1, "cnn4", {"w": torch.ones(1)})
    return list(states.folder.iterdir())


def test_two_studies_of_one_name_do_not_meet_at_a_site(
    tmp_path: Path, capfd: Printed, monkeypatch: Patch
) -> None:
    node, setting = sharing(tmp_path), {"run_name": "mine", "keep_best": True, **DIGITS}
    models = _saved(tmp_path / "state/mine-11/clients", 10)
    before = [models[0].read_bytes()]
    run_federation(run_config(tmp_path / "a", **setting), nodes={7: node}, run_id=11)
    models += [
        tmp_path / f"state/mine-11/clients/north/{name}.safetensors" for name in ("model", "best")
    ]
    before += [model.read_bytes() for model in models[1:]]
    said = f"run mine (11) begins, in {tmp_path}/state/mine-11; protections: one reply to each question\n"
    assert said in capfd.readouterr().err
    monkeypatch.chdir(tmp_path / "state")
    assert main(["export", "mine", "--out", str(tmp_path / "first")]) == 0
    run_federation(run_config(tmp_path / "b", **setting, seed=7), nodes={7: node}, run_id=12)
    said = capfd.readouterr().err
    assert (
        f"run mine (12) begins, in {tmp_path}/state/mine-12; others of this name stay as they are: mine-11;"
        in said
    )
    assert [model.read_bytes() for model in models] == before
    for number in ("11", "12"):
        card = TrainedModel.read(
            tmp_path / f"state/mine-{number}/clients/north/model.safetensors"
        ).card
        assert (card.run, card.flower_run) == ("mine", number)
    assert main(["export", "mine", "--out", str(tmp_path / "model")]) == 1
    said = "several Flower runs had this name; choose one, the latest is last: mine-11, mine-12"
    assert said in capfd.readouterr().err
    assert main(["export", "mine-12", "--out", str(tmp_path / "model")]) == 0
    assert "Flower run 12" in (tmp_path / "model/README.md").read_text()


def test_a_server_that_claims_to_resume_a_run_replaces_no_model_of_it(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """And a site's model waits for the disk."""
    node, config = sharing(tmp_path), run_config(tmp_path, run_name="mine", **DIGITS)
    run_federation(config, nodes={7: node}, run_id=11)
    former = (model := tmp_path / "state/mine-11/clients/north/model.safetensors").read_bytes()
    synced = set[str]()
    monkeypatch.setattr(
        "os.fsync", lambda file: synced.add(Path(os.readlink(f"/proc/self/fd/{file}")).name)
    )
    assert not answer(
        node, config, instruction(2, MessageType.EVALUATE, run_history="11:2,4711")
    ).has_error()
    assert model.name in synced
    assert model.with_name("model-before-4711.safetensors").read_bytes() == former


def asked(grid: LocalGrid, kind: str, number: int, **more: Any) -> str:
    """Ask a site for a round of training, or to evaluate; the reason for which it refuses, "" if it does not."""
    message = instruction(number, kind, run_history=str(grid.run_id))
    message.content.update({name: ConfigRecord(value) for name, value in more.items()})
    reply = grid.asked(message)
    return str(reply.error.reason) if reply.has_error() else ""


def test_a_real_site_answers_each_question_once_in_a_flower_run(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    settings = {"rounds": 3, "baselines": "local", "models": "mlp-1", "keep_best": True}
    config, node = run_config(tmp_path, algo="fedproto", **DIGITS | settings), sharing(tmp_path)
    train, evaluate, baseline = (
        MessageType.TRAIN,
        MessageType.EVALUATE,
        {"baseline": {"algo": "local"}},
    )
    grid = LocalGrid(config, {7: node}, run_id=5)
    for kind in (train, evaluate, MessageType.QUERY):  # which Flower gives to the same handler
        assert f"a message of the kind '{kind}.default'" in asked(grid, f"{kind}.default", 1)
    assert asked(grid, train, 1) == ""
    assert "this Flower run has had the reply to round 1: one for each" in asked(grid, train, 1)
    for number in (
        0,
        -1,
    ):  # the card of a model that is left after such a round could not be read again
        for kind in (train, evaluate):
            assert asked(grid, kind, number) == f"round.round is {number} in a run of 3 rounds"
    assert asked(grid, train, 3) == ""
    grid = LocalGrid(config, {7: node}, run_id=5)  # the site was started again
    with monkeypatch.context() as patch:
        patch.setattr("client_app.client.open_client_data", None)  # it reads no data
        assert "has had the reply to round 3" in asked(grid, train, 2)
    assert asked(grid, evaluate, 3) == ""
    for kind in (train, evaluate):
        assert "has had the reply to the final evaluation" in asked(grid, kind, 3)
    assert asked(grid, "query.best", 3, best={"after": 1, "on": "test"}) == ""  # reads no data
    assert asked(grid, train, 1, **baseline) == ""
    assert "has had the reply to round 1" in asked(grid, train, 1, **baseline)
    assert asked(LocalGrid(config, {7: node}, run_id=6), train, 1) == ""
    (file,) = (tmp_path / "state/privacy").glob("north.answered")
    file.write_text("damaged")
    assert "StateError (state-dir)" in asked(LocalGrid(config, {7: node}, run_id=7), train, 1)
    simulated = LocalGrid(config, {7: SIMULATED}, run_id=5)
    assert [asked(simulated, train, 1), asked(simulated, train, 1)] == ["", ""]


def test_a_site_evaluates_in_the_rounds_that_the_settings_plan_and_in_no_other(
    tmp_path: Path,
) -> None:
    """Each evaluation answers a server that has chosen the weights: a message cannot ask for one more."""
    settings = {
        "rounds": 4,
        "evaluate_every": 3,
        "models": "mlp-1",
        "validation_fraction": 0.5,
        "metrics": "macro-f1",
    }
    grid = LocalGrid(run_config(tmp_path, **DIGITS | settings), {7: sharing(tmp_path)}, run_id=5)
    for number in (1, 2, 3, 4):
        more = grid.asked(instruction(number, evaluate=True, run_history="5"))
        assert "no complete record 'round'" in more.error.reason
        assert asked(grid, MessageType.TRAIN, number) == ""
        figures = [
            name
            for name in grid.log[-1][1].content["report"]
            if name.partition(".")[0] in EVALUATED
        ]
        assert bool(figures) == (number in (1, 4))
    assert asked(grid, MessageType.EVALUATE, 4) == ""
    assert "correct.head" in grid.log[-1][1].content["report"]


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
def test_an_error_is_an_answer_and_an_interruption_none(
    kind: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Weights that fail on some samples only would else ask as many questions as a server likes."""
    grid = LocalGrid(run_config(tmp_path, **DIGITS), {7: sharing(tmp_path)}, run_id=5)
    with monkeypatch.context() as patch:
        patch.setattr("client_app.app.Visit._report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            asked(grid, kind, 1)
        patch.setattr("client_app.app.Visit.evaluate", lambda *_: 1 / 0)
        assert "ZeroDivisionError" in asked(grid, kind, 1)
    assert "this Flower run has had the reply to" in asked(grid, kind, 1)


def test_a_private_model_comes_into_no_algorithm_that_uploads_it(tmp_path: Path) -> None:
    """A server that names an earlier run of FedProto gets its model trained on, but by FedProto only."""
    node, setting = sharing(tmp_path), {"run_name": "mine", "models": "htcnn-1", **DIGITS}
    run_federation(
        run_config(tmp_path, algo="fedproto", rounds=1, **setting), nodes={7: node}, run_id=11
    )
    told = instruction(2, run_history="11:1,4711")
    assert answer(
        node, run_config(tmp_path, algo="fedper", **setting), told
    ).error.reason.startswith("StateError")
    assert not answer(
        node, run_config(tmp_path, algo="fedproto", fedproto__lambda=2.0, **setting), told
    ).has_error()


@pytest.mark.parametrize("algo", ["fedproto", "fedpcl"])
def test_decoded_data_and_models_are_the_users_alone(algo: str, tmp_path: Path) -> None:
    """Embedded data and backbones need no permission."""
    before, node = (
        os.umask(0o022),
        sharing(tmp_path / "a") | {"cache-dir": str(tmp_path / "b/cache")},
    )
    try:
        run_federation(
            run_config(tmp_path, algo=algo, **DIGITS | {"train_samples": 20}), nodes={7: node}
        )
    finally:
        os.umask(before)
    found = [path for top in ("a", "b") for path in [tmp_path / top, *(tmp_path / top).rglob("*")]]
    assert {path.name for path in found} >= {"inputs.npy", "meta.json", "model.safetensors"}
    for path in found:
        if not path.name.endswith(".lock"):  # empty
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
