"""``import protofl``: a federation and a client half from Python, and the names that extensions import."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from client_app.algorithms.base import client_half
from client_app.algorithms.fedproto import FedProto
from hatch_build import AppAsData
from protofl_common.data.raw import DataError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import app_folder
from protofl_common.runs.folder import RunFolder
from protofl_common.tools import extending as extend
from protofl_common.tools import python_api as public
from server_app.network.membership import FederationError

SMALL = {
    "dataset": "digits",
    "partition": "iid",
    "total_samples": 200,
    "rounds": 2,
    "batch_size": 32,
}
DATA = {"dataset": "digits", "partition": "iid", "total_samples": 100, "models": "cnn4"}


def test_a_run_returns_its_results(tmp_path: Path) -> None:
    lines: list[str] = []
    run = public.run(
        algo="fedproto", clients=2, out_dir=str(tmp_path), on_line=lines.append, **SMALL
    )
    assert run.folder.parent == tmp_path
    assert set(run.accuracy) == {"head", "prototype"}
    assert public.Run(str(run.folder)).accuracy == run.accuracy  # type: ignore[arg-type]
    assert all(0 <= value <= 1 for value in run.accuracy.values())
    assert (len(run.rounds), run.summary["rounds"]) == (3, 2)
    assert any(line.startswith("round 2/2") for line in lines)
    (run.folder / "summary.json").unlink()
    for unfinished, figure in ((run, "accuracy"), (public.Run(tmp_path / "none"), "rounds")):
        with pytest.raises(
            public.SettingsError, match=r"(summary\.json|metrics\.jsonl with a round) in it; give"
        ):
            getattr(unfinished, figure)


def test_arrays_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 2, 80)
    inputs = draw.normal(size=(80, 5)) + 4 * labels[:, None]
    names = np.array(["ill", "well"], dtype=object)[labels]  # as pandas has texts
    run = public.run(
        (inputs, names), algo="fedavg", models="mlp-1", clients=2, rounds=5, out_dir=str(tmp_path)
    )
    assert run.accuracy["head"] > 0.9
    assert RunFolder(run.folder).sites()["classes"] == ["ill", "well"]
    assert capsys.readouterr().out == ""
    again = public.run(
        (inputs, names), algo="local", models="mlp-1", rounds=1, seed=2, out_dir=str(tmp_path)
    )
    assert again.summary["settings"]["data-dir"] == run.summary["settings"]["data-dir"], (
        "they can be compared"
    )
    with pytest.raises(
        FederationError, match=r"inputs int64 .* do not fit"
    ):  # as tokens, the float table before not
        public.run(
            (inputs.astype(int) + 9, names), algo="fedavg", models="mlp-1", out_dir=str(tmp_path)
        )
    with pytest.raises(
        public.SettingsError,
        match=r"data: inputs \[80, 5\], labels \[79\]: each input needs a label",
    ):
        public.run((inputs, names[1:]), models="mlp-1", out_dir=str(tmp_path))
    names[40] = float("nan")
    with pytest.raises(FederationError, match=r"sample 40 has no label \('nan'; 1 in all\)"):
        public.run((inputs, names), models="mlp-1", out_dir=str(tmp_path))


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    for samples in (40, 60):
        rows = "".join(f"{row},{row % 2}\n" for row in range(samples))
        (tmp_path / "mine.csv").write_text(f"x,label\n{rows}", encoding="utf-8")
        run = public.run(
            tmp_path / "mine.csv", algo="local", models="mlp-1", rounds=1, out_dir=str(tmp_path)
        )
        assert (
            sum(
                row["train-samples"] + row["test-samples"]
                for row in run.rounds[-1]["clients"].values()
            )
            == samples
        )


def test_tables_of_algorithms_are_read_as_a_recipe_has_them(tmp_path: Path) -> None:
    """Runs of several algorithms may share tables."""
    tables = {
        "fedproto": {"lambda": np.float32(0.25)},
        "fedproto_avg": {"lambda": 3.0},
        "algo": "fedproto",
    }
    run = public.run(
        clients=np.int64(2), out_dir=str(tmp_path), seed=np.int64(3), **SMALL, **tables
    )  # type: ignore
    assert run.summary["settings"]["fedproto.lambda"] == 0.25
    with pytest.raises(
        public.SettingsError, match=r"fedproto\.lambda = 2: has no effect on fedavg"
    ):
        public.run(algo="fedavg", **{"fedproto.lambda": 2})


class Twice(extend.ClientAlgorithm[extend.Hparams]):
    def loss(self, batch: extend.Batch) -> extend.LossTerms:
        return {"cross-entropy": 2 * super().loss(batch)["cross-entropy"]}


def test_a_client_half_is_tried_on_a_batch_with_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedProto's prototypes, and the weights that FedProx begins with, are the client's own."""
    torch.manual_seed(0)
    plain, doubled = (public.try_method(half, **DATA) for half in (extend.ClientAlgorithm, Twice))
    assert doubled.losses["cross-entropy"] == pytest.approx(2 * plain.losses["cross-entropy"])
    assert plain.upload.vectors().means.shape[1] == 64
    terms = {
        "fedproto": "prototype",
        "scaffold": "total",
        "fedsa": "contrast",
        "feddistill": "total",
        "fedkd": "hidden",
    }
    for like, term in terms.items():
        assert public.try_method(client_half(CATALOG[like]), like=like, **DATA).losses[term] > 0
    with pytest.raises(
        ValueError, match="odd is not declared for this direction; declared: prototypes"
    ):
        public.try_method(
            type("Odd", (Twice,), {"upload": lambda self: extend.Payload(odd=torch.ones(1))}),
            **DATA,
        )
    with pytest.raises(
        TypeError, match=r"upload\(\) and payload_down\(\) return a Payload, not a dict"
    ):
        public.try_method(type("Odd", (Twice,), {"upload": lambda self: {}}), **DATA)
    monkeypatch.setattr(FedProto, "fit", lambda self: None)
    with pytest.raises(
        FederationError,
        match=r"FedProto\.fit\(\) returned NoneType, not a dictionary with the mean",
    ):
        public.run(algo="fedproto", clients=2, out_dir=str(tmp_path), **SMALL)


def test_a_half_is_tried_on_the_data_of_all_clients(tmp_path: Path) -> None:
    """Though a run would divide them among those that they name."""
    named = tmp_path / "mine.npz"
    np.savez(
        named,
        inputs=np.random.default_rng(1).normal(size=(12, 3)),
        labels=[0, 1] * 6,
        domain=["a", "b", "c"] * 4,
    )
    tried = public.try_method(
        FedProto, named, models="mlp-1", partition="natural", train_fraction=0.5
    )
    assert tried.upload.vectors().counts.sum() == 6


def test_an_error_is_raised_where_it_is_made_before_a_client_is_asked(tmp_path: Path) -> None:
    with pytest.raises(
        public.SettingsError,
        match="arch = 'torchvision:resnet19': architecture 'resnet19' is not one",
    ):
        public.run(arch="torchvision:resnet19", out_dir=str(tmp_path), **SMALL)
    with pytest.raises(DataError, match=r"nothing\.npz': there is no such file"):
        public.run(tmp_path / "nothing.npz", out_dir=str(tmp_path))
    with pytest.raises(public.SettingsError, match="batch-size = 0: must be a number at least 1"):
        public.run(batch_size=0)
    with pytest.raises(
        public.SettingsError, match=r"num-clients = 20: this simulation has 2 \(--clients\)"
    ):
        public.run(algo="local", clients=2, num_clients=20, out_dir=str(tmp_path), **SMALL)
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class PullHparams(extend.Hparams):
    pull: float = extend.option(default=0.5)


class Pulled(extend.FedAvgClient[PullHparams]):
    def loss(self, batch: extend.Batch) -> extend.LossTerms:
        return {**super().loss(batch), "pull": self.hparams.pull * batch.features.square().mean()}


def test_a_client_half_is_tried_with_hyper_parameters_of_its_own() -> None:
    losses = []
    for pull in (0.5, 2.0):
        torch.manual_seed(0)
        losses.append(
            public.try_method(Pulled, like="fedavg", own=PullHparams(pull), **DATA).losses["pull"]
        )
    assert 0 < losses[1] == pytest.approx(4 * losses[0])


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_an_install_knows_the_name(version: str) -> None:
    included: dict[str, dict[str, str]] = {"force_include": {}, "force_include_editable": {}}
    AppAsData(str(app_folder()), {}, None, None, "", "wheel").initialize(version, included)  # type: ignore[arg-type]
    names = included["force_include" if version == "standard" else "force_include_editable"]
    assert {"protofl/__init__.py", "protofl/extend.py"} <= set(names.values())
    assert all(Path(file).exists() for file in names)
