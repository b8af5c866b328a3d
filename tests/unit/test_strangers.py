"""Files of strangers run no code: models, recipes, runs, tables may name modules nobody allowed."""

import sys

import numpy as np
import pytest
import torch

from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import _ALLOWED, allow, is_python_name, load
from protofl_common.experiment.catalog import GROUP, algorithm_named
from protofl_common.models.trained import ModelCard, TrainedModel
from protofl_common.simulation.pool import pool
from protofl_common.tools.arguments import read_assignments
from protofl_common.tools.inference import Predictor
from tests.support.commands import output

MODULE = """
from pathlib import Path
from shutil import rmtree
import numpy as np
import torch
Path({mark!r}).touch()
class Net(torch.nn.Module):
    def __init__(self, input_shape, feature_dim):
        super().__init__()
        self.layer = torch.nn.Linear(input_shape[0], feature_dim)
    def forward(self, x):
        return self.layer(x)
def data(folder):
    return {{"inputs": np.zeros((40, 3), np.float32), "labels": np.arange(40) % 2}}
"""


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A file that is there once the module `planted.vision` in the current folder has run."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "vision.py").write_text(MODULE.format(mark=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as in a notebook, and with python -m
    for name in ("planted", "planted.vision"):
        sys.modules.pop(name, None)
    return tmp_path / "ran"


METHOD = """
from pathlib import Path
from protofl_common.algorithms.base import Algorithm
Path({mark!r}).touch()
ROW = Algorithm("Theirs", "", "client_app.algorithms.base", "server_app.strategies.base")
"""


@pytest.fixture
def plugin(mark, tmp_path, monkeypatch):
    """`mark`, once the module `planted.method` of the installed method ``theirs`` has run."""
    (tmp_path / "planted" / "method.py").write_text(METHOD.format(mark=str(mark)))
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntheirs = planted.method:ROW\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("planted.method", None)
    algorithm_named.cache_clear()
    yield mark
    algorithm_named.cache_clear()


@pytest.fixture
def precious(tmp_path):
    """A folder that a stranger's file would remove if its code ran."""
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter").write_text("years of work")
    return folder


def foreign_model(arch):
    """Return a model without weights, whose card names an architecture."""
    card = ModelCard(
        run="run",
        flower_run="",
        site="north",
        domain="",
        algorithm="fedavg",
        round=1,
        arch=arch,
        input_shape=(3,),
        input_type="float32",
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        backbones=(),
        features_in=0,
        feature_dim=2,
        classes=("a", "b"),
        inference="head",
        similarity="l2",
        accuracy={"head": 1.0},
        test_samples=1,
        temperature=1.0,
        calibrated_on="test",
        chosen_on="",
    )
    return TrainedModel(card, {}, None, torch.empty(0))


def write_run(folder, settings):
    """Write the files of a run that ``protofl predict`` reads."""
    site = folder / "clients/site-0"
    site.mkdir(parents=True)
    (folder / "settings.toml").write_text(settings)
    foreign_model("mlp-1").write(site / "model.safetensors")


NOT_NAMED = "which you did not name"


def test_a_models_card_names_no_code(mark, tmp_path, capsys):
    """A model whose card names an architecture of a module is refused unless that is allowed."""
    foreign_model("planted.vision:Net").export(tmp_path / "model", 1.0)
    np.save(tmp_path / "rows.npy", np.zeros((2, 3), np.float32))

    refusal = r"arch = 'planted.vision:Net': runs code of the module planted.vision, "
    with pytest.raises(SettingsError, match=refusal):
        Predictor.load("model")

    refused = output(capsys, "predict", "model", "rows.npy", status=1).err
    assert "--allow-python planted.vision" in refused
    assert not mark.exists()

    # Once it is allowed it is imported and built, and only its weights do not fit.
    with pytest.raises(SettingsError, match="the weights are not of the network"):
        Predictor.load("model", allow_python="planted")
    assert mark.exists()
    with pytest.raises(SettingsError, match=NOT_NAMED):  # it was for that model only
        Predictor.load("model")


def test_a_recipe_a_run_and_a_table_name_no_code(precious, mark, tmp_path, capsys):
    """Each file names code: a function that removes a folder, or a module that leaves a mark."""
    remove = f'dataset = "shutil:rmtree"\ndata-dir = "{precious}"\n'
    calls = 'dataset = "wine"\ncallback = "planted.vision:data"\n'
    nets = 'arch = "planted.vision:Net"\nmodels = "othernets:Net"\n'
    (tmp_path / "remove.toml").write_text(remove)
    (tmp_path / "calls.toml").write_text(calls)
    (tmp_path / "nets.toml").write_text(calls + nets)
    write_run(tmp_path / "run", remove)
    settings = f'{{dataset: "shutil:rmtree", data-dir: "{precious}"}}'
    table = f"title: t\nsettings: {settings}\ncolumns: {{a: }}\nrows: {{b: }}\n"
    (tmp_path / "remove.yaml").write_text(table)

    for command in (
        "run --recipe remove.toml seed=2",
        "run --recipe nets.toml seed=2",
        "run --recipe calls.toml seed=2",
        "predict run",
        "table remove.yaml --out out",
    ):
        assert NOT_NAMED in output(capsys, *command.split(), status=1).err, command

    hint = "; only if you trust it, give --allow-python othernets,planted.vision ("
    assert hint in output(capsys, "run", "--recipe", "nets.toml", status=1).err

    output(capsys, "doctor", "--recipe", "remove.toml", status=1)

    assert precious.exists()
    assert not mark.exists()


SMALL = 'dataset = "digits"\npartition = "iid"\nrounds = 1\ntotal-samples = 60\nreport = false\n'
REFUSED = (
    "algo = 'theirs': runs code of the module planted.method, which you did not name; "
    "only if you trust it, give --allow-python planted.method ("
)


def test_a_recipe_a_run_and_a_table_name_no_method_of_a_package(plugin, tmp_path, capsys):
    """The method "theirs" is of an installed package, and is imported only if it is allowed."""
    recipe = f'algo = "theirs"\n{SMALL}'
    (tmp_path / "theirs.toml").write_text(recipe)
    write_run(tmp_path / "run", recipe)
    settings = "{dataset: digits, partition: iid, algo: theirs}"
    table = f"title: t\nsettings: {settings}\ncolumns: {{a: }}\nrows: {{b: }}\n"
    (tmp_path / "theirs.yaml").write_text(table)
    plan = "table theirs.yaml --out out --dry-run"
    deny = 'site deny theirs.toml --node-config site-name="north"'

    for command in (
        "run --recipe theirs.toml seed=2",
        "run --recipe theirs.toml --allow-python planted.vision,plant",
        "predict run",
        "study show theirs.toml",
        plan,
        deny,
    ):
        assert REFUSED in output(capsys, *command.split(), status=1).err, command

    examined = output(capsys, "doctor", "--recipe", "theirs.toml", status=1).out
    assert NOT_NAMED in examined
    assert not plugin.exists()

    output(capsys, *plan.split(), "--allow-python", "planted")
    assert plugin.exists()

    forget_what_was_named()
    denied = output(capsys, *deny.split(), "--allow-python", "planted").out

    assert denied.startswith("north: denied: a run without a study")


@pytest.fixture
def _fresh_processes():
    """Fork the processes that simulate clients anew, so that they know what this test installs."""
    pool.cache_clear()
    yield
    pool.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_processes", "plugin")
def test_a_method_that_is_typed_or_allowed_runs_from_a_recipe_of_ones_own(tmp_path, capsys):
    """What was allowed or typed once is not allowed the next time."""
    (tmp_path / "mine.toml").write_text(f'algo = "theirs"\n{SMALL}')
    command = ["run", "--recipe", "mine.toml", "--clients", "2", "--quiet"]

    output(capsys, *command, "run-name=allowed", "--allow-python", "planted.method")
    forget_what_was_named()

    assert REFUSED in output(capsys, *command, "run-name=refused", status=1).err

    output(capsys, *command, "run-name=typed", "algo=theirs")
    forget_what_was_named()
    resume = ["run", "--recipe", "runs/typed/resume.toml"]

    assert REFUSED in output(capsys, *resume, status=1).err


def forget_what_was_named():
    """Forget which modules were allowed and imported, as a new process does not know of them."""
    _ALLOWED.set(frozenset())
    algorithm_named.cache_clear()
    sys.modules.pop("planted.method")


@pytest.mark.usefixtures("mark")
def test_what_a_person_has_typed_is_loaded():
    """A name that stands in an argument KEY=VALUE is allowed, and no other one."""
    with pytest.raises(SettingsError, match=NOT_NAMED):
        load("planted.vision:Net", "arch")

    read_assignments(["arch=planted.vision:Net"])
    assert load("planted.vision:Net", "arch").__name__ == "Net"
    with pytest.raises(SettingsError, match=NOT_NAMED):
        load("shutil:rmtree", "dataset")


@pytest.mark.usefixtures("mark")
def test_a_module_that_is_allowed_lends_no_object_of_another():
    """What the module has imported from elsewhere is not its own."""
    allow(["planted"])
    assert callable(load("planted.vision:data", "dataset"))

    # names that the module has imported -> how the refusal goes on
    homes = {"rmtree": "; it lies in shutil", "Path": "; it lies in pathlib", "torch": "$"}
    for name, home in homes.items():
        with pytest.raises(SettingsError, match=f"no function or class of planted.vision{home}"):
            load(f"planted.vision:{name}", "dataset")
    assert not is_python_name("planted.vision:torch.hub.shutil.rmtree")
