"""The report's page and the documents' site in headless Chromium, without a network.

On a telephone and on a desk nothing sticks out, nothing is blank, everything can be read. A copy of
a page gets a script, the body of a function that returns what it has measured.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape

import numpy as np
import pytest
from PIL import Image

from protofl_common.report.style import POLICY
from tests.support import ROOT
from tests.support.harness import run_config, run_federation

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
    or shutil.which("chrome")
)
MISSING = "no chromium, chromium-browser or google-chrome on this machine"
pytestmark = [pytest.mark.system, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
SECONDS = 120
WIDTHS = {"telephone": 390, "desk": 1280}

CONTRAST = r"""
  const numbers = colour => colour.match(/[\d.]+/g).map(Number);
  const light = colour => {
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = colour.map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    const colour = numbers(getComputedStyle(element).backgroundColor);
    return colour[3] === 0 && element.parentElement ? ground(element.parentElement) : colour;
  };
  const pale = root => {
    const found = [], top = document.querySelector(root);
    const texts = document.createTreeWalker(top, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const element = texts.currentNode.parentElement;
      const text = texts.currentNode.textContent.trim();
      if (!text || element.closest("svg, style, .katex-mathml, .headerlink")) continue;
      const colours = [numbers(getComputedStyle(element).color), ground(element)];
      const [a, b] = colours.map(light).sort((x, y) => y - x);
      if ((a + 0.05) / (b + 0.05) < 4.5) found.push(text);
    }
    return found;
  };
"""
"""``pale(root)``: texts under an element of too little contrast (WCAG 2: below 4.5)."""


def chromium(*arguments):
    """Run headless Chromium without a network, and return what it prints.

    As root it runs only without its sandbox.
    """
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", *arguments]
    ended = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True, text=True)
    return ended.stdout


# The script of a page, which writes what it has measured into the page as JSON.
IN_THE_COPY = """<script>
const measure = () => {{{script}}};
addEventListener("load", () => setTimeout(() => {{
  const text = document.createElement("pre");
  text.id = "measured";
  text.textContent = JSON.stringify(measure());
  document.body.append(text);
}}, 300));
</script></body>"""
# A page that shows another one in a frame, and takes what that has measured out of it.
AROUND_IT = """<!DOCTYPE html><body>
<iframe src="{name}" style="width:{width}px;height:{height}px;border:0"></iframe>
<script>
addEventListener("load", () => setTimeout(() => {{
  const page = document.querySelector("iframe").contentDocument;
  document.body.append(page.querySelector("#measured"));
}}, 900));
</script>"""


def measured(page, script, width, height, *, dark=False):
    """Return what a ``script`` returns about a page on a screen of that size.

    The script runs in a copy of the page, from which the policy that forbids scripts is taken out.
    Chromium's window is at least 500 pixels wide with --dump-dom; a frame of the wanted size
    stands in for it.
    """
    copy = page.with_name("measured.html")
    content = page.read_text(encoding="utf-8").replace(POLICY, "")
    content = content.replace("</body>", IN_THE_COPY.format(script=script))
    copy.write_text(content, encoding="utf-8")
    around = page.with_name("frame.html")
    frame = AROUND_IT.format(name=copy.name, width=width, height=height)
    around.write_text(frame, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    waits = ("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom")
    shown = chromium(*waits, scheme, around.as_uri())
    text = re.search(r'<pre id="measured">(.*?)</pre>', shown, re.DOTALL)
    assert text is not None, shown[:2000]
    return json.loads(unescape(text[1]))


# -- the report ------------------------------------------------------------------------------------
MEASURE = """
  const wide = document.documentElement.scrollWidth;
  const found = {asked: innerWidth, wide: wide, out: [], overlaps: [], small: [], shown: {}};
  for (const element of document.querySelectorAll("main *")) {
    const box = element.getBoundingClientRect();
    const scrolls = element.closest(".box");
    if (box.width && box.right > innerWidth + 1 && !scrolls)
      found.out.push(element.tagName + " " + element.className);
  }
  for (const svg of document.querySelectorAll("figure svg")) {
    const name = svg.closest("figure").id, edge = svg.getBoundingClientRect();
    found.shown[name] = [edge.width, edge.height];
    const is_bound = text => !text.closest('[id*="class-name"]');
    const texts = [...svg.querySelectorAll("text")].filter(is_bound);
    const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [text, box] of boxes) {
      const beside = box.left < edge.left - 3 || box.right > edge.right + 3;
      if (beside || box.top < edge.top - 3 || box.bottom > edge.bottom + 3)
        found.out.push(name + ": " + text);
      if (Math.min(box.height, box.width) < 5 && text.length > 1)
        found.small.push(name + ": " + text);
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
"""What a page's layout is, in pixels.

``asked`` and ``wide``: the width of the screen, and of the page. ``out``: what sticks out of the
screen, and texts that stick out of their drawing. ``overlaps``: pairs of texts of a drawing whose
boxes overlap; names of classes in a t-SNE may lie where they must. ``small``: texts that cannot be
read. ``shown``: figure -> the width and height of its drawing.
"""


FIRST_SCREEN = (
    CONTRAST
    + """
  const verdict = document.querySelector(".gain"), table = verdict.nextElementSibling;
  const heads = [...table.querySelectorAll("thead tr > *")].slice(0, 3);
  const columns = heads.map(head => head.getBoundingClientRect().right);
  const found = {
    pale: pale("main"),
    wide: document.documentElement.scrollWidth,
    page: light(ground(document.body)),
    verdict: verdict.getBoundingClientRect().bottom,
    table: table.getBoundingClientRect().bottom,
    columns: Math.max(...columns),
    edge: table.getBoundingClientRect().right,
  };
  return found;
"""
)
"""What the first screen shows.

``pale``: texts of too little contrast. ``wide``: the width of the page. ``page``: how light its
background is, from 0 to 1. ``verdict``, ``table``: where the sentence of the comparison and its
table end, from the top. ``columns``, ``edge``: where the table's first three columns, and the
table, end at the right.
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Make the reports of three runs: algorithm -> its page.

    FedTGP has 20 clients, FedPLVM four domains, FedPCL backbones.
    """
    folder = tmp_path_factory.mktemp("pages")
    mixed = {"dataset": "digits", "partition": "dirichlet", "alpha": 0.3, "train_samples": 0}
    runs = {
        "fedtgp": (20, {"rounds": 4, "fedtgp__server_epochs": 10, **mixed}),
        "fedplvm": (4, {"rounds": 3, "test_samples": 60}),
        "fedpcl": (5, {"rounds": 2, "test_samples": 60}),
    }
    found = {}
    for algo, (clients, settings) in runs.items():
        config = run_config(folder / algo, algo=algo, report=True, **settings)
        found[algo] = run_federation(config, clients).folder / "report.html"
    return found


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("algo", ["fedtgp", "fedplvm", "fedpcl"])
def test_a_report_fits_the_screen(algo, device, pages):
    """Nothing sticks out or overlaps, texts are not too small, and drawings can be seen."""
    found = measured(pages[algo], MEASURE, WIDTHS[device], 900)
    assert found["asked"] == WIDTHS[device]
    assert found["wide"] == WIDTHS[device]
    assert found["out"] == []
    assert found["overlaps"] == []
    assert found["small"] == []
    assert len(found["shown"]) >= 8  # figures
    assert all(width > 250 and height > 100 for width, height in found["shown"].values())


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("algo", ["fedtgp", "fedplvm"])
def test_a_screenshot_is_not_blank(algo, device, pages, tmp_path):
    """Every screenful of the upper 4,000 pixels has something on it, in several colours.

    More than 1 % of its pixels differ from the background, in more than 20 of 512 shades.
    """
    width = WIDTHS[device]
    height = 4000
    picture = tmp_path / "page.png"
    size = f"--window-size={width},{height}"
    chromium(f"--screenshot={picture}", size, pages[algo].as_uri())

    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert pixels.shape == (height, width, 3)
    for top in range(0, height, 800):
        screenful = pixels[top : top + 800].reshape(-1, 3)
        background = np.median(screenful, axis=0)
        differs = np.abs(screenful - background).max(axis=1) > 40
        assert differs.mean() > 0.01
        assert len(np.unique(screenful // 32, axis=0)) > 20


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Make the report of a run with the baselines of `make run`, and return it."""
    config = run_config(
        tmp_path_factory.mktemp("compared"),
        algo="fedproto-avg",
        baselines="local,fedavg,fedproto",
        report=True,
        dataset="digits",
        partition="iid",
        total_samples=90,
        rounds=1,
        run_name="first",
    )
    return run_federation(config, clients=3).folder / "report.html"


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_the_first_screen_shows_the_comparison(width, height, scheme, compared):
    """On a telephone and on a desk, light and dark, without scrolling in either direction."""
    found = measured(compared, FIRST_SCREEN, width, height, dark=scheme == "dark")
    assert (found["page"] < 0.1) == (scheme == "dark")
    assert found["pale"] == []
    assert found["wide"] <= width
    assert found["verdict"] < found["table"] < height
    assert found["columns"] <= found["edge"] <= width


# -- the documents ---------------------------------------------------------------------------------
SHOWN = (
    CONTRAST
    + r"""
  const article = document.querySelector("article");
  const boxes = "pre code, .md-typeset__scrollwrap, .katex-display, table";
  const scrolls = box => box.scrollWidth > box.clientWidth + 1;
  const unreachable = box => scrolls(box) && !box.closest("[tabindex]");
  const unnamed = "img:not([alt]), svg[role=img]:not([aria-label])";
  return {
    pale: pale("article"),
    wide: document.documentElement.scrollWidth,
    page: light(ground(article)),
    unreachable: [...article.querySelectorAll(boxes)].filter(unreachable).length,
    unnamed: article.querySelectorAll(unnamed).length,
    equations: article.querySelectorAll(".katex-html").length,
    raw: /\\[([]/.test(article.innerText),
  };
"""
)
"""How a page of the documents is shown.

``pale``, ``wide``, ``page``: as on the first screen of a report. ``unreachable``: boxes that scroll
and cannot be reached by the keyboard. ``unnamed``: images without a text for screen readers.
``equations``: those that are drawn. ``raw``: whether one stands there as LaTeX.
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the documents' site, and return its folder."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize(("page", "has_equations"), [("index", False), ("algorithms/fedtgp", True)])
def test_a_page_of_the_documents_fits_and_can_be_read(page, has_equations, device, scheme, site):
    """Light and dark: all texts have contrast, every box can be scrolled, equations are drawn."""
    found = measured(site / f"{page}.html", SHOWN, WIDTHS[device], 900, dark=scheme == "dark")
    assert (found["page"] < 0.1) == (scheme == "dark")
    assert found["wide"] <= WIDTHS[device]
    assert found["pale"] == []
    assert found["unreachable"] == found["unnamed"] == 0
    assert (found["equations"] > 0) == has_equations
    assert not found["raw"]
