"""The page in headless Chromium: at a telephone's and a desk's width nothing sticks out, nothing is blank."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.browser import CHROMIUM, CONTRAST, WIDTHS, chromium, measured
from tests.support.harness import run_config, run_federation

pytestmark = pytest.mark.system

MEASURE = """
  const wide = document.documentElement.scrollWidth;
  const found = {asked: innerWidth, wide: wide, out: [], overlaps: [], small: [], shown: {}};
  for (const element of document.querySelectorAll("main *")) {
    const box = element.getBoundingClientRect();
    const scrolls = element.closest(".box");
    if (box.width && box.right > innerWidth + 1 && !scrolls) found.out.push(element.tagName + " " + element.className);
  }
  for (const svg of document.querySelectorAll("figure svg")) {
    const name = svg.closest("figure").id, edge = svg.getBoundingClientRect();
    found.shown[name] = [edge.width, edge.height];
    const texts = [...svg.querySelectorAll("text")].filter(text => !text.closest('[id*="class-name"]'));
    const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [text, box] of boxes) {
      const beside = box.left < edge.left - 3 || box.right > edge.right + 3;
      if (beside || box.top < edge.top - 3 || box.bottom > edge.bottom + 3)
        found.out.push(name + ": " + text);
      if (Math.min(box.height, box.width) < 5 && text.length > 1) found.small.push(name + ": " + text);
    }
    for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
      const [one, a] = boxes[i], [other, b] = boxes[j];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1.5 && down > 2.5)
        found.overlaps.push(name + ": " + one + " / " + other);
    }
  }
  return found;
"""
"""Overlaps are of the boxes of texts inside a drawing; names of classes in a t-SNE may lie where they must."""


FIRST_SCREEN = (
    CONTRAST
    + """
  const verdict = document.querySelector(".gain"), table = verdict.nextElementSibling;
  const heads = [...table.querySelectorAll("thead tr > *")].slice(0, 3);
  const columns = heads.map(head => head.getBoundingClientRect().right);
  const found = {
    pale: pale("main"), wide: document.documentElement.scrollWidth, page: light(ground(document.body)),
    verdict: verdict.getBoundingClientRect().bottom, table: table.getBoundingClientRect().bottom,
    columns: Math.max(...columns), edge: table.getBoundingClientRect().right,
  };
  return found;
"""
)
"""Texts of too little contrast (WCAG 2: below 4.5), and where the comparison and its first columns end."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FedTGP with 20 clients; FedPLVM on four domains; FedPCL with its backbones."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    folder = tmp_path_factory.mktemp("pages")
    mixed = {"dataset": "digits", "partition": "dirichlet", "alpha": 0.3, "train_samples": 0}
    runs = {
        "fedtgp": (20, {"rounds": 4, "fedtgp__server_epochs": 10, **mixed}),
        "fedplvm": (4, {"rounds": 3, "test_samples": 60}),
        "fedpcl": (5, {"rounds": 2, "test_samples": 60}),
    }
    found = {}
    for algo, (clients, settings) in runs.items():
        outcome = run_federation(run_config(folder / algo, algo=algo, report=True, **settings), clients)
        found[algo] = outcome.folder / "report.html"
    return found


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("algo", ["fedtgp", "fedplvm", "fedpcl"])
def test_the_page_fits_the_screen(algo: str, device: str, pages: dict[str, Path]) -> None:
    found = measured(pages[algo], MEASURE, WIDTHS[device], 900)
    assert found["asked"] == WIDTHS[device]
    assert found["wide"] == WIDTHS[device]
    assert found["out"] == []
    assert found["overlaps"] == []
    assert found["small"] == []
    assert len(found["shown"]) >= 8
    assert all(width > 250 and height > 100 for width, height in found["shown"].values())


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("algo", ["fedtgp", "fedplvm"])
def test_a_screenshot_is_not_blank(algo: str, device: str, pages: dict[str, Path], tmp_path: Path) -> None:
    """Every screenful of the upper 4,000 pixels has something on it, in several colours."""
    picture = tmp_path / "page.png"
    chromium(f"--screenshot={picture}", f"--window-size={WIDTHS[device]},4000", pages[algo].as_uri())
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert pixels.shape == (4000, WIDTHS[device], 3)
    for top in range(0, 4000, 800):
        part = pixels[top : top + 800].reshape(-1, 3)
        assert (np.abs(part - np.median(part, axis=0)).max(axis=1) > 40).mean() > 0.01
        assert len(np.unique(part // 32, axis=0)) > 20


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with the baselines of `make run`."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    small = {"dataset": "digits", "partition": "iid", "total_samples": 90, "rounds": 1, "run_name": "first"}
    config = run_config(tmp_path_factory.mktemp("compared"), algo="fedproto-avg", baselines="local,fedavg,fedproto",
        report=True, **small)  # fmt: skip
    return run_federation(config, clients=3).folder / "report.html"


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_the_first_screen_shows_the_comparison(width: int, height: int, scheme: str, compared: Path) -> None:
    found = measured(compared, FIRST_SCREEN, width, height, dark=scheme == "dark")
    assert (found["page"] < 0.1) == (scheme == "dark")
    assert found["pale"] == []
    assert found["wide"] <= width
    assert found["verdict"] < found["table"] < height
    assert found["columns"] <= found["edge"] <= width
