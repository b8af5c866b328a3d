"""The documents' site in headless Chromium, without a network: it fits the screen, can be read, and shows equations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, CONTRAST, WIDTHS, measured

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
SHOWN = (
    CONTRAST
    + r"""
  const article = document.querySelector("article");
  const scrolls = [...article.querySelectorAll("pre code, .md-typeset__scrollwrap, .katex-display, table")];
  return {
    pale: pale("article"), wide: document.documentElement.scrollWidth, page: light(ground(article)),
    unreachable: scrolls.filter(box => box.scrollWidth > box.clientWidth + 1 && !box.closest("[tabindex]")).length,
    unnamed: [...article.querySelectorAll("img:not([alt]), svg[role=img]:not([aria-label])")].length,
    equations: article.querySelectorAll(".katex-html").length, raw: /\\[([]/.test(article.innerText),
  };
"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize(("page", "has_equations"), [("index", False), ("algorithms/fedtgp", True)])
def test_a_page_fits_and_can_be_read(page: str, has_equations: bool, device: str, scheme: str, site: Path) -> None:
    found = measured(site / f"{page}.html", SHOWN, WIDTHS[device], 900, dark=scheme == "dark")
    assert (found["page"] < 0.1) == (scheme == "dark")
    assert found["wide"] <= WIDTHS[device]
    assert found["pale"] == []
    assert found["unreachable"] == found["unnamed"] == 0
    assert (found["equations"] > 0) == has_equations
    assert not found["raw"]
