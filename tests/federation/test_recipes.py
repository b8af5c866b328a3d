"""Every recipe takes two rounds: its algorithms, partition, models and losses, on a few embedded images."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from protofl_common.data.sources import SOURCES
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings, default_run_config, flatten
from protofl_common.tools.tables.plan import plan
from protofl_common.tools.tables.spec import read_table
from tests.support import ROOT
from tests.support.declared import MINIMISED
from tests.support.harness import run_config, run_federation

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))
SMALL = {"rounds": 2, "evaluate-every": 2, "data-dir": "", "classes": "", "image-size": 24, "test-from": "split",
    "total-samples": 0, "train-samples": 12, "test-samples": 12, "batch-size": 4, "local-epochs": 1,
    "threads": 1}  # fmt: skip


def algorithms() -> Iterator[tuple[Path, str]]:
    """Each recipe with the algorithm that it names, and with each other one that it has settings for."""
    for recipe in RECIPES:
        content = tomllib.loads(recipe.read_text(encoding="utf-8"))
        yield from ((recipe, algo) for algo in {content["algo"], *(content.keys() & CATALOG)})


@pytest.mark.parametrize(
    ("recipe", "algo"), sorted(algorithms()), ids=lambda part: getattr(part, "stem", part)
)
def test_a_recipe_takes_two_rounds(recipe: Path, algo: str, tmp_path: Path) -> None:
    wanted = flatten(tomllib.loads(recipe.read_text(encoding="utf-8"))) | {"algo": algo}
    dataset = "digit-domains" if SOURCES[str(wanted["dataset"])].has_domains else "digits"
    images = str(wanted.get("models")) not in ("table3", "signal3", "text3")
    kept = ("out-dir", "cache-dir", "join-timeout")
    here = {key: value for key, value in run_config(tmp_path).items() if key in kept}
    small = SMALL | {
        "dataset": dataset,
        "classes-per-client": min(10, int(wanted.get("classes-per-client", 2))),
    }
    small |= {} if images else {"models": "small3", "lr": 0.01}
    outcome = run_federation(run_config(tmp_path) | wanted | small | here, clients=2)
    assert [row["valid"] for row in outcome.rows] == [2, 2, 2]
    assert sum(outcome.summary["trouble"].values()) == 0
    assert set(outcome.rows[1]["losses"]) - {"total"} == MINIMISED[algo]


SAME_CLIENTS = {"mpft-office10": "fedpcl-office10", "pfllib-fmnist": "fedtgp-fmnist-practical"}
"""Recipe -> the one whose setting it has. PFLlib's leaderboard and FedTGP's Table 10 have one generator of data."""


@pytest.mark.parametrize("name", SAME_CLIENTS)
def test_recipes_of_one_setting_divide_the_data_alike(name: str) -> None:
    texts = [
        (RECIPES[0].parent / f"{one}.toml").read_text(encoding="utf-8")
        for one in (name, SAME_CLIENTS[name])
    ]
    found, wanted = (
        Settings.from_run_config(default_run_config() | flatten(tomllib.loads(text)))
        for text in texts
    )
    assert found.data == wanted.data


def test_the_code_of_table_10_draws_the_first_weights_of_each_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("protofl_common.tools.tables.plan.check_data_are_here", lambda data: None)
    cells = plan(read_table(ROOT / "configs" / "tables" / "fmnist-baselines.yaml"), seeds=(1,))
    eight = {
        cell.row: cell.runs[1].settings
        for cell in cells
        if cell.runs[1].config["models"] == "htcnn8"
    }
    assert [row for row, settings in eight.items() if settings.starts_alike] == []
    assert len(eight) == 14


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_a_recipe_says_how_to_run_it(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert f"# flwr run . --run-config configs/recipes/{recipe.name} --federation-config" in text
