"""What a person sees of a run's lines."""

import pytest
from rich.console import Console

from protofl_common.tools.cli.run import Screen

GOOD = """
FedProto (Tan et al., AAAI 2022)
samples: 5,000 found · 300 for training (train-samples = 30 a client) · 4,700 for testing · none left out
round 1/2  loss 2.200  ↑4.8 MB ↓4.8 MB  2.8s, 2.8s to go
FedProto: round 2/2  loss 2.100  ↑4.8 MB ↓4.8 MB  2.8s, 0.0s to go
┏━━━━━━━━━━━━━┓
result: alone 36.0 %, FedAvg 62.0 %, FedProto 68.0 %; 96.5 MB exchanged
results: /runs/mine
report: /runs/mine/report.html
""".splitlines()
OURS = GOOD[1:6]
RESULT = [*GOOD[6:9], "next: protofl list"]


def seen(lines: list[str], capsys: pytest.CaptureFixture[str], **how: bool) -> list[str]:
    with Screen(**how) as screen:
        for line in lines:
            screen(line)
    if lines is GOOD:
        screen.conclude("protofl list")
    return capsys.readouterr().out.splitlines()


def test_a_good_run_shows_what_is_ours_and_quietly_the_result_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert seen(GOOD, capsys) == OURS + RESULT
    assert seen(GOOD, capsys, quiet=True) == RESULT


def test_quiet_shows_doubts_too_and_keeps_what_a_failure_refers_to(capsys: pytest.CaptureFixture[str]) -> None:
    doubt = "warning: accuracy by head is 50.0 %, no better than a guess"
    assert seen([*GOOD[:6], doubt], capsys, quiet=True) == []
    screen = Screen(quiet=True)
    for number in range(50):
        screen(f"line {number}")
    screen(doubt)
    screen.conclude("")
    assert capsys.readouterr().out == f"{doubt}\n"
    assert [*screen.recent][-2:] == ["line 49", doubt]


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
