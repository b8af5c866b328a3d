"""Names of architectures and groups."""

from __future__ import annotations

import subprocess
import sys

import pytest

from protofl_common.models.cnn import CNN_PLANS
from protofl_common.models.groups import ARCHITECTURES, GROUPS, architecture_of
from protofl_common.models.resnet import RESNET_BLOCKS


def test_every_architecture_is_built_somewhere() -> None:
    assert set(CNN_PLANS) | set(RESNET_BLOCKS) == set(ARCHITECTURES)
    assert not set(CNN_PLANS) & set(RESNET_BLOCKS)


@pytest.mark.parametrize("group", GROUPS)
def test_groups_name_known_architectures(group: str) -> None:
    assert GROUPS[group]
    assert set(GROUPS[group]) <= set(ARCHITECTURES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_is_a_group_of_one(arch: str) -> None:
    assert GROUPS[arch] == (arch,)


def test_clients_get_the_architectures_in_turn() -> None:
    assert [architecture_of("htcnn8", i) for i in (0, 7, 8, 19)] == ["htcnn-1", "htcnn-8", "htcnn-1", "htcnn-4"]
    assert architecture_of("cnn4", 5) == "cnn4"


def test_names_load_without_torch() -> None:
    code = "import sys, protofl_common.models.groups; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cnns_load_without_torchvision() -> None:
    code = "import sys; from protofl_common.models import build_model; sys.exit('torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
