"""``test-from = "keyed"``: one sample more, or one person, moves nobody else."""

import numpy as np
import pytest
from PIL import Image

from protofl_common.data import open_client_data
from protofl_common.experiment.node import own_division
from protofl_common.experiment.settings import default_run_config

from .conftest import WHOLE, refused

KEY = b"k" * 32
SIDES = ("train", "test", "validation")


class Owner:
    """A site's operator, whose files have different numbers in each row, and who has a key."""

    def __init__(self, folder, make):
        self.folder = folder
        self.make = make

    def sides(self, samples, of_person=0, key=KEY, **changes):
        """Return for each of the ``samples`` whether it is for training, testing or validation.

        Persons have ``of_person`` samples each, one after the other; 0: the file names no persons.
        """
        rows = np.arange(samples)
        arrays = {"inputs": np.stack([rows, rows % 7], 1).astype(np.float32), "labels": rows % 2}
        if of_person:
            arrays["client"] = rows // of_person
        file = self.folder / f"{samples}.npz"
        np.savez(file, **arrays)
        named = {"dataset": "arrays", "data_dir": str(file), "test_from": "keyed"}
        own = {"partition": "own", "validation_fraction": 0.2}
        settings = self.make(**named, **own, **WHOLE, **changes)
        data = open_client_data(settings, seed=0, partition=0, num_partitions=1, key=key)
        side_of = {}
        for side in SIDES:
            for row in np.asarray(getattr(data, f"{side}_inputs"))[:, 0]:
                side_of[int(row)] = side
        assert sorted(side_of) == [*range(samples)]
        return side_of


@pytest.fixture
def owner(tmp_path, data_settings):
    return Owner(tmp_path, data_settings)


@pytest.mark.parametrize("of_person", [0, 3])
def test_samples_that_are_added_move_no_other(of_person, owner):
    """Samples of one person, three each, are on one side."""
    before = owner.sides(300, of_person)
    after = owner.sides(303, of_person)
    assert {row: side for row, side in after.items() if row < 300} == before
    if of_person:
        for row in range(303):
            first_of_person = row // 3 * 3
            assert after[row] == after[first_of_person]


def test_the_key_decides_and_the_parts_are_about_as_large_as_asked(owner):
    """By default a quarter is for testing, and of the rest 0.2 for validation: 0.15 of all.

    The tolerances are four deviations of such numbers or more.
    """
    sides = owner.sides(2000)
    number = {side: list(sides.values()).count(side) for side in SIDES}
    assert number["test"] == pytest.approx(500, abs=80)
    assert number["validation"] == pytest.approx(300, abs=70)

    others = owner.sides(2000, key=b"another")
    same = sum(sides[row] == others[row] for row in range(2000)) / 2000
    same_by_chance = 0.6**2 + 0.25**2 + 0.15**2
    assert same == pytest.approx(same_by_chance, abs=0.05)


def test_without_a_key_no_data_are_divided_by_one(owner):
    with refused("only in the node config of a site with data of its own"):
        owner.sides(30, key=b"")


@pytest.mark.parametrize(("dataset", "domain"), [("image-folder", ""), ("domain-folder", "north")])
def test_no_setting_of_a_run_moves_a_sample(dataset, domain, tmp_path, data_settings):
    """Sides of images follow from the files, not from what ``image-size`` makes of them."""
    draw = np.random.default_rng(0)
    for name in ("well", "ill"):
        (tmp_path / domain / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / domain / name / f"{number}.png")
    named = {"dataset": dataset, "data_dir": str(tmp_path), "test_from": "keyed"}
    labels = []
    for size in (8, 16):
        settings = data_settings(partition="own", image_size=size, **named, **WHOLE)
        data = open_client_data(settings, seed=size, partition=0, num_partitions=1, key=KEY)
        labels.append((data.train_labels.tolist(), data.test_labels.tolist()))
    assert labels[0] == labels[1]


def test_a_site_that_demands_privacy_divides_by_its_key_unless_its_operator_says_otherwise():
    """Without a demand the division is the seed's, as ``test-from`` is "split"."""
    own = {"data-dir": "/srv/data"}
    demand = {**own, "require-dp": "epsilon<=2"}
    defaults = default_run_config()
    assert own_division(own, defaults)["test-from"] == "split"
    assert own_division(demand, defaults)["test-from"] == "keyed"
    assert own_division({**demand, "test-from": "official"}, defaults)["test-from"] == "official"
