"""The hospitals of docs/algorithms/natural.md are those of FLamby's Fed-Heart-Disease."""

from __future__ import annotations

import numpy as np
from sklearn.model_selection import train_test_split

from tests.bench.natural import HOSPITALS, heart


def write(folder, name, nums, gaps=0):
    """Write a hospital: a patient a line, whose age is its number, and ``gaps`` patients more.

    ``nums`` are their diagnoses, 0 for well. The others have no cholesterol value.
    """
    lines = []
    for age, num in enumerate(nums):
        lines.append(f"{age},1,{1 + age % 4},130,200,0,{age % 3},150,0,1.5,?,?,?,{num}")
    lines += ["50,1,1,130,?,0,0,150,0,1.5,1,0,3,1"] * gaps
    (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n")


DIAGNOSES = {
    "cleveland": [0, 3] * 10,
    "hungarian": [0, 0, 1] * 8,
    "switzerland": [1] * 12 + [0],
    "va": [2, 0, 1] * 5,
}


def test_patients_are_divided_as_flamby_divides_them(tmp_path):
    """A third of each hospital is for testing, drawn with scikit-learn as FLamby does it.

    The two parts have the same proportion of ill patients, except in Switzerland, where hardly
    anybody is well.
    """
    for name, nums in DIAGNOSES.items():
        write(tmp_path, name, nums, gaps=2)

    found = heart(str(tmp_path))

    client, split, labels = (np.array(found[key]) for key in ("client", "split", "labels"))
    for name in HOSPITALS:
        is_here = client == name
        ill = [int(num > 0) for num in DIAGNOSES[name]]
        assert labels[is_here].tolist() == ill

        strata = None if name == "switzerland" else ill
        parts = {"test_size": 0.34, "train_size": 0.66, "random_state": 43}
        _, tested = train_test_split(range(len(ill)), **parts, stratify=strata)
        assert np.flatnonzero(split[is_here] == "test").tolist() == sorted(tested)


def test_categories_become_columns_and_patients_with_gaps_are_left_out(tmp_path):
    """Four hospitals have ten patients each, and one more with a gap, who is left out."""
    for name in HOSPITALS:
        write(tmp_path, name, [0, 1] * 5, gaps=1)
    inputs = heart(str(tmp_path))["inputs"]

    assert inputs.shape == (40, 13)
    # after oldpeak, 1.5, a column for each category but the first: cp = 2, 3, 4; restecg = 1, 2
    assert inputs[5].tolist() == [5, 1, 130, 200, 0, 150, 0, 1.5, 1, 0, 0, 0, 1]
