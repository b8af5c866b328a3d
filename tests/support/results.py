"""What runs leave behind, compared."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.harness import Outcome
from tests.support.plain import CLIENTS, assert_equal, model_left


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as far as they must repeat: everything but seconds, and heads of logs that have times."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: clean(entry) for key, entry in value.items() if key not in ("seconds", "audit")
            }
        return value

    return [clean(row) for row in rows]


def assert_same(found: Outcome, wanted: Outcome) -> None:
    for name in ("prototypes.jsonl", "sites.json"):
        one, other = (run.folder / name for run in (found, wanted))
        assert one.exists() == other.exists()
        assert not one.exists() or one.read_text() == other.read_text(), name
    for name in ("prototypes.safetensors", "client-prototypes.safetensors", "weights.safetensors"):
        assert (found.folder / name).exists() == (wanted.folder / name).exists()
        if (found.folder / name).exists():
            assert_equal(load_file(found.folder / name), load_file(wanted.folder / name))
    assert without_times(found.rows) == without_times(wanted.rows)
    for site in (wanted.folder / "clients").iterdir():
        files = [sorted((run.folder / "clients" / site.name).iterdir()) for run in (found, wanted)]
        assert "model.safetensors" in [file.name for file in files[0]]
        for kept, expected in (
            [load_file(file) for file in pair] for pair in zip(*files, strict=True)
        ):
            assert all(torch.equal(kept[key], expected[key]) for key in expected), site.name


Models = dict[str, dict[str, torch.Tensor]]


def metrics(outcome: Outcome) -> list[tuple[Any, ...]]:
    """Accuracies and cross-entropy of every client in every round."""
    return [
        (row["kind"], site, client["accuracy"], client.get("losses", {}).get("cross-entropy"))
        for row in outcome.rows
        for site, client in row["clients"].items()
    ]


def models_left(outcome: Outcome) -> Models:
    """Site -> the parameters and buffers of the model that it leaves."""
    sites = [path.parent.name for path in outcome.folder.glob("clients/*/model.safetensors")]
    return {site: model_left(outcome.folder, site) for site in sites}


def assert_same_models(found: Models, wanted: Models) -> None:
    assert len(wanted) == CLIENTS
    assert found.keys() == wanted.keys()
    for site, one in wanted.items():
        assert_equal(found[site], one)


def digests(folder: Path) -> dict[str, str]:
    """File and name of each global tensor and each of a client's model that a run leaves -> a digest of it."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("clients/*/model.safetensors")])
    return {
        f"{file.relative_to(folder)}:{name}": hashlib.sha256(value.contiguous().numpy()).hexdigest()
        for file in files
        for name, value in load_file(file).items()
    }
