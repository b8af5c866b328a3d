"""The figures of a paper show the numbers of the runs, and become files."""

import json
from unittest.mock import patch

import numpy as np
import pytest
from matplotlib.axes import Axes

from protofl_common.config.options import SettingsError
from protofl_common.report import drawing, paper
from protofl_common.runs.folder import SUMMARY, RunFolder
from tests.support.fakes import write_run


def run_with(folder, *accuracies, kind="head"):
    """Write a run of two clients with these accuracies after each round; return its folder."""
    evaluations = [{"a": {kind: first}, "b": {kind: second}} for first, second in accuracies]
    write_run(folder, {"algo": "fedproto"}, evaluations)
    return folder


@pytest.fixture
def methods(tmp_path):
    """Two runs of a method, and one of another, which predicts by prototypes."""
    return {
        "ours": [
            run_with(tmp_path / "one", (0.1, 0.3), (0.5, 0.7)),
            run_with(tmp_path / "two", (0.2, 0.4), (0.7, 0.9)),
        ],
        "theirs": [run_with(tmp_path / "three", (0.3, 0.3), (0.4, 0.6), kind="prototype")],
    }


def test_curves_are_means_with_a_band_over_the_seeds(methods):
    """What is drawn is looked at in the call of `drawing.line_chart`."""
    with patch.object(drawing, "line_chart", wraps=drawing.line_chart) as made:
        paper.curves(methods)

    _, _, _, places, lines, unit = made.call_args.args

    assert places == [0, 1]
    # means over clients and runs, in percent
    assert lines["ours"] == pytest.approx([25, 70])
    assert lines["theirs"] == pytest.approx([30, 50])
    assert unit == "test accuracy, %"

    bands = made.call_args.kwargs["bands"]

    assert list(bands) == ["ours"], "one seed has no deviation"

    low, high = bands["ours"]
    deviations = [np.std([20, 30], ddof=1), np.std([60, 80], ddof=1)]  # over the two runs
    np.testing.assert_allclose(high - low, 2 * np.array(deviations))


def test_a_box_has_every_client_of_every_seed(methods):
    """A box is of four accuracies of ours, two runs of two clients, and two of theirs."""
    with patch.object(Axes, "boxplot", autospec=True, side_effect=Axes.boxplot) as made:
        drawn = paper.boxes(methods)

    ours, theirs = made.call_args.args[1]

    assert ours == pytest.approx([50, 70, 70, 90])
    assert theirs == pytest.approx([40, 60])

    names = [text.get_text() for text in drawn.figure.axes[0].get_xticklabels()]

    assert names == ["ours", "theirs"]


@pytest.mark.parametrize("draw", [paper.curves, paper.boxes])
def test_runs_by_head_and_by_prototypes_have_one_figure_on_the_axis(draw, tmp_path):
    """Of several labels a sample that is the AUC of all runs, and exact match of none."""
    methods = {}
    for kind in ("head", "prototype"):
        folder = tmp_path / kind
        figures = {kind: 0.1, f"{kind}/auc": 0.75}
        write_run(folder, {"task": "multi-label"}, [{"a": figures, "b": figures}] * 2)
        summary = json.loads((folder / SUMMARY).read_text())
        summary["metrics"] = {f"{kind}/auc": summary["accuracy"].pop(f"{kind}/auc")}
        (folder / SUMMARY).write_text(json.dumps(summary))
        methods[kind] = [folder]

    (axes,) = draw(methods).figure.axes

    assert axes.get_ylabel() == "test AUC"
    for line in axes.lines:
        if line.get_marker() not in ("", "None"):  # no part of a box
            np.testing.assert_allclose(line.get_ydata(), 0.75)


@pytest.mark.parametrize("draw", [paper.curves, paper.boxes])
def test_a_run_without_the_figure_is_named(draw, methods):
    with pytest.raises(SettingsError, match="no evaluation of head/auc"):
        draw(methods, "head/auc")


@pytest.mark.parametrize("draw", [paper.curves, paper.boxes])
@pytest.mark.parametrize("folders", ["runs/one", [], [object()]])
def test_a_method_has_a_list_of_folders(draw, folders):
    with pytest.raises(SettingsError, match=r"ours: .*: must be a list of run folders"):
        draw({"ours": folders})


@pytest.mark.parametrize("draw", [paper.curves, paper.boxes])
def test_folders_may_be_what_a_glob_yields(draw, methods):
    """They are read once, though the figure that is drawn is that of all runs together."""
    drawn = draw({name: iter(folders) for name, folders in methods.items()})

    assert drawn.figure.axes[0].lines


def test_a_box_is_of_the_last_evaluation_alone(tmp_path):
    """No client has the metric there, as its value is not finite; one had it a round earlier."""
    evaluations = [{"a": {"head": 0.1, "head/own": 0.4}}, {"a": {"head": 0.2}}]
    write_run(tmp_path, {"algo": "fedproto"}, evaluations)

    with pytest.raises(SettingsError, match="no evaluation of head/own after the last round"):
        paper.boxes({"ours": [tmp_path]}, "head/own")


def test_hidden_clients_have_no_boxes(methods):
    """The rows have no accuracies of single clients, as under secure aggregation."""

    def without_clients(folder, latest_first):
        return iter([{"accuracy": {"head": {"mean": 0.5}}, "clients": {"a": {"accuracy": {}}}}])

    refused = pytest.raises(SettingsError, match="secure aggregation hides single clients")

    with patch.object(RunFolder, "each_row", without_clients), refused:
        paper.boxes(methods)


def test_a_confusion_matrix_has_percents_of_each_class():
    """Of four samples of class x one is taken for z; the one of y is right."""
    labels = np.array([0, 0, 0, 0, 1])
    predicted = np.array([0, 0, 0, 2, 1])

    with patch.object(drawing, "heat_map", wraps=drawing.heat_map) as made:
        paper.confusion(labels, predicted, ["x", "y", "z"])

    values = made.call_args.args[3]
    nothing = np.nan  # nobody of this class was predicted so
    wanted = [[75, nothing, 25], [nothing, 100, nothing], [nothing] * 3]
    np.testing.assert_allclose(values, wanted)


@pytest.mark.parametrize(("samples", "method"), [
    (12, "The first two principal components"),
    pytest.param(60, "t-SNE", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_map_of_samples_has_a_point_for_each(samples, method):
    """Few samples are shown by principal components, more by t-SNE."""
    generator = np.random.default_rng(0)
    labels = np.arange(samples) % 3
    features = generator.normal(size=(samples, 5)) + 9 * labels[:, None]

    drawn = paper.features(features, labels, ["x", "y", "z"], np.arange(samples) % 2)

    clouds = [len(cloud.get_offsets()) for cloud in drawn.figure.axes[0].collections]

    assert clouds == [samples // 2, samples // 2], "one for each client"
    assert drawn.caption.startswith(method)


@pytest.mark.slow
def test_the_same_figure_gives_the_same_files(tmp_path, methods):
    """SVG and PDF have no date in them."""
    first = [file.read_bytes() for file in paper.curves(methods).save(tmp_path / "first")]
    again = paper.curves(methods).save(str(tmp_path / "again"), "mine")

    assert [file.name for file in again] == ["mine.svg", "mine.pdf"]
    assert [file.read_bytes() for file in again] == first
    assert first[0].startswith(b"<?xml")
    assert first[1].startswith(b"%PDF-")
    assert b"/Type3" not in first[1], "publishers refuse such fonts"
