"""Every recipe takes two rounds: its algorithms, partition, models and losses, on a few images."""

import tomllib

import pytest

from protofl_common.config.datasets import DATASETS
from protofl_common.config.options import flatten
from protofl_common.experiment.catalog import CATALOG
from protofl_common.tools.tables.plan import plan
from protofl_common.tools.tables.spec import read_table
from tests.support import ROOT
from tests.support.declared import MINIMISED
from tests.support.harness import run_config, run_federation, settings_of

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))
SMALL = {
    "rounds": 2,
    "evaluate-every": 2,
    "data-dir": "",
    "classes": "",
    "image-size": 24,
    "test-from": "split",
    "total-samples": 0,
    "train-samples": 12,
    "test-samples": 12,
    "batch-size": 4,
    "local-epochs": 1,
    "threads": 1,
}


def content_of(recipe):
    return tomllib.loads(recipe.read_text(encoding="utf-8"))


def algorithms():
    """Return each recipe with the algorithm that it names, and each other it has settings for."""
    pairs = []
    for recipe in RECIPES:
        content = content_of(recipe)
        for algo in sorted({content["algo"], *(content.keys() & CATALOG)}):
            pairs.append((recipe, algo))
    return pairs


@pytest.mark.parametrize(
    ("recipe", "algo"), algorithms(), ids=lambda part: getattr(part, "stem", part)
)
def test_a_recipe_takes_two_rounds(recipe, algo, tmp_path):
    """Its data set is replaced by embedded digits, in several domains if it has domains."""
    wanted = flatten(content_of(recipe)) | {"algo": algo}
    here = run_config(tmp_path)
    config = here | wanted | SMALL
    config["dataset"] = "digits"
    if DATASETS[str(wanted["dataset"])].has_domains:
        config["dataset"] = "digit-domains"
    if wanted.get("task") == "multi-label":  # digits have one label each
        config |= {"dataset": wanted["dataset"], "test-from": wanted["test-from"]}
    config["classes-per-client"] = min(10, int(wanted.get("classes-per-client", 2)))
    if wanted.get("models") in ("table3", "signal3", "text3"):  # the data are images here
        config |= {"models": "small3", "lr": 0.01}
    for key in ("out-dir", "cache-dir", "join-timeout"):
        config[key] = here[key]

    outcome = run_federation(config, clients=2)

    assert outcome.per_row("valid") == [2, 2, 2]
    assert not outcome.trouble
    assert set(outcome.rows[1]["losses"]) - {"total"} == MINIMISED[algo]


SAME_CLIENTS = {"mpft-office10": "fedpcl-office10", "pfllib-fmnist": "fedtgp-fmnist-practical"}
"""Recipe -> the one whose setting it has.

PFLlib's leaderboard and FedTGP's Table 10 have one generator of data.
"""


@pytest.mark.parametrize("name", SAME_CLIENTS)
def test_recipes_of_one_setting_divide_the_data_alike(name):
    def data(recipe):
        """Return all settings of data of a recipe."""
        return settings_of(flatten(content_of(RECIPES[0].parent / f"{recipe}.toml"))).data

    assert data(name) == data(SAME_CLIENTS[name])


def test_the_code_of_table_10_draws_the_first_weights_of_each_client(monkeypatch):
    """In FedTGP's Table 10 clients of eight networks begin with weights of their own.

    All 14 rows of the table with these networks do so.
    """
    monkeypatch.setattr("protofl_common.tools.tables.plan.check_data_are_here", lambda data: None)
    table = read_table(ROOT / "configs" / "tables" / "fmnist-baselines.yaml")
    rows = set()
    seed = 1
    for cell in plan(table, seeds=(seed,)):
        run = cell.runs[seed]
        if run.config["models"] == "htcnn8":
            rows.add(cell.row)
            assert not run.settings.starts_alike, cell.row

    assert len(rows) == 14


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_says_how_to_run_it(recipe):
    text = recipe.read_text(encoding="utf-8")
    assert f"# flwr run . --run-config configs/recipes/{recipe.name} --federation-config" in text
