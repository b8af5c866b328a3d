"""Chromium without a display: what it prints, and what a script of ours measures on a page.

A copy of the page gets the script, the body of a function that returns what it has measured.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

from protofl_common.report.style import POLICY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SECONDS = 120
WIDTHS = {"telephone": 390, "desk": 1280}

CONTRAST = r"""
  const numbers = colour => colour.match(/[\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = colour.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    const colour = numbers(getComputedStyle(element).backgroundColor);
    return colour[3] === 0 && element.parentElement ? ground(element.parentElement) : colour;
  };
  const pale = root => {
    const found = [], texts = document.createTreeWalker(document.querySelector(root), NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const element = texts.currentNode.parentElement, text = texts.currentNode.textContent.trim();
      if (!text || element.closest("svg, style, .katex-mathml, .headerlink")) continue;
      const colours = [numbers(getComputedStyle(element).color), ground(element)];
      const [a, b] = colours.map(light).sort((x, y) => y - x);
      if ((a + 0.05) / (b + 0.05) < 4.5) found.push(text);
    }
    return found;
  };
"""
"""``pale(root)``: texts under an element of too little contrast (WCAG 2: below 4.5)."""


def chromium(*arguments: str) -> str:
    """What it prints; it needs no display, and as root no sandbox."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND"]  # fmt: skip
    assert CHROMIUM is not None
    ended = subprocess.run([CHROMIUM, *flags, *arguments], capture_output=True, timeout=SECONDS, check=True, text=True)
    return ended.stdout


def measured(page: Path, script: str, width: int, height: int, *, dark: bool = False) -> Any:
    """What ``script`` returns about a page on a screen of that size.

    Chromium's window is at least 500 pixels wide with --dump-dom; a frame of the wanted size stands in for it.
    """
    write = "const text=document.createElement('pre');text.id='measured';text.textContent=JSON.stringify(measure());"
    script = f"const measure=()=>{{{script}}};addEventListener('load',()=>setTimeout(()=>{{{write}"
    script = f"<script>{script}document.body.append(text)}},300))</script></body>"
    copy = page.with_name("measured.html")
    copy.write_text(page.read_text(encoding="utf-8").replace(POLICY, "").replace("</body>", script), encoding="utf-8")
    frame = f'<iframe src="{copy.name}" style="width:{width}px;height:{height}px;border:0"></iframe>'
    read = 'addEventListener("load",()=>setTimeout(()=>document.body.append(document.querySelector("iframe")'
    read += '.contentDocument.querySelector("#measured")),900))'
    around = page.with_name("frame.html")
    around.write_text(f"<!DOCTYPE html><body>{frame}<script>{read}</script></body>", encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    waits = ("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom")
    shown = chromium(*waits, scheme, around.as_uri())
    text = re.search(r'<pre id="measured">(.*?)</pre>', shown, re.DOTALL)
    assert text is not None, shown[:2000]
    return json.loads(unescape(text[1]))
