"""What a person sees of a run's log: lines as Flower 1.41 and Ray really write them."""

from __future__ import annotations

import pytest
from rich.console import Console

from protofl_common.tools.cli.screen import Screen

GOOD = """
Flower configuration not found. Created default configuration at /home/a/config.toml

Using SuperLink: local (127.0.0.1:47853)
Successfully started run 6679553988445061204
\x1b[92mINFO \x1b[0m:      Starting Flower Simulation
\x1b[93mWARNING \x1b[0m:   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.
\x1b[92mINFO \x1b[0m:      \tflwr federation simulation-config @none/default <superlink> --num-supernodes <N>
Successfully installed protofl to /home/a/apps/protofl.
/env/ray/_private/worker.py:2051: FutureWarning: Tip: In future versions of Ray, Ray will no longer override
  warnings.warn(
FedProto (Tan et al., AAAI 2022)
samples: 5,000 found · 300 for training (train-samples = 30 a client) · 4,700 for testing · none left out
round 1/2  loss 2.200  ↑4.8 MB ↓4.8 MB  2.8s, 2.8s to go
FedProto: round 2/2  loss 2.100  ↑4.8 MB ↓4.8 MB  2.8s, 0.0s to go
┏━━━━━━━━━━━━━┓
result: alone 36.0 %, FedAvg 62.0 %, FedProto 68.0 %; 96.5 MB exchanged
results: /runs/mine
report: /runs/mine/report.html
\x1b[36m(ClientAppActor pid=17286)\x1b[0m \x1b[93mWARNING \x1b[0m:   Manually terminating ClientAppActor
\x1b[36m(pid=11711)\x1b[0m     @     0x7fbb4485a050       7504  (unknown)
\x1b[33m(raylet)\x1b[0m Tip: use `ray status` to view detailed cluster status.
\x1b[92mINFO \x1b[0m:
""".splitlines()
OURS = [GOOD[11], GOOD[12], GOOD[13], GOOD[14], GOOD[15]]
RESULT = [*GOOD[16:19], "next: protofl list"]
BAD = """
protofl: this run cannot go on
dataset = 'mnist': data-dir does not hold it
seed = -1: must be a number at least 0

\x1b[91mERROR \x1b[0m:     ServerApp raised an exception
Traceback (most recent call last):
  File "app.py", line 40, in main
protofl_common.data.raw.DataError: dataset = 'mnist'
""".splitlines()


def seen(lines: list[str], capsys: pytest.CaptureFixture[str], **how: bool) -> list[str]:
    with Screen(**how) as screen:
        for line in lines:
            screen(line)
    if lines is GOOD:
        screen.conclude("protofl list")
    return capsys.readouterr().out.splitlines()


def test_a_good_run_shows_what_is_ours_and_ends_with_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert seen(GOOD, capsys) == OURS + RESULT


def test_quiet_shows_the_result_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert seen(GOOD, capsys, quiet=True) == RESULT


def test_verbose_shows_everything_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = seen(GOOD, capsys, verbose=True)
    assert len(shown) == len(GOOD)
    assert "Starting Flower Simulation" in "\n".join(shown)


@pytest.mark.parametrize("quiet", [False, True])
def test_a_failed_run_shows_its_message_and_no_traceback(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert [line for line in seen(BAD, capsys, quiet=quiet) if line] == BAD[1:4]


def test_a_failure_that_is_not_ours_is_shown_as_flower_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(seen(BAD[5:], capsys)) == len(BAD[5:])


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_has_one_live_line_and_a_box(no_color: bool) -> None:
    console = Console(force_terminal=True, width=100, no_color=no_color, highlight=False)
    with console.capture() as captured, Screen(console=console) as screen:
        for line in GOOD:
            screen(line)
        screen.conclude("protofl list")
    shown = captured.get()
    assert shown.count("╭") == shown.count("╰") == 1
    assert "alone 36.0 %" in shown.partition("╭")[2]
    assert ("\x1b[32m" in shown) != no_color
    assert all(line in shown for line in (OURS[0], OURS[4]))
