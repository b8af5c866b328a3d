"""``import protofl``: a federation and a client half from Python; what extensions import."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from client_app.algorithms.base import client_half
from client_app.algorithms.fedproto import FedProto
from hatch_build import AppAsData
from protofl_common.data.door import as_array
from protofl_common.data.objects import as_arrays
from protofl_common.data.raw import DataError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import app_folder
from protofl_common.models.trained import TrainedModel
from protofl_common.runs import figures
from protofl_common.runs.folder import WEIGHTS, RunFolder
from protofl_common.tools import python_api as public
from protofl_common.tools.inference import Predictor
from protofl_common.tools.protofl import extend
from server_app.network.membership import FederationError

pytestmark = pytest.mark.slow  # most of these tests train a federation

DIGITS = {"dataset": "digits", "partition": "iid"}
SMALL = DIGITS | {"total_samples": 200, "rounds": 2, "batch_size": 32}
"""The settings of a run of seconds."""
DATA = DIGITS | {"total_samples": 100, "models": "cnn4"}
"""The settings of a trial of one client half."""


def test_a_run_returns_its_results(tmp_path):
    """Accuracies, rounds and summary are those of the run's folder, and events came meanwhile."""
    events = []
    places = {"out_dir": str(tmp_path), "on_event": events.append}
    run = public.run(algo="fedproto", clients=2, **places, **SMALL)

    assert run.folder.parent == tmp_path
    assert set(run.accuracy) == {"head", "prototype"}
    assert public.Run(str(run.folder)).accuracy == run.accuracy
    assert all(0 <= value <= 1 for value in run.accuracy.values())
    assert len(run.rounds) == 3  # two rounds, and the final evaluation
    assert run.summary["rounds"] == 2

    done = [event.row for event in events if isinstance(event, public.events.RoundDone)]

    assert done == run.rounds[:2]

    result = figures.sentence([run.summary])

    assert events[-1] == public.events.Finished(run.folder, run.summary, result, report="")

    (run.folder / "summary.json").unlink()

    with pytest.raises(public.SettingsError, match=r"summary\.json in it; give"):
        _ = run.accuracy


def test_what_a_listener_changes_in_a_row_changes_no_result(tmp_path):
    def clear(event):
        if isinstance(event, public.events.RoundDone):
            event.row["bytes"].clear()
            event.row["accuracy"].clear()

    run = public.run(algo="fedavg", clients=2, out_dir=str(tmp_path), on_event=clear, **SMALL)

    assert run.summary["bytes"]["up"] == sum(row["bytes"]["up"] for row in run.rounds)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(public.SettingsError, match=r"metrics\.jsonl with a round in it; give"):
        _ = public.Run(tmp_path / "none").rounds


def patients():
    """Return inputs and labels of eighty patients, of two well separated classes.

    The labels are names as Python objects, as pandas has texts.
    """
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 2, 80)
    inputs = draw.normal(size=(80, 5)) + 4 * labels[:, None]
    return inputs, np.array(["ill", "well"], dtype=object)[labels]


def run_on(data, folder, **settings):
    """Run a federation of two clients on data of one's own, with the results in this folder."""
    return public.run(data, clients=2, models="mlp-1", out_dir=str(folder), **settings)


def test_a_run_takes_arrays_as_data(tmp_path, capsys):
    """Nothing is printed, and a second run on the same arrays is on the same data."""
    data = patients()
    run = run_on(data, tmp_path, algo="fedavg", rounds=5)

    assert run.accuracy["head"] > 0.9
    assert RunFolder(run.folder).sites()["classes"] == ["ill", "well"]
    assert capsys.readouterr().out == ""

    again = run_on(data, tmp_path, algo="local", rounds=1, seed=2)
    data_dir = run.summary["settings"]["data-dir"]

    assert again.summary["settings"]["data-dir"] == data_dir, "they can be compared"


def test_arrays_that_are_no_data_are_refused(tmp_path):
    """Their type or their number of labels is wrong, a label is missing, or they are no arrays."""
    inputs, names = patients()

    tokens = inputs.astype(int) + 9  # whole numbers are words of texts, of which mlp-1 takes none

    with pytest.raises(FederationError, match=r"inputs int64 .* do not fit"):
        run_on((tokens, names), tmp_path, algo="fedavg")

    with pytest.raises(DataError, match=r"data: labels has shape \[79\]; there are 80 inputs"):
        run_on((inputs, names[:79]), tmp_path)

    names[40] = float("nan")

    with pytest.raises(DataError, match=r"data: sample 40 has no label \('nan'; 1 in all\)"):
        run_on((inputs, names), tmp_path)

    for data in ([inputs, names, names], inputs, "ab", DataLoader([(1, 2)])):
        with pytest.raises(DataError, match=r"none of a file or folder, \(inputs, labels"):
            as_arrays(data)


def test_a_run_takes_data_frames_and_arrays_of_parts_as_data(tmp_path):
    """A frame has a column ``label``, or stands beside its labels; four arrays are two parts."""
    pandas = pytest.importorskip("pandas")
    inputs, names = patients()
    one_round = {"rounds": 1, "algo": "local"}
    frame = pandas.DataFrame(inputs, columns=list("abcde"))

    for data in (frame.assign(label=names), (frame, pandas.Series(names))):
        run = run_on(data, tmp_path, **one_round)
        assert RunFolder(run.folder).sites()["classes"] == ["ill", "well"]

    with pytest.raises(DataError, match="data, row 0, column 'sex': 'f' is not a finite number"):
        run_on(frame.assign(label=names, sex=["f", "m"] * 40), tmp_path, **one_round)

    with pytest.raises(DataError, match="data: 79 labels; there are 80 inputs"):
        run_on((frame, names[:79]), tmp_path)
    with pytest.raises(DataError, match="data: Duplicate column names"):
        run_on((pandas.concat([frame, frame], axis=1), names), tmp_path)
    with pytest.raises(
        DataError, match="data: x_train has the columns a, b, c, d, e; x_test has e, d"
    ):
        run_on((frame, names, frame[list("edcba")], names), tmp_path)

    parts = (inputs[:60], names[:60], inputs[60:], names[60:])
    run = run_on(parts, tmp_path, test_from="official-all", **one_round)

    assert run.rounds[-1]["clients"]["site-0"]["test-samples"] == 20


def test_arrays_are_the_same_whatever_object_they_come_in():
    """``alone``: inputs without labels, as for predictions."""
    inputs, names = patients()
    labels = (names == "ill").astype(int)
    tensors = torch.from_numpy(inputs).requires_grad_()
    for data in (
        {"inputs": inputs, "labels": labels},
        [inputs, labels],
        TensorDataset(tensors, torch.from_numpy(labels)),
        zip(tensors, labels, strict=True),
    ):
        found = as_arrays(data)
        np.testing.assert_array_equal(as_array(found["inputs"], "x"), inputs)
        np.testing.assert_array_equal(as_array(found["labels"], "y"), labels)

    four = as_arrays(((inputs[:60], labels[:60]), (inputs[60:], labels[60:])))

    assert list(four) == ["x_train", "y_train", "x_test", "y_test"]
    assert list(as_arrays(inputs.tolist(), alone=True)) == ["inputs"]


def test_a_model_is_given_what_python_has(tmp_path):
    """A frame's columns are found by name, whatever their order."""
    pandas = pytest.importorskip("pandas")
    inputs, names = patients()
    frame = pandas.DataFrame(inputs, columns=list("abcde")).assign(label=names)
    run = run_on(frame, tmp_path, rounds=1, algo="local", drop="e")
    predictor = Predictor(TrainedModel.read(run.folder / "clients" / "site-0" / WEIGHTS))

    shuffled = frame[["d", "label", "a", "c", "b"]]
    without_e = inputs[:, :4]
    wanted = predictor.predict(without_e)
    dataset = TensorDataset(torch.from_numpy(without_e), torch.zeros(80))

    for data in (shuffled, dataset, without_e.tolist(), {"inputs": without_e}):
        assert predictor.predict(data) == wanted

    with pytest.raises(DataError, match="inputs: has no column 'c'; the model takes a, b, c, d"):
        predictor.predict(frame[["a", "b", "d"]])


def test_a_file_that_was_changed_is_read_again(tmp_path):
    """The file has 40 samples at first, and then 60; `protofl compare` tells the runs apart."""
    file = tmp_path / "mine.csv"
    versions = []
    for samples in (40, 60):
        rows = "".join(f"{row},{row % 2}\n" for row in range(samples))
        file.write_text(f"x,label\n{rows}")

        run = run_on(file, tmp_path, algo="local", rounds=1)

        clients = run.rounds[-1]["clients"].values()
        used = [client["train-samples"] + client["test-samples"] for client in clients]
        assert sum(used) == samples
        versions.append(run.summary["data"])
    assert len(set(versions)) == 2


def test_tables_of_algorithms_are_read_as_a_recipe_has_them(tmp_path):
    """Runs of several algorithms may share tables; numbers may be NumPy's."""
    tables = {"fedproto": {"lambda": np.float32(0.25)}, "fedproto_avg": {"lambda": 3.0}}
    options = {"clients": np.int64(2), "seed": np.int64(3), "out_dir": str(tmp_path)}
    run = public.run(algo="fedproto", **options, **SMALL, **tables)

    assert run.summary["settings"]["fedproto.lambda"] == 0.25


@pytest.mark.parametrize(("chosen", "refusal"), [
    ({"fedproto.lambda": 2}, r"fedproto\.lambda = 2: has no effect on fedavg"),
    ({"classes_per_client": 3}, "classes-per-client = 3: has no effect on partition = iid"),
    ({"clients": 0}, "clients = 0: must be at least 1"),
    ({"workers": 0}, "workers = 0: must be at least 1"),
])  # fmt: skip
def test_what_would_have_no_effect_is_refused(chosen, refusal):
    with pytest.raises(public.SettingsError, match=refusal):
        public.run(algo="fedavg", **chosen)


class Twice(extend.ClientAlgorithm[extend.Hparams]):
    """A client half with twice the usual loss."""

    def loss(self, batch):
        return {"cross-entropy": 2 * super().loss(batch)["cross-entropy"]}


def test_a_client_half_is_tried_on_a_batch():
    torch.manual_seed(0)
    plain = public.try_method(extend.ClientAlgorithm, **DATA)
    doubled = public.try_method(Twice, **DATA)

    assert doubled.losses["cross-entropy"] == pytest.approx(2 * plain.losses["cross-entropy"])
    assert plain.upload.vectors().means.shape[1] == 64


@pytest.mark.parametrize(("algo", "term"), [
    ("fedproto", "prototype"),
    ("scaffold", "total"),
    ("fedsa", "contrast"),
    ("feddistill", "total"),
    ("fedkd", "hidden"),
])  # fmt: skip
def test_a_client_half_is_tried_with_what_a_server_would_send(algo, term):
    """Prototypes and weights that a server would send are made from the client's own.

    ``term`` is a part of the loss that needs them.
    """
    tried = public.try_method(client_half(CATALOG[algo]), like=algo, **DATA)
    assert tried.losses[term] > 0


class SendsUndeclared(Twice):
    def upload(self):
        return extend.Payload(odd=torch.ones(1))


class SendsADictionary(Twice):
    def upload(self):
        return {}


def test_a_half_that_breaks_its_contract_is_refused(tmp_path, monkeypatch):
    """The client half sends what is undeclared, sends no `Payload`, or returns no losses."""
    undeclared = "odd is not declared for this direction; declared: prototypes"

    with pytest.raises(ValueError, match=undeclared):
        public.try_method(SendsUndeclared, **DATA)

    no_payload = r"upload\(\) and payload_down\(\) return a Payload, not a dict"

    with pytest.raises(TypeError, match=no_payload):
        public.try_method(SendsADictionary, **DATA)

    monkeypatch.setattr(FedProto, "fit", lambda self: None)
    no_losses = r"FedProto\.fit\(\) returned NoneType, not a dictionary with the mean"

    with pytest.raises(FederationError, match=no_losses):
        public.run(algo="fedproto", clients=2, out_dir=str(tmp_path), **SMALL)


def test_a_half_is_tried_on_the_data_of_all_clients(tmp_path):
    """Here, three clients are named; a run would divide the samples among them.

    Half of the twelve samples are for training.
    """
    file = tmp_path / "mine.npz"
    inputs = np.random.default_rng(1).normal(size=(12, 3))
    np.savez(file, inputs=inputs, labels=[0, 1] * 6, domain=["a", "b", "c"] * 4)

    options = {"models": "mlp-1", "partition": "natural", "train_fraction": 0.5}
    tried = public.try_method(FedProto, file, **options)

    assert tried.upload.vectors().counts.sum() == 6


def test_wrong_settings_and_data_are_refused_before_a_run_has_a_folder(tmp_path):
    """An unknown network, a missing file, and two different numbers of clients."""
    out_dir = str(tmp_path)
    unknown = "arch = 'torchvision:resnet19': architecture 'resnet19' is not one"

    with pytest.raises(public.SettingsError, match=unknown):
        public.run(arch="torchvision:resnet19", out_dir=out_dir, **SMALL)

    with pytest.raises(DataError, match=r"nothing\.npz': .*there is no such file"):
        public.run(tmp_path / "nothing.npz", out_dir=out_dir)

    other_number = r"num-clients = 20: this simulation has 2 \(--clients\)"

    with pytest.raises(public.SettingsError, match=other_number):
        public.run(algo="local", clients=2, num_clients=20, out_dir=out_dir, **SMALL)

    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class PullHparams(extend.Hparams):
    pull: float = extend.option(default=0.5)


class Pulled(extend.FedAvgClient[PullHparams]):
    def loss(self, batch):
        return {**super().loss(batch), "pull": self.hparams.pull * batch.features.square().mean()}


def test_a_client_half_is_tried_with_hyper_parameters_of_its_own():
    """The weight of its term is 0.5, and then 2."""

    def loss_of(pull):
        torch.manual_seed(0)
        tried = public.try_method(Pulled, like="fedavg", own=PullHparams(pull), **DATA)
        return tried.losses["pull"]

    assert loss_of(0.5) > 0
    assert loss_of(2.0) == pytest.approx(4 * loss_of(0.5))


@pytest.mark.parametrize(("version", "key"), [
    ("standard", "force_include"), ("editable", "force_include_editable"),
])  # fmt: skip
def test_an_install_has_the_package_protofl(version, key):
    """The hook of the build adds the files behind ``import protofl``, which lie elsewhere."""
    build = {"force_include": {}, "force_include_editable": {}}
    hook = AppAsData(str(app_folder()), {}, None, None, "", "wheel")
    hook.initialize(version, build)

    assert {"protofl/__init__.py", "protofl/extend.py"} <= set(build[key].values())
    assert all(Path(file).exists() for file in build[key])
