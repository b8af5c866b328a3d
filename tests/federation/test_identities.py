"""Identities: an algorithm whose own term is switched off is a simpler one, to the last bit.

Of the rows of metrics what both have is compared, and the models that the clients leave. FML's meme
model must not use random numbers (dropout), or the private model draws others than it does alone.
"""

from functools import cache

import pytest

from protofl_common.experiment.catalog import CATALOG
from tests.support.harness import federate
from tests.support.plain import CLIENTS
from tests.support.results import assert_same_models, metrics, models_left

HEADS = {"initial_weights": "own", "head": "orthogonal-shared"}
"""Settings under which heads do not train: FedGH's server has nothing to do, for example."""
IDENTITIES = {
    "fedprox": ("fedavg", {"fedprox__mu": 0.0}, {}),
    "moon": ("fedavg", {"moon__mu": 0.0}, {}),
    "fedper": ("fedavg", {"fedper__personal_layers": 0}, {}),
    "fedgen": ("lg-fedavg", {"fedgen__lambda": 0.0}, {}),
    "fesem": ("fedavg", {"fesem__centres": 1}, {}),
    "feddistill": ("local", {"feddistill__gamma": 0.0}, {}),
    "fedfa": ("fedavg", {"fedfa__probability": 0.0}, {}),
    "fml": ("local", {"fml__alpha": 1.0, "fml__beta": 1.0}, {}),
    "lg-fedavg": ("local", {}, HEADS),
    "fedgh": ("local", {}, HEADS),
    "fedrep": ("fedper", {}, HEADS | {"head": "orthogonal-frozen"}),
}
"""Algorithm -> (the simpler one, the settings that make it that, settings of both)."""
MODELS = []
"""Algorithm -> models with batch normalisation, and with layers for the fused step.

The latter are of several architectures where that is possible.
"""
for _algo in IDENTITIES:
    _fused = "htcnn-3" if CATALOG[_algo].exchange.needs_one_architecture else "small3"
    MODELS += [(_algo, "resnet4-imagenet-stem"), (_algo, _fused)]
SMALL = {"train_samples": 45, "test_samples": 30}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function (algorithm, models, further settings) -> a small run, each made once."""

    def once(algo, models, **settings):
        folder = tmp_path_factory.mktemp("run")
        return federate(folder, CLIENTS, algo=algo, models=models, **SMALL, **settings)

    return cache(once)


@pytest.mark.parametrize(("algo", "models"), MODELS)
def test_an_algorithm_without_its_own_term_is_the_simpler_one(algo, models, run):
    """`IDENTITIES` names the simpler algorithm: metrics and models are the same to the last bit."""
    simpler, switched_off, of_both = IDENTITIES[algo]
    found = run(algo, models, **switched_off | of_both)
    wanted = run(simpler, models, **of_both)

    if of_both:  # heads do not train, so a server that trains them has no figures
        assert "server" not in found.rows[0]
    assert metrics(found) == metrics(wanted)
    assert_same_models(models_left(found), models_left(wanted))
