"""Print what a run achieved: ``python result.py FOLDER``; exit 1 if there is nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from protofl_common.config.options import SettingsError
from protofl_common.runs.folder import RunFolder


def main(folder: Path) -> int:
    """The final accuracies, by site."""
    try:
        summary = RunFolder(folder).finished_summary()
    except SettingsError as error:
        print(error)
        return 1
    print(f"\n{summary['algorithm']} on {summary['dataset']}, {summary['rounds']} rounds")
    for site, client in sorted(summary["clients"].items()):
        accuracy = summary["accuracy-of-clients"].get(site, {})
        figures = "  ".join(
            f"{kind} {value:.3f}" for kind, value in accuracy.items() if value is not None
        )
        print(f"  {site:<6} {client['arch']:<9} {client['domain']:<9} {figures}")
    for kind, over in summary["accuracy"].items():
        print(f"mean accuracy, {kind}: {over['mean']:.3f}") if over else None
    print(f"seconds per round: {summary['seconds-per-round']:.1f}")
    print(f"trouble: {summary['trouble']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
