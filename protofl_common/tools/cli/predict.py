"""What a model that was exported says of inputs: their class, with probability, and the nearest prototype.

protofl predict model photo.jpg
protofl predict model photos/ --by head --json
protofl predict model patients.csv

An input that is farther from every prototype than the site's own ones are is called unknown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofl_common.config.options import SettingsError

UNKNOWN = "unknown"


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder that protofl export wrote")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=_FILES)
    parser.add_argument("--by", default="", help="head or prototype (default: what was right more often)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--allow-backbones", default="", metavar="NAMES", help=_BACKBONES)
    parser.add_argument("--json", action="store_true", help="a line of JSON per sample")


_BACKBONES = "frozen backbones, beside the embedded ones, that the model may read or download: torchvision:, file:…"
_FILES = "image files, or folders of them; for other models .npy, .npz or CSV as in training, without labels"


def act(arguments: argparse.Namespace) -> int:
    """Print a row per sample."""
    from protofl_common.tools.inference.predictor import Predictor
    from protofl_common.tools.inference.reading import read_inputs

    files = _files(arguments.files)
    predictor = Predictor.load(arguments.model, arguments.device, arguments.allow_backbones)
    by = arguments.by or predictor.card.inference
    names, inputs = read_inputs(files, predictor.card)
    found = predictor.predict(inputs, by)
    if arguments.json:
        for file, one in zip(names, found, strict=True):
            print(json.dumps({"file": file, "by": by} | dataclasses.asdict(one), ensure_ascii=False))
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("file", f"class (by {by})", "probability", "nearest prototype", "distance"):
        table.add_column(name, justify="right" if name in ("probability", "distance") else "left", overflow="fold")
    for file, one in zip(names, found, strict=True):
        name = f"{UNKNOWN} ({one.name}?)" if one.unknown else one.name
        near = ("–", "–") if one.distance is None else (escape(one.nearest or ""), f"{one.distance:.4g}")
        table.add_row(escape(file), escape(name), f"{one.probability:.3f}", *near)
    Console().print(table)
    return 0


def _files(given: list[Path]) -> list[Path]:
    """The files, and those in the folders."""
    from protofl_common.datasets.folders import image_files

    files: list[Path] = []
    for path in given:
        if not path.exists():
            raise SettingsError(f"{path}: there is no such file")
        found = image_files(path) if path.is_dir() else [path]
        if not found:
            raise SettingsError(f"{path}: no images in this folder")
        files += found
    return files
