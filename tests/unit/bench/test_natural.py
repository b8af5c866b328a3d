"""The hospitals of docs/algorithms/natural.md are those of FLamby's Fed-Heart-Disease."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.model_selection import train_test_split

from tests.bench.natural import HOSPITALS, heart


def write(folder: Path, name: str, ill: list[int], gaps: int = 0) -> None:
    """Write one patient a line, whose age is its number; then some with a missing cholesterol value."""
    lines = [
        f"{age},1,{1 + age % 4},130,200,0,{age % 3},150,0,1.5,?,?,?,{num}"
        for age, num in enumerate(ill)
    ]
    lines += ["50,1,1,130,?,0,0,150,0,1.5,1,0,3,1"] * gaps
    (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n")


def test_patients_are_divided_as_flamby_divides_them(tmp_path: Path) -> None:
    """A third of each hospital, as many ill in both parts; not so where one class has two patients at most."""
    ill = {
        "cleveland": [0, 3] * 10,
        "hungarian": [0, 0, 1] * 8,
        "switzerland": [1] * 12 + [0],
        "va": [2, 0, 1] * 5,
    }
    for name, nums in ill.items():
        write(tmp_path, name, nums, gaps=2)
    found = heart(str(tmp_path))
    client, split, labels = (np.array(found[key]) for key in ("client", "split", "labels"))
    for name in HOSPITALS:
        here, sick = client == name, [int(num > 0) for num in ill[name]]
        assert labels[here].tolist() == sick
        even = None if name == "switzerland" else sick
        _, test = train_test_split(
            range(len(sick)), test_size=0.34, train_size=0.66, random_state=43, stratify=even
        )
        assert np.flatnonzero(split[here] == "test").tolist() == sorted(test)


def test_categories_become_columns_and_gaps_leave(tmp_path: Path) -> None:
    for name in HOSPITALS:
        write(tmp_path, name, [0, 1] * 5, gaps=1)
    inputs = heart(str(tmp_path))["inputs"]
    assert inputs.shape == (40, 13)
    assert inputs[5].tolist() == [
        5,
        1,
        130,
        200,
        0,
        150,
        0,
        1.5,
        1,
        0,
        0,
        0,
        1,
    ]  # cp 2 of 1 to 4, restecg 2 of 0 to 2
