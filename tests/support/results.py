"""What runs leave behind, compared."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from protofl_common.runs.folder import RunFolder
from tests.support.harness import Outcome
from tests.support.plain import CLIENTS, assert_equal, model_left

Models = dict[str, dict[str, torch.Tensor]]
"""Site -> the parameters and buffers of its model."""


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of metrics without the seconds in them, which two equal runs do not share."""
    return [_without_times(row) for row in rows]


def _without_times(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_times(value[key]) for key in value if key != "seconds"}


def assert_same(found: Outcome, wanted: Outcome) -> None:
    """Both runs left the same files to the bit, except for times.

    These are global results, rows of metrics, and all that clients keep.
    """
    for name in ("prototypes.jsonl", "sites.json"):
        assert _text(found.folder / name) == _text(wanted.folder / name), name
    for name in ("prototypes.safetensors", "client-prototypes.safetensors", "weights.safetensors"):
        assert (found.folder / name).exists() == (wanted.folder / name).exists()
        assert_equal(_tensors(found.folder / name), _tensors(wanted.folder / name))
    assert without_times(found.rows) == without_times(wanted.rows)

    for site in (wanted.folder / "clients").iterdir():
        kept = sorted((found.folder / "clients" / site.name).iterdir())
        assert "model.safetensors" in [file.name for file in kept]
        for file, other in zip(kept, sorted(site.iterdir()), strict=True):
            assert_equal(load_file(file), load_file(other))


def _text(file: Path) -> str | None:
    return file.read_text() if file.exists() else None


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    return load_file(file) if file.exists() else {}


def metrics(outcome: Outcome) -> list[tuple[Any, ...]]:
    """Return (kind of row, site, accuracies, cross-entropy) of every client in every row."""
    figures = []
    for row in outcome.rows:
        for site, client in row["clients"].items():
            loss = client.get("losses", {}).get("cross-entropy")
            figures.append((row["kind"], site, client["accuracy"], loss))
    return figures


def models_left(outcome: Outcome) -> Models:
    """Return the models that the sites of a run leave in its folder."""
    sites = [path.parent.name for path in outcome.folder.glob("clients/*/model.safetensors")]
    return {site: model_left(outcome.folder, site) for site in sites}


def assert_same_models(found: Models, wanted: Models) -> None:
    """Every client of a usual run has the same model in both, to the bit."""
    assert len(wanted) == CLIENTS
    assert found.keys() == wanted.keys()
    for site, model in wanted.items():
        assert_equal(found[site], model)


def left_by(run: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return what two equal runs have in common: rows of metrics without times, and digests."""
    return without_times(RunFolder(run).rows()), digests(run)


def digests(folder: Path) -> dict[str, str]:
    """Return ``FILE:TENSOR`` -> SHA-256, for each global tensor and each of a client's model."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("clients/*/model.safetensors")])
    found = {}
    for file in files:
        for name, value in load_file(file).items():
            content = value.contiguous().numpy()
            found[f"{file.relative_to(folder)}:{name}"] = hashlib.sha256(content).hexdigest()
    return found
