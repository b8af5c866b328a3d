"""Chromium without a display."""

import shutil
import subprocess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SECONDS = 120


def chromium(*arguments: str) -> str:
    """What it prints; it needs no display, and as root no sandbox."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND"]  # fmt: skip
    assert CHROMIUM is not None
    ended = subprocess.run([CHROMIUM, *flags, *arguments], capture_output=True, timeout=SECONDS, check=True, text=True)
    return ended.stdout
