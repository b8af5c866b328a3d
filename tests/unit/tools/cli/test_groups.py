"""``protofl compare`` over groups of runs: intervals and paired tests, and what cannot be paired."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from protofl_common.runs.figures import Table
from protofl_common.runs.folder import SUMMARY
from protofl_common.tools.cli import main
from protofl_common.tools.groups import Estimate, holm
from tests.support.commands import output, told
from tests.support.fakes import write_run
from tests.support.given import Patch, Printed

LOCAL, OURS = [0.50, 0.58, 0.53, 0.61], [0.55, 0.60, 0.59, 0.66]


@pytest.fixture(autouse=True)
def wide(monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def write(
    folder: Path, algo: str, accuracies: list[float], first: int = 1, **settings: Any
) -> list[Path]:
    """A run for each accuracy, of the seeds from ``first`` on."""
    folders, division = list[Path](), settings.pop("division", 1)
    for seed, accuracy in enumerate(accuracies, first):
        folders.append(folder / f"{algo}-{seed}-{len(settings)}")
        config = {
            "dataset": "digits",
            "lr": 0.1,
            "algo": algo,
            "seed": seed,
            "run-name": str(seed),
        } | settings
        write_run(folders[-1], config, [{"0": {"head": accuracy}}] * 2, division=division)
    return folders


def compared(capsys: Printed, *arguments: str) -> list[dict]:
    return told(capsys, "compare", *arguments)["groups"]


def test_intervals_and_tests_are_those_of_scipy(tmp_path: Path, capsys: Printed) -> None:
    write(tmp_path, "local", LOCAL)
    write(tmp_path, "fedproto", OURS)
    ours, local = compared(capsys, str(tmp_path))
    assert (ours["name"], local["name"]) == ("fedproto", "local")
    for group, accuracies in ((ours, OURS), (local, LOCAL)):
        percent = [100 * one for one in accuracies]
        assert group["n"] == 4
        assert group["interval"] == pytest.approx(
            stats.t.interval(0.95, 3, sum(percent) / 4, stats.sem(percent))
        )
    paired = stats.ttest_rel(LOCAL, OURS)
    assert local["difference"]["p"] == pytest.approx(paired.pvalue)
    assert local["difference"]["interval"] == pytest.approx(
        [100 * end for end in paired.confidence_interval(0.95)]
    )
    assert local["difference"]["mean"] == pytest.approx(-4.5)
    assert ours["difference"] is None


def test_runs_on_other_files_are_other_experiments(tmp_path: Path, capsys: Printed) -> None:
    mine = {"dataset": "arrays", "partition": "iid"}
    write(tmp_path / "a", "fedproto", OURS[:2], **mine, **{"data-dir": "easy.csv"})
    write(tmp_path / "b", "fedproto", OURS[2:], **mine, **{"data-dir": "hard.csv"})
    write(tmp_path / "c", "local", LOCAL[:2], **mine, **{"data-dir": "hard.csv"})
    first, second, local = compared(capsys, *(str(tmp_path / name) for name in "abc"))
    assert (first["n"], second["n"]) == (2, 2)
    assert first["name"].endswith("easy.csv")
    assert (local["difference"], local["note"]) == (
        None,
        "not paired: other data, or divided otherwise",
    )


def test_of_equal_runs_the_latest_counts_and_of_edited_code_is_another_group(
    tmp_path: Path, capsys: Printed
) -> None:
    old, new = (
        write(tmp_path / name, "mine", OURS[:1], dataset="mine:load")[0] for name in ("old", "new")
    )
    for time, later in enumerate((old, new, old), start=1):
        os.utime(later / "summary.json", (2e9 + time, 2e9 + time))
        assert compared(capsys, str(old), str(new), "--against", str(old))[0]["runs"] == {
            "1": str(later)
        }
    summary = json.loads((old / "summary.json").read_text())
    for folder, ended in (
        (old, 2e9),
        (new, 1e9),
    ):  # the file of which is the later one, as that of a copy
        (folder / "summary.json").write_text(json.dumps(summary | {"ended": ended}))
    assert compared(capsys, str(old), str(new))[0]["runs"] == {"1": str(old)}
    for folder, code in ((old, "1a"), (new, "2b")):
        (folder / "summary.json").write_text(
            json.dumps(summary | {"versions": {"torch": "2", "mine": code}})
        )
    one, two = compared(capsys, str(old), str(new))
    assert (one["name"], two["name"]) == ("mine code of mine=1a", "mine code of mine=2b")
    assert two["note"] == "not paired: other data, or divided otherwise"


def test_the_table_of_groups(tmp_path: Path, capsys: Printed) -> None:
    write(tmp_path, "fedproto", OURS)
    write(tmp_path, "fedproto", OURS[:1], lr=0.2)
    local = write(tmp_path, "local", LOCAL)
    assert main(["compare", str(tmp_path), "--against", str(local[0])]) == 0
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in out.splitlines()]
    assert ["local lr=0.1", "4", "55.50", "47.65 … 63.35", "", "", "", ""] in cells
    assert [
        "fedproto lr=0.1",
        "4",
        "60.00",
        "52.77 … 67.23",
        "+4.50",
        "1.74 … 7.26",
        "0.014",
        "",
    ] in cells
    alone = ["fedproto lr=0.2", "1", "55.00", "–", "+5.00", "–", "–"]
    assert [*alone, "left out, without a partner: 3 of the seeds; one pair: may be chance"] in cells
    assert "p is of each comparison alone" not in out, (
        "one of the two has one pair, so that nothing is tested"
    )


def test_p_is_corrected_for_the_number_of_comparisons(tmp_path: Path, capsys: Printed) -> None:
    assert Estimate.of([2.0, 2.0]) == Estimate(2, 2.0, 0.0, 0.0)
    assert Estimate.of([0.0, 0.0]).p == 1.0
    assert math.isnan(Estimate.of([1.0]).p)
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx(
        {"b": 0.03, "c": 0.06, "a": 0.06}
    )
    local = write(tmp_path, "local", LOCAL)
    write(tmp_path, "fedproto", OURS)
    write(tmp_path, "fedavg", LOCAL[::-1])
    assert main(["compare", str(tmp_path), "--against", str(local[0])]) == 0
    ours, reversed_ = (stats.ttest_rel(figures, LOCAL).pvalue for figures in (OURS, LOCAL[::-1]))
    assert (
        f"corrected for 2 of them (Holm): fedproto {2 * ours:.3f}, fedavg {reversed_:.3f}"
        in capsys.readouterr().out
    )
    for folder in write(tmp_path / "other", "fedproto", OURS):
        (folder / SUMMARY).write_text((folder / SUMMARY).read_text().replace("cnn4", "htcnn-1"))
    both = ", ".join(
        f"fedproto networks=1 × {network} {3 * ours:.3f}" for network in ("cnn4", "htcnn-1")
    )
    line = f"corrected for 3 of them (Holm): {both}, fedavg {reversed_:.3f}"
    assert (
        line in output(capsys, "compare", tmp_path, tmp_path / "other", "--against", local[0]).out
    )


def test_a_group_says_of_how_many_evaluations_each_of_its_figures_is(
    tmp_path: Path, capsys: Printed
) -> None:
    for seed, rows in enumerate((4, 9, 9)):
        write_run(
            tmp_path / str(seed), {"algo": "local", "seed": seed}, [{"0": {"head": 0.5}}] * rows
        )
    figures = [group["figure"] for group in compared(capsys, str(tmp_path), "--when", "last-9")]
    assert figures == ["last-9 head, of 4 evaluations or last-9 head"]


@pytest.mark.parametrize(("other", "first", "note"), [
    ({"alpha": 0.5}, 1, "not paired: other data, or divided otherwise"),
    ({"division": 2}, 1, "not paired: other data, or divided otherwise"),
    ({}, 11, "not paired: no seed in common"),
])  # fmt: skip
def test_unpaired_runs_are_said(
    tmp_path: Path, capsys: Printed, other: dict[str, Any], first: int, note: str
) -> None:
    both = [*write(tmp_path, "fedproto", OURS), *write(tmp_path, "local", LOCAL, first, **other)]
    _, local = compared(capsys, *map(str, both))
    assert (local["difference"], local["note"]) == (None, note)


def test_single_runs_are_shown_side_by_side_with_a_warning_unless_options_ask(
    tmp_path: Path, capsys: Printed
) -> None:
    ours, local = write(tmp_path, "fedproto", OURS[:1]), write(tmp_path, "local", LOCAL[:1])
    assert main(["compare", *map(str, (*ours, *local))]) == 0
    assert "One run each: a difference may be chance." in capsys.readouterr().out
    for more in (["--against", str(local[0])], ["--what", "head", "--when", "best"]):
        assert main(["compare", str(tmp_path), *more]) == 0
        assert "difference" in capsys.readouterr().out
    for path in local[0].glob("*.json*"):
        path.write_text(
            path.read_text().replace('"head"', '"prototype"').replace("cnn4", "htcnn-1")
        )
    other = compared(capsys, str(ours[0]), str(local[0]))[1]
    assert (other["figure"], other["note"][25:]) == (
        "final prototype",
        "by final prototype; other networks",
    )


def test_the_files(tmp_path: Path, capsys: Printed) -> None:
    write(tmp_path, "fedproto", OURS)
    write(tmp_path, "local", LOCAL[:2])
    figure = tmp_path / "all.svg"
    ours, local = compared(
        capsys, str(tmp_path), "--figure", str(figure), "--what", "head", "--over", "worst-10%"
    )
    assert ours["values"] == {
        str(seed): pytest.approx(100 * value) for seed, value in enumerate(OURS, 1)
    }
    assert local["values"] == {"1": pytest.approx(50), "2": pytest.approx(58)}
    assert (local["difference"]["n"], local["difference"]["mean"]) == (2, pytest.approx(-3.5))
    svg = figure.read_text(encoding="utf-8")
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg.partition("<svg ")[2].partition(">")[0]
    assert "local (n = 2)" in svg
    assert "final head worst-10%, %" in svg


def test_the_files_for_a_paper(tmp_path: Path, capsys: Printed) -> None:
    write(tmp_path, "local", LOCAL, models="my_net:50%&$x")
    write(tmp_path, "fedavg", LOCAL[:1], models="cnn4")
    latex, figure = tmp_path / "all.tex", tmp_path / "all.pdf"
    assert main(["compare", str(tmp_path), "--latex", str(latex), "--figure", str(figure)]) == 0
    rows = [" ".join(line.split()) for line in latex.read_text(encoding="utf-8").splitlines()]
    head = r"group & n & mean & 95 \% interval & difference & 95 \% interval & p & \\"
    assert (
        rows[0]
        == "% Over the clients that have them, of test data unless it says otherwise: final head."
    )
    assert rows[4:7] == [r"\begin{tabular}{lrrrrrrl}", r"\toprule", head]
    assert (
        r"{[}1] & $-$2 $\alpha$-3 $\beta$$|$ \\" in Table("ab", [["[1]", "-2 α-3 β|"]]).as_latex()
    ), "\\[1] is space"
    assert (
        r"local models=my\_net:50\%\&\$x & 4 & 55.50 & 47.65 \ldots{} 63.35 & +0.00 & -- & -- & "
        in "\n".join(rows)
    )
    assert rows[-2:] == [r"\bottomrule", r"\end{tabular}"]
    pdf = figure.read_bytes()
    assert pdf.startswith(b"%PDF-")
    assert b"/Type3" not in pdf
    assert main(["compare", str(tmp_path), "--figure", str(tmp_path / "all.jpeg")]) == 1
    assert "all.jpeg: must end in .svg or .pdf" in capsys.readouterr().err
    assert not (tmp_path / "all.jpeg").exists()


@pytest.mark.slow
def test_figures_are_read_without_pytorch(tmp_path: Path) -> None:
    """Its import takes seconds."""
    write(tmp_path, "local", LOCAL)
    for words in (["compare", str(tmp_path)], ["runs", str(tmp_path)], ["list"]):
        code = f"import sys; from protofl_common.tools.cli import main; main({words}); sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_what_cannot_work_is_said(tmp_path: Path, capsys: Printed) -> None:
    runs = [str(run) for run in write(tmp_path, "local", LOCAL)]
    for arguments, said in (
        ([*runs, "--against", str(tmp_path)], "must be one of the runs that are compared"),
        ([*runs, "--what", "prototype"], "no evaluation of prototype"),
        ([*runs, "--over", "median"], "figure.over = 'median': choose mean"),
        ([*runs, str(tmp_path / "none")], "no such folder"),
    ):
        assert main(["compare", *arguments]) == 1
        assert said in capsys.readouterr().err
