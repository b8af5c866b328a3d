"""SuperLink and two SuperNodes as separate processes on loopback, each with its own data and architecture."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from sklearn.datasets import load_digits

from protofl_common.tools.cli import main
from tests.support.processes import superlink, supernode

pytestmark = pytest.mark.system


def write_site(folder: Path, digits: np.ndarray, labels: np.ndarray, inverted: bool) -> None:
    """An image folder CLASS/image.png of enlarged digits."""
    for index, (digit, label) in enumerate(zip(digits, labels, strict=True)):
        pixels = (digit * 15.9).astype(np.uint8)
        path = folder / str(label) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - pixels if inverted else pixels).resize((28, 28)).save(path)


@pytest.mark.long
def test_two_sites_with_their_own_data_and_models_learn_together(tmp_path: Path) -> None:
    digits = load_digits()
    for site, rows in (("north", slice(0, 300)), ("south", slice(300, 600))):
        write_site(tmp_path / f"data-{site}", digits.images[rows], digits.target[rows], inverted=site == "south")
    settings = 'partition="own" image-size=28 rounds=3 num-clients=2 lr=0.05 keep-best=true'
    settings += f' threads=1 out-dir="{tmp_path / "runs"}" run-name="two-sites"'

    def facts(site: str, arch: str) -> str:
        data, state = tmp_path / f"data-{site}", tmp_path / f"state-{site}"
        cache = tmp_path / f"cache-{site}"
        read = 'dataset="image-folder" classes="0,1,2,3,4,5,6,7,8,9" validation-fraction=0.1 approve=false'
        return f'site-name="{site}" data-dir="{data}" {read} state-dir="{state}" cache-dir="{cache}" arch="{arch}"'

    with (
        superlink(tmp_path) as connection,
        supernode(connection, tmp_path / "north", facts("north", "cnn4")),
        supernode(connection, tmp_path / "south", facts("south", "htcnn-3")),
    ):
        output, status = connection.run("--run-config", settings)
    assert status == "finished:completed", output

    summary = json.loads((tmp_path / "runs" / "two-sites" / "summary.json").read_text())
    assert {site: client["arch"] for site, client in summary["clients"].items()} == {
        "north": "cnn4",
        "south": "htcnn-3",
    }
    assert sum(summary["trouble"].values()) == 0
    assert min(client["head"] for client in summary["accuracy-of-clients"].values()) > 0.5
    assert summary["accuracy"]["prototype"]["mean"] > 0.3
    rows = [json.loads(line) for line in (tmp_path / "runs/two-sites/metrics.jsonl").read_text().splitlines()]
    assert [row["valid"] for row in rows] == [2, 2, 2, 2]
    for site, arch in (("north", "cnn4"), ("south", "htcnn-3")):
        folder = tmp_path / f"state-{site}/two-sites"
        (state,) = folder.parent.glob(f"{folder.name}-*/clients/{site}/0*.safetensors")
        with safe_open(state, "pt") as file:
            assert file.metadata()["arch"] == arch
            assert file.metadata()["round"] == "3"
        assert main(["export", str(folder), "--out", str(tmp_path / f"model-{site}")]) == 0
        card = json.loads((tmp_path / f"model-{site}" / "model.json").read_text())
        assert (card["site"], card["arch"], card["round"]) == (site, arch, 3)
        assert card["accuracy"] == summary["accuracy-of-clients"][site]
        assert main(["export", str(folder), "--best", "--out", str(tmp_path / f"best-{site}")]) == 0
        card = json.loads((tmp_path / f"best-{site}" / "model.json").read_text())
        assert (card["round"], card["chosen-on"]) == (summary["best-round"]["after"], "validation")
        assert card["accuracy"] == rows[card["round"]]["clients"][site]["accuracy"]
