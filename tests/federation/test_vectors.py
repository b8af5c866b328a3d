"""Vectors of a foundation model that sites have run themselves, in the place of a backbone."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from protofl_common.backbones.features import extract_features
from protofl_common.models.trained import TrainedModel
from protofl_common.tools.cli import main
from protofl_common.tools.inference import Predictor
from protofl_common.tools.site.approvals import describe_run
from tests.support.harness import CACHE, federate, refusal, settings_of
from tests.support.sites import NAMES

BACKBONE = "glyphs"
PROTECTIONS = {
    "alone": {"gaussian__revocable": True},
    "summed": {"secagg": True},
}


class Sites:
    """Three sites, each with images and with the vectors that the backbone makes of them."""

    def __init__(self, folder):
        self.folder = folder
        scans = load_digits()
        # 540 images, 180 for each site, of pixels from 0 to 16 that become 0 to 255
        self.images = np.rint(scans.images[:540] * (255 / 16)).astype(np.uint8)[:, None]
        self.vectors = extract_features(self.images, [BACKBONE], torch.device("cpu")).numpy()
        for number, name in enumerate(NAMES):
            rows = slice(number, None, len(NAMES))
            labels = scans.target[:540][rows]
            np.savez(folder / f"{name}-images.npz", inputs=self.images[rows], labels=labels)
            np.savez(folder / f"{name}-vectors.npz", inputs=self.vectors[rows], labels=labels)

    def run(self, kind, names=NAMES, **settings):
        """Run on the sites' data of this ``kind``: ``images`` or ``vectors``."""
        nodes = {}
        for number, name in enumerate(names, 1):
            nodes[number] = {
                "site-name": name,
                "dataset": "arrays",
                "classes": ",".join(map(str, range(10))),
                "data-dir": str(self.folder / f"{name}-{kind}.npz"),
                "state-dir": str(self.folder / kind / name),
                **CACHE,
            }
        small = {"partition": "own", "num_clients": len(names), "rounds": 1, "liars": 0}
        small |= {"train_samples": 0, "image_size": 0}
        small["backbones"] = "none" if kind == "vectors" else BACKBONE
        return federate(self.folder / kind, nodes=nodes, **small | settings)

    def models(self, kind):
        """Return the models that the sites have after runs on data of this kind."""
        files = sorted((self.folder / kind).rglob("model.safetensors"))
        return [TrainedModel.read(file) for file in files]


@pytest.fixture
def sites(tmp_path):
    return Sites(tmp_path)


def assert_same_models(sites):
    """Models of the features of images and of vectors are equal, to 10⁻⁶ of the largest number."""
    of_images = sites.models("images")
    of_vectors = sites.models("vectors")
    assert len(of_images) == len(of_vectors) == len(NAMES)
    for wanted, found in zip(of_images, of_vectors, strict=True):
        for name, value in wanted.weights.items():
            finite = value[value.isfinite()]
            tolerance = 1e-6 * float(finite.abs().max()) if len(finite) else 0.0
            torch.testing.assert_close(found.weights[name], value, rtol=0, atol=tolerance)


def moments_in(run):
    """Return the merged moments in the checkpoint after the only round of a run."""
    state = load_file(run / "checkpoints" / "000001.safetensors")
    return {name: value for name, value in state.items() if name.startswith("moments/")}


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_the_gaussian_head_of_vectors_is_that_of_the_images(protection, sites):
    """The models are equal, and predict the same of images as of their vectors."""
    settings = {"algo": "gaussian", **PROTECTIONS[protection]}
    sites.run("images", **settings)
    sites.run("vectors", **settings)

    assert_same_models(sites)

    predicted = {}
    for kind, inputs in (("images", sites.images), ("vectors", sites.vectors)):
        of_east, *_others = sites.models(kind)
        predictor = Predictor(of_east)
        predicted[kind] = [prediction.label for prediction in predictor.predict(inputs[:60])]

    assert predicted["images"] == predicted["vectors"]


def test_mpft_of_vectors_is_that_of_the_images(sites):
    sites.run("images", algo="mpft")
    sites.run("vectors", algo="mpft")
    assert_same_models(sites)


def test_vectors_have_noise_of_a_known_length(sites):
    """Under dp vectors are neither shifted nor scaled, but cut to the length dp-feature-clip.

    A mean or a deviation would be fitted on the samples. Of ten classes a tenth is right by chance.
    """
    outcome = sites.run("vectors", algo="gaussian", dp="sample", dp_epsilon=8.0)
    for trained in sites.models("vectors"):
        assert set(trained.card.mean) == {0.0}
        assert set(trained.card.std) == {1.0}
        assert float(trained.weights["head.longest"]) == settings_of({}).privacy.dp_feature_clip
    assert outcome.summary["accuracy"]["head"]["mean"] > 0.2


def test_a_site_takes_its_vectors_back(sites):
    """Once east is forgotten, the moments left equal those of the other two sites' images.

    Each site's vectors are features of its images.
    """
    run = sites.run("vectors", algo="gaussian", gaussian__revocable=True).folder
    assert main(["forget", str(run), "--site", "east"]) == 0

    left = moments_in(run)
    _east, *other_names = NAMES
    others = sites.run("images", other_names, algo="gaussian").folder
    for name, value in moments_in(others).items():
        tolerance = 1e-6 * float(value.abs().max())
        torch.testing.assert_close(left[name], value, rtol=0, atol=tolerance)


def test_a_request_says_that_moments_of_vectors_leave():
    """What operators read names vectors; settings that would change these are refused."""
    for algo, sent in {
        "gaussian": "class moments of your vectors",
        "mpft": "several prototypes of each class, of your vectors",
    }.items():
        settings = settings_of({"algo": algo, "backbones": "none", "rounds": 1})
        assert any(f"in each round {sent}" in line for line in describe_run(settings))
    said = refusal({"algo": "gaussian", "backbones": "none", "standardise": "client"})
    assert "standardise = 'client': vectors are taken as they are" in said


def test_images_are_no_vectors(sites):
    with pytest.raises(Exception, match="gaussian then takes vectors of features") as refused:
        federate(sites.folder, clients=3, algo="gaussian", backbones="none", image_size=16)
    assert "choose auto, or name backbones, for images" in str(refused.value)
