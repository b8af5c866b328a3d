"""What the programs have in common: their options' help, and how they print what they measured."""

import argparse
import statistics
from collections.abc import Iterable, Sequence

from protofl_common.runs.figures import Table


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of options, whose help shows the module's text as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=raw)


def of_seeds(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± sample standard deviation; without values a dash."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}" if values else "–"


def with_content(page: str, begin: str, content: str, end: str) -> str:
    """Return the page with ``content`` in place of what stands between its two marks."""
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}{content}{end}{after}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(Table(heads, list(rows)).as_markdown())
