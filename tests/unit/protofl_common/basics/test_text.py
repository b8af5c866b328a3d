"""Texts fit for a log, and without folders."""

from pathlib import Path

import pytest

from protofl_common.basics.text import in_order, is_site_name, printable, without_paths


def test_printable_is_short_and_plain():
    two_lines = "lr = 'abc': must be a number\nbatch-size = 0"
    assert printable(two_lines) == "lr = 'abc': must be a number; batch-size = 0"
    assert printable("\x1b[2J Grün λ") == "\\x1b[2J Grün λ"
    assert printable("x" * 501) == "x" * 500 + " … (501 characters)"


@pytest.mark.parametrize(("text", "wanted"), [
    (f"no file /home/jane/scans/a.png, {Path.home()}/scans/b.png", "no file …/a.png, …/b.png"),
    ("'/srv/x/y': gone, (/srv/z/w)", "'…/y': gone, (…/w)"),
    ("runs/mine/clients/site-1/3.safetensors", "runs/mine/clients/site-1/3.safetensors"),
    ("see https://flower.ai/docs/x and 3/4", "see https://flower.ai/docs/x and 3/4"),
    (f"{Path.home()}/my scans/a.png", "…/my scans/a.png"),
    (f"{Path.cwd()}-of-jane/my scans/a.png", "…/my scans/a.png"),
    (f"{Path.cwd()}/runs", "…/runs"),
])  # fmt: skip
def test_folders_stay_at_home(text, wanted):
    assert without_paths(text) == wanted


def test_no_two_names_of_sites_look_alike():
    assert all(map(is_site_name, ("north", "site-3", "St.Mary_2", "7")))
    # a Cyrillic о; a blank at the end; a letter with an accent, which two spellings share
    looking_alike = ["n\u043erth", "north ", "Klin\u00edk", "Klini\u0301k"]
    no_names = ["", ".", "..", "-rf", "a/b", "a\\b", "a\nb", "x" * 101]
    assert not any(map(is_site_name, no_names + looking_alike))


def test_numbers_count_in_the_order_of_names_and_equal_ones_have_one_order():
    assert in_order(["site-10", "b", "site-2", "a-1"]) == ["a-1", "b", "site-2", "site-10"]
    for equal_numbers in (["site-1", "site-01"], ["site-01", "site-1"]):
        assert in_order(equal_numbers) == ["site-01", "site-1"]
