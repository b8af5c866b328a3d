"""Sites whose data say whose each sample is: ε is of a person, and nothing else is accepted."""

import json
import re
import stat
from pathlib import Path

import numpy as np
import pytest

from protofl_common.config.options import SettingsError
from protofl_common.data.store import data_key
from protofl_common.experiment.settings import Settings
from protofl_common.runs.folder import RunFolder
from server_app.network.membership import FederationError
from tests.support.harness import CACHE, client_of, federate, run_config, run_federation
from tests.support.sites import make_site_keys

PERSONS = 40
RUN = {
    "algo": "fedproto",
    "dataset": "arrays",
    "classes": "well,ill",
    "partition": "own",
    "num_clients": 2,
    "models": "mlp-1",
    "feature_dim": 8,
    "norm": "group",
    "batch_size": 10,
    "rounds": 1,
    "dp": "person",
}


def write_data(folder, seed, *, names_persons=True):
    """Write samples of `PERSONS` people, and return the file.

    The first has seventy samples, the others have two to eight; those of a person have one label.
    ``names_persons`` adds the array that says whose each sample is.
    """
    draw = np.random.default_rng(seed)
    sizes = draw.integers(2, 9, size=PERSONS)
    sizes[0] = 70
    owners = np.repeat(np.arange(PERSONS), sizes)
    labels = owners % 2
    inputs = (draw.normal(size=(len(owners), 6)) + labels[:, None]).astype(np.float32)
    arrays = {"inputs": inputs, "labels": np.array(["well", "ill"])[labels]}
    if names_persons:
        arrays["client"] = np.array([f"patient {owner}" for owner in owners])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def write_site(folder, name, **more):
    """Write data that name persons, and return the node config of a site with them.

    ``more`` stands in the node config, too.
    """
    seed = len(name)  # names of other lengths have other data
    return {
        "site-name": name,
        "dataset": "arrays",
        "classes": "well,ill",
        "data-dir": str(write_data(folder / name, seed)),
        "state-dir": str(folder / name / "state"),
        "approve": False,
        **CACHE,
        **more,
    }


@pytest.mark.parametrize("changes", [
    {"algo": "fedproto", "validation_fraction": 0.2},
    {"algo": "fedavg"},
    {"algo": "fedgen", "fedgen__server_steps": 2},
])  # fmt: skip
def test_persons_are_counted_in_all_that_leaves(changes, tmp_path):
    """Numbers of samples, weights, figures and counts are of persons; ε is said to be, too."""
    nodes = {1: write_site(tmp_path, "north"), 2: write_site(tmp_path, "southern")}
    outcome = federate(tmp_path, nodes=nodes, **RUN | changes)

    assert not outcome.trouble
    for facts in RunFolder(outcome.folder).sites()["sites"].values():
        samples = facts["train-samples"] + facts["test-samples"]
        assert samples + facts.get("validation-samples", 0) == PERSONS
    assert outcome.rows[-1]["epsilon-of"] == "person"
    for row in outcome.rows[-1]["clients"].values():
        persons = row["test-samples"]
        for share in row["accuracy"].values():
            right = share * persons  # is a whole number
            assert right == pytest.approx(round(right))

    ledgers = [*tmp_path.glob("*/state/privacy/*.json")]
    assert len(ledgers) == 4  # each of two sites has one by its name and one by its data
    for ledger in ledgers:
        (rows,) = json.loads(ledger.read_text()).values()
        assert {unit for _rate, _noise, unit, _times in rows} == {"person"}


def test_moments_of_persons_are_summed_with_shared_noise(tmp_path):
    """Gaussian heads under secure aggregation: three sites, each of which draws its part.

    One alone has validation samples: nobody else would add noise to figures of these.
    """
    draw = np.random.default_rng(0)
    nodes = {}
    for number, name in enumerate(("east", "north", "southern"), start=1):
        validation = 0.3 if name == "east" else 0.0
        demands = {"max-honest-sites": 3, "validation-fraction": validation}
        node = write_site(tmp_path, name, **demands)
        file = Path(node["data-dir"])
        arrays = dict(np.load(file))
        # images, which the backbone takes, in the place of six numbers
        arrays["inputs"] = draw.integers(0, 255, (len(arrays["labels"]), 3, 8, 8), dtype=np.uint8)
        np.savez(file, **arrays)
        nodes[number] = node
    gaussian = {"algo": "gaussian", "backbones": "glyphs", "secagg": True, "dp_honest_sites": 3}
    outcome = federate(tmp_path, nodes=nodes, **RUN | {"num_clients": 3} | gaussian)
    assert not outcome.trouble
    assert outcome.summary["accuracy"]["head"]["mean"] >= 0
    assert not any("validation" in row for row in outcome.rows)


def test_whose_samples_they_are_decides_what_is_protected(tmp_path):
    """Data that name persons are protected by person, and others by sample; no run can choose."""

    def reason(folder, **changes):
        """Return why a site with these data refuses a run."""
        node = {**write_site(tmp_path, "north"), "data-dir": str(folder)}
        config = run_config(tmp_path, **RUN | changes)
        with pytest.raises(SettingsError) as caught:
            _ = client_of(config, **node).data
        return str(caught.value)

    with_persons = write_data(tmp_path / "with", seed=1)
    without = write_data(tmp_path / "without", seed=1, names_persons=False)
    assert "dp = 'sample': this client's data say whose each sample is" in reason(
        with_persons, dp="sample"
    )
    assert "dp = 'person': this client's data do not say whose each sample is" in reason(without)

    # here each value of the column is a client of the run
    natural = run_config(tmp_path, **RUN | {"partition": "natural", "data_dir": str(with_persons)})
    with pytest.raises(SettingsError, match="dp = 'person': this client's data do not say"):
        _ = client_of(natural, partition=0, clients=PERSONS).data


def test_a_demand_per_person_is_met_by_no_run_per_sample(tmp_path):
    demand = {"require-dp": "epsilon<=8 per person"}
    node = write_site(tmp_path, "north", **demand)
    with pytest.raises(SettingsError, match="this site takes part only with dp = 'person'"):
        Settings.from_run_config(run_config(tmp_path, **RUN | {"dp": "sample"}), node)
    Settings.from_run_config(run_config(tmp_path, **RUN), node)


def test_charges_of_samples_say_nothing_of_persons(tmp_path, capfd):
    """Where a ledger has charges per sample, and the data now name persons, a site takes no part.

    What those charges cost a person cannot be said. The key by which a site divides its data stays.
    """
    nodes = {}
    for number, name in enumerate(("north", "southern"), start=1):
        nodes[number] = write_site(tmp_path, name, **{"require-dp": "epsilon<=20"})
        write_data(tmp_path / name, seed=number, names_persons=False)
        make_site_keys(**{name: tmp_path / name / "state/sites" / name})
    # with require-dp a site divides its data by a key that it keeps
    keys = [
        tmp_path / name / "state/sites" / name / "division.key" for name in ("north", "southern")
    ]
    first = run_config(tmp_path / "1", **RUN | {"dp": "sample", "run_name": "first"})
    assert not run_federation(first, nodes=nodes, run_id=1).trouble

    made = [key.read_text() for key in keys]
    assert made[0] != made[1]
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in keys)

    for number, name in enumerate(("north", "southern"), start=1):
        write_data(tmp_path / name, seed=number)
    data_key.cache_clear()  # else this process, which has looked once, goes by the files of then
    with pytest.raises(FederationError, match="earlier charges in this client's ledger are of"):
        federate(tmp_path / "2", nodes=nodes, run_id=2, **RUN | {"run_name": "second"})
    assert [key.read_text() for key in keys] == made
    assert re.search("require-dp, over all runs, = 20: earlier charges", capfd.readouterr().err)
