"""``protofl compare`` over groups of runs: intervals, paired tests, what cannot be paired."""

import json
import math
import subprocess
import sys

import pytest
from scipy import stats

from protofl_common.report.drawing import FORMATS
from protofl_common.runs.figures import Table
from protofl_common.runs.folder import SUMMARY
from protofl_common.tools.tables.groups import ABOUT_P, Estimate, holm
from tests.support.commands import cells_of, json_printed, output
from tests.support.fakes import write_run

LOCAL = [0.50, 0.58, 0.53, 0.61]
OURS = [0.55, 0.60, 0.59, 0.66]
OTHER_DATA = "not paired: other data, or divided otherwise"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")


def write(folder, algo, accuracies, first_seed=1, division=1, clients=1, **settings):
    """Write a run for each accuracy, of the seeds from ``first_seed`` on; return their folders.

    ``division`` stands for the digest of how the data were divided.
    """
    folders = []
    for seed, accuracy in enumerate(accuracies, first_seed):
        run = folder / f"{algo}-{seed}-{len(settings)}"
        config = {"dataset": "digits", "lr": 0.1, "algo": algo, "seed": seed, "run-name": str(seed)}
        sites = {str(client): {"head": accuracy} for client in range(clients)}
        write_run(run, config | settings, [sites] * 2, division=division)
        folders.append(run)
    return folders


def edit_summary(run, **changes):
    summary = json.loads((run / SUMMARY).read_text())
    (run / SUMMARY).write_text(json.dumps(summary | changes))


def compared(capsys, *arguments):
    """Return the groups that ``protofl compare`` makes of these folders; the best stands first."""
    return json_printed(capsys, "compare", *map(str, arguments))["groups"]


def test_intervals_and_tests_are_those_of_scipy(tmp_path, capsys):
    """Two groups of four seeds each are compared, in percent."""
    write(tmp_path, "local", LOCAL)
    write(tmp_path, "fedproto", OURS)

    ours, local = compared(capsys, tmp_path)

    assert ours["name"] == "fedproto"
    assert local["name"] == "local"

    for group, accuracies in ((ours, OURS), (local, LOCAL)):
        percent = [100 * accuracy for accuracy in accuracies]
        interval = stats.t.interval(0.95, 3, sum(percent) / 4, stats.sem(percent))
        assert group["n"] == 4
        assert group["interval"] == pytest.approx(interval)
    paired = stats.ttest_rel(LOCAL, OURS)
    interval = [100 * end for end in paired.confidence_interval(0.95)]

    assert local["difference"]["p"] == pytest.approx(paired.pvalue)
    assert local["difference"]["interval"] == pytest.approx(interval)
    assert local["difference"]["mean"] == pytest.approx(-4.5)
    assert ours["difference"] is None


def test_runs_on_other_files_are_other_experiments(tmp_path, capsys):
    """Ours ran on easy.csv, and on hard.csv, which makes two groups.

    Local training, on hard.csv, is not paired with the first of them.
    """
    arrays = {"dataset": "arrays", "partition": "iid"}
    easy = arrays | {"data-dir": "easy.csv"}
    hard = arrays | {"data-dir": "hard.csv"}
    write(tmp_path / "a", "fedproto", OURS[:2], **easy)
    write(tmp_path / "b", "fedproto", OURS[2:], **hard)
    write(tmp_path / "c", "local", LOCAL[:2], **hard)

    folders = [tmp_path / name for name in "abc"]
    ours_on_easy, ours_on_hard, local = compared(capsys, *folders)

    assert ours_on_easy["n"] == ours_on_hard["n"] == 2
    assert ours_on_easy["name"].endswith("easy.csv")
    assert local["difference"] is None
    assert local["note"] == OTHER_DATA


@pytest.fixture
def equal_runs(tmp_path):
    """Two runs of the same settings and seed, on data from code of one's own."""
    (old,) = write(tmp_path / "old", "mine", OURS[:1], dataset="mine:load")
    (new,) = write(tmp_path / "new", "mine", OURS[:1], dataset="mine:load")
    return old, new


def test_of_equal_runs_the_latest_counts(equal_runs, capsys):
    """The latest run is the one that ended last, whatever the order of the folders."""
    old, new = equal_runs
    for second, latest in enumerate((old, new, old), start=1):
        edit_summary(latest, ended=2e9 + second)
        (group,) = compared(capsys, old, new, "--against", old)
        assert group["runs"] == {"1": str(latest)}


def test_runs_of_edited_code_are_another_group(equal_runs, capsys):
    """The digests of the module ``mine`` differ."""
    old, new = equal_runs
    edit_summary(old, versions={"torch": "2", "mine": "1a"})
    edit_summary(new, versions={"torch": "2", "mine": "2b"})

    first, second = compared(capsys, old, new)

    assert first["name"] == "mine code of mine=1a"
    assert second["name"] == "mine code of mine=2b"
    assert second["note"] == OTHER_DATA


def test_the_table_of_groups(tmp_path, capsys):
    """Four runs of FedProto, and one with another learning rate, are compared with local ones."""
    write(tmp_path, "fedproto", OURS)
    write(tmp_path, "fedproto", OURS[:1], lr=0.2)
    local = write(tmp_path, "local", LOCAL)

    rows = cells_of(output(capsys, "compare", tmp_path, "--against", local[0]).out)

    assert ["local lr=0.1", "4", "55.50", "47.65 … 63.35", "–", "–", "–", "–", ""] in rows

    ours = ["4", "60.00", "52.77 … 67.23", "+4.50", "1.74 … 7.26", "0.014", "0.014", ""]

    assert ["fedproto lr=0.1", *ours] in rows

    note = "one pair: may be chance"

    assert ["fedproto lr=0.2", "1", "55.00", "–", "+5.00", "–", "–", "–", note] in rows

    costs = ["1", "1.0 kB", "2.0 kB", "61.0", "1.5", "2"]  # as `write_run` has them

    assert ["local lr=0.1", *costs] in rows


def test_estimates_without_spread_and_of_one_figure():
    """p is 0 if two equal figures are not 0, 1 if they are, and unknown of a single one."""
    assert Estimate.of([2.0, 2.0]) == Estimate(2, 2.0, 0.0, 0.0)
    assert Estimate.of([0.0, 0.0]).p == 1.0
    assert math.isnan(Estimate.of([1.0]).p)


def test_p_is_corrected_for_the_number_of_comparisons(tmp_path, capsys):
    """Holm: the smallest of n values of p is multiplied by n, the next by n − 1, and so on.

    None is below that of a smaller p; a comparison of one pair is no test.
    """
    corrected = holm({"a": 0.04, "b": 0.01, "one pair": math.nan, "c": 0.03})

    assert corrected == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})

    local = write(tmp_path, "local", LOCAL)
    write(tmp_path, "fedproto", OURS)
    write(tmp_path, "fedavg", LOCAL[::-1])
    p_fedproto = stats.ttest_rel(OURS, LOCAL).pvalue
    p_fedavg = stats.ttest_rel(LOCAL[::-1], LOCAL).pvalue

    printed = output(capsys, "compare", tmp_path, "--against", local[0]).out

    assert p_cells(printed, "fedproto") == [f"{p_fedproto:.3f}", f"{2 * p_fedproto:.3f}"]
    assert p_cells(printed, "fedavg") == [f"{p_fedavg:.3f}"] * 2

    other = tmp_path / "other"
    for folder in write(other, "fedproto", OURS):
        summary = (folder / SUMMARY).read_text()
        (folder / SUMMARY).write_text(summary.replace("cnn4", "htcnn-1"))
    printed = output(capsys, "compare", tmp_path, other, "--against", local[0]).out
    for name in ("fedproto networks=1 × cnn4", "fedproto networks=1 × htcnn-1"):
        assert p_cells(printed, name) == [f"{p_fedproto:.3f}", f"{3 * p_fedproto:.3f}"]


def p_cells(printed, name):
    """Return the two p of a group in the printed table, without and with correction."""
    (row,) = [row for row in cells_of(printed) if row[0] == name and len(row) == 9]
    return row[6:8]


def test_a_group_says_of_how_many_evaluations_each_of_its_figures_is(tmp_path, capsys):
    """The mean of the last nine evaluations is asked for, and one run has only four."""
    for seed, evaluations in enumerate((4, 9, 9)):
        settings = {"algo": "local", "seed": seed}
        write_run(tmp_path / str(seed), settings, [{"0": {"head": 0.5}}] * evaluations)

    (group,) = compared(capsys, tmp_path, "--when", "last-9")

    assert group["figure"] == "last-9 head, of 4 evaluations or last-9 head"


@pytest.mark.parametrize(("changes", "note"), [
    ({"alpha": 0.5}, OTHER_DATA),
    ({"division": 2}, OTHER_DATA),
    ({"clients": 2}, OTHER_DATA),
    ({"first_seed": 11}, "not paired: no seed in common"),
])  # fmt: skip
def test_runs_that_cannot_be_paired_are_named_with_the_reason(tmp_path, capsys, changes, note):
    """``changes`` are of the runs of local training."""
    ours = write(tmp_path, "fedproto", OURS)
    others = write(tmp_path, "local", LOCAL, **changes)

    _, local = compared(capsys, *ours, *others)

    assert local["difference"] is None
    assert local["note"] == note


def test_runs_on_a_file_that_was_edited_between_them_are_other_experiments(tmp_path, capsys):
    """The last run of each group is on another content of the same file."""
    for algo in ("fedproto", "local"):
        *_, last = write(tmp_path, algo, OURS)
        edit_summary(last, data="0123456789abcdef")

    groups = compared(capsys, tmp_path)

    assert [group["n"] for group in groups] == [3, 1, 3, 1]
    assert [group["note"] for group in groups] == ["", OTHER_DATA, "", OTHER_DATA]


def test_single_runs_are_compared_with_a_warning(tmp_path, capsys):
    (ours,) = write(tmp_path, "fedproto", OURS[:1])
    (local,) = write(tmp_path, "local", LOCAL[:1])

    assert "one pair: may be chance" in output(capsys, "compare", ours, local).out


def test_a_group_without_the_others_figure_and_networks_is_not_paired(tmp_path, capsys):
    """Local training predicts by prototypes only, and with another network."""
    (ours,) = write(tmp_path, "fedproto", OURS[:1])
    (local,) = write(tmp_path, "local", LOCAL[:1])
    for path in local.glob("*.json*"):
        text = path.read_text().replace('"head"', '"prototype"').replace("cnn4", "htcnn-1")
        path.write_text(text)

    _, group = compared(capsys, ours, local)

    assert group["figure"] == "final prototype"
    assert group["note"] == "one pair: may be chance; by final prototype; other networks"


def test_a_measure_that_a_run_of_the_group_lacks_is_left_out(tmp_path, capsys):
    """A trimmed mean is there only where enough clients have answered last."""
    first, _second = write(tmp_path, "fedavg", OURS[:2])
    write(tmp_path, "local", LOCAL[:2])
    accuracy = json.loads((first / SUMMARY).read_text())["accuracy"]
    accuracy["head"]["trimmed"] = 0.5
    edit_summary(first, accuracy=accuracy)

    printed = output(capsys, "compare", tmp_path).out

    assert "by each way to predict" in printed


@pytest.mark.slow
def test_the_figure_of_intervals_shows_the_chosen_figure_of_each_group(tmp_path, capsys):
    """Four runs of ours and two of local training have two seeds in common."""
    write(tmp_path, "fedproto", OURS)
    write(tmp_path, "local", LOCAL[:2])
    figures = tmp_path / "figures"

    options = ["--what", "head", "--over", "worst-10%"]
    ours, local = compared(capsys, tmp_path, "--figures", figures, *options)

    assert ours["values"] == pytest.approx({"1": 55, "2": 60, "3": 59, "4": 66})
    assert local["values"] == pytest.approx({"1": 50, "2": 58})
    assert local["difference"]["n"] == 2
    assert local["difference"]["mean"] == pytest.approx(-3.5)

    svg = (figures / "intervals.svg").read_text()
    tag = svg.partition("<svg ")[2].partition(">")[0]

    assert 'xmlns="http://www.w3.org/2000/svg"' in tag
    assert "local (n = 2)" in svg
    assert "final head worst-10%, %" in svg


@pytest.mark.slow
def test_comparing_writes_a_latex_table_and_figures(tmp_path, capsys):
    """The name of a network has signs that LaTeX reads, which are escaped."""
    write(tmp_path, "local", LOCAL, models="my_net:50%&$x")
    write(tmp_path, "fedavg", LOCAL[:1], models="cnn4")
    latex = tmp_path / "all.tex"
    figures = tmp_path / "figures"

    output(capsys, "compare", tmp_path, "--latex", latex, "--figures", figures)

    text = latex.read_text()
    lines = [" ".join(line.split()) for line in text.splitlines()]  # without aligned columns
    origin = "Over the clients that have them, of test data unless it says otherwise: final head."

    latest = "Of runs with the same settings and seed the latest counts."

    assert lines[0] == f"% {origin} {latest} {ABOUT_P}"
    assert lines[4:7] == [
        r"\begin{tabular}{lrrrrrrrl}",
        r"\toprule",
        r"group & n & mean & 95 \% interval & difference & 95 \% interval & p & p (Holm) & \\",
    ]

    name = r"local models=my\_net:50\%\&\$x"
    row = rf"{name} & 4 (1 paired) & 55.50 & 47.65 \ldots{{}} 63.35 & +0.00 & -- & -- & -- & "

    assert row in "\n".join(lines)
    assert r"group & rounds & up & down & seconds & seconds per round & lost replies \\" in lines
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]

    wanted = {f"{name}.{kind}" for name in ("boxes", "curves", "intervals") for kind in FORMATS}

    assert {file.name for file in figures.iterdir()} == wanted


def test_signs_that_latex_would_read_are_escaped():
    latex = Table("ab", [["[1]", "-2 α-3 β|"]]).as_latex()
    assert r"{[}1] & $-$2 $\alpha$-3 $\beta$$|$ \\" in latex, "\\[1] is space"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["compare", "FOLDER"], ["runs", "FOLDER"], ["list"]])
def test_figures_are_read_without_pytorch(words, tmp_path):
    """The import of PyTorch takes seconds."""
    write(tmp_path, "local", LOCAL)
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    code = f"import sys; from protofl_common.tools.cli import main; main({words}); "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("words", "expected"), [
    ("--against FOLDER", "must be one of the runs that are compared"),
    ("--what prototype", "no evaluation of prototype"),
    ("--over median", "figure.over = 'median': choose mean"),
    ("FOLDER/none", "no such folder"),
])  # fmt: skip
def test_what_cannot_work_is_said(words, expected, tmp_path, capsys):
    runs = write(tmp_path, "local", LOCAL)
    options = words.replace("FOLDER", str(tmp_path)).split()
    assert expected in output(capsys, "compare", *runs, *options, status=1).err
