"""Every recipe takes two rounds: its algorithm, partition, models and losses, on a few embedded images.

Prototypes come down from the second round on, and only then have the papers' losses something to do.
"""

import tomllib
from pathlib import Path

import pytest

from protofl_common.data.sources import SOURCES
from protofl_common.experiment.settings import Settings, default_run_config, flatten
from tests.support import ROOT
from tests.support.declared import MINIMISED
from tests.support.harness import run_config, run_federation

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))
SMALL = {"rounds": 2, "evaluate-every": 2, "data-dir": "", "classes": "", "image-size": 24, "test-from": "split",
    "total-samples": 0, "train-samples": 12, "test-samples": 12, "batch-size": 4, "local-epochs": 1,
    "threads": 1}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_a_recipe_takes_two_rounds_and_says_how_to_run_it(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert f"# flwr run . --run-config configs/recipes/{recipe.name} --federation-config" in text
    wanted = flatten(tomllib.loads(text))
    dataset = "digit-domains" if SOURCES[str(wanted["dataset"])].has_domains else "digits"
    images = str(wanted.get("models")) not in ("table3", "signal3", "text3")
    kept = ("out-dir", "cache-dir", "join-timeout")
    here = {key: value for key, value in run_config(tmp_path).items() if key in kept}
    small = SMALL | {"dataset": dataset, "classes-per-client": min(10, int(wanted.get("classes-per-client", 2)))}
    small |= {} if images else {"models": "small3", "lr": 0.01}
    outcome = run_federation(run_config(tmp_path) | wanted | small | here, clients=2)
    assert [row["valid"] for row in outcome.rows] == [2, 2, 2]
    assert sum(outcome.summary["trouble"].values()) == 0
    unlabelled = {"unlabelled"} if wanted.get("pu-weight") else set()
    assert set(outcome.rows[1]["losses"]) - {"total"} == MINIMISED[str(wanted["algo"])] | unlabelled


SAME_CLIENTS = {"mpft-office10": "fedpcl-office10", "fpl-office10": "fedplvm-office10"} | {
    recipe.stem: "fedtgp-fmnist-practical" for recipe in RECIPES if recipe.stem.endswith("-fmnist")
}
"""Recipe -> the one whose setting it has. PFLlib's leaderboard and FedTGP's Table 10 have one generator of data."""


@pytest.mark.parametrize("name", SAME_CLIENTS)
def test_recipes_of_one_setting_divide_the_data_alike(name: str) -> None:
    folder = RECIPES[0].parent
    texts = [(folder / f"{one}.toml").read_text(encoding="utf-8") for one in (name, SAME_CLIENTS[name])]
    found, wanted = (Settings.from_run_config(default_run_config() | flatten(tomllib.loads(text))) for text in texts)
    assert found.data == wanted.data
    if found.model.models == wanted.model.models == "htcnn8":  # Table 10, whose code draws each client's first weights
        assert found.starts_alike == wanted.starts_alike
