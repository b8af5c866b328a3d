"""Accuracy against ε where persons have several images: noise for an image, and for a person.

    python -m tests.bench.noise_of_persons --data-dir FOLDER [--seeds 1 2 3]

Four sites with Gaussian heads behind one embedded backbone (glyphs), under secure aggregation, one
exchange. A person is one image of MNIST and four more views of it: shifted by up to 3 pixels, with
noise. ``--data-dir`` holds MNIST/raw. Tests are 2,000 images of other persons, as they are, with
the model that the run leaves.

The data of the rows "a sample" and "five images" have no column ``client``. All five images of a
person count there, and ε is of one of them. Five images that pull in one direction shift a sum five
times as far, so what a person really has is the ε of a fifth of the noise, which stands in
brackets. In the row "five images" the noise is so large that *this* ε is the column's: a site could
choose it if it knew that nobody has more than five.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torchvision.datasets import MNIST

from protofl_common.models.trained import TrainedModel
from protofl_common.privacy.plan import Mechanism, epsilon, least_noise
from tests.bench.printing import markdown, of_seeds, parser_of
from tests.bench.shared_noise import COMMON, SITES, hits
from tests.support.harness import CACHE, client_of, run_config, run_federation

PERSONS = 200  # at a site
IMAGES = 5  # of each
TESTED = 2000
EPSILONS = (1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
CLASSES = ",".join(str(digit) for digit in range(10))
Images = np.ndarray[Any, Any]


def views(image: Images, draw: np.random.Generator) -> list[Images]:
    """Return the image of a person, and four more views of it."""
    images = [image]
    for _ in range(IMAGES - 1):
        shift = tuple(draw.integers(-3, 4, size=2))
        noisy = np.roll(image, shift, axis=(0, 1)) + draw.normal(scale=25, size=image.shape)
        images.append(noisy.clip(0, 255).astype(np.uint8))
    return images


def write_site(folder: Path, site: int, data_dir: str, seed: int, names_persons: bool) -> None:
    """Write the images of one site's persons, and beside them a part of the test images.

    ``names_persons``: the file has a column ``client``, which says whose an image is.
    """
    draw = np.random.default_rng([seed, site])
    people = MNIST(data_dir, train=True)
    chosen = np.random.default_rng(seed).permutation(len(people))[site::SITES][:PERSONS]
    inputs = []
    for row in chosen:
        inputs += views(people.data[row].numpy(), draw)
    owners = [f"person {row}" for row in chosen for _ in range(IMAGES)]

    others = MNIST(data_dir, train=False)
    tested = np.arange(site, TESTED, SITES)
    inputs += [others.data[row].numpy() for row in tested]
    owners += [f"tested {row}" for row in tested]
    labels = [*people.targets[chosen].repeat_interleave(IMAGES), *others.targets[tested]]
    arrays = {
        "inputs": np.stack(inputs)[:, None],
        "labels": np.array([str(int(label)) for label in labels]),
        "split": np.array(["train"] * PERSONS * IMAGES + ["test"] * len(tested)),
    }
    if names_persons:
        arrays["client"] = np.array(owners)
    np.savez(folder / f"site-{site}.npz", **arrays)


def exact_accuracy(settings: dict[str, Any], data_dir: str, seed: int) -> float:
    """Run once, and test the head that the run leaves on the test images of all sites."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        nodes: dict[int, dict[str, Any]] = {}
        for site in range(SITES):
            write_site(folder, site, data_dir, seed, settings["dp"] == "person")
            nodes[site + 1] = {
                "site-name": f"site-{site}",
                "dataset": "arrays",
                "classes": CLASSES,
                "data-dir": str(folder / f"site-{site}.npz"),
                "test-from": "official-own",
                "state-dir": str(folder / f"state-{site}"),
                "approve": False,
                **CACHE,
            }
        own = {"dataset": "arrays", "partition": "own", "num_clients": SITES, "seed": seed}
        config = run_config(folder, **COMMON | own | settings)
        run_federation(config, nodes=nodes)
        (left,) = (folder / "state-0").glob("*/clients/site-0/model.safetensors")
        model = TrainedModel.read(left).build().double()
        parts = [client_of(config, **node).test_set for node in nodes.values()]
        return sum(int(hits(model, part).sum()) for part in parts) / TESTED


def of_a_person(sample_epsilon: float) -> float:
    """Return ε of a person with `IMAGES` images, where ε of one of them is ``sample_epsilon``.

    Nothing in the run is sampled (q = 1), so it costs as much as one sum with some noise σ; all
    images of a person together are protected by σ / `IMAGES` only.
    """
    noise = least_noise(lambda noise: [Mechanism(1.0, noise, 1)], DELTA, sample_epsilon, "ε")
    return epsilon([Mechanism(1.0, noise / IMAGES, 1)], DELTA)


def of_a_sample(person_epsilon: float) -> float:
    """Return which ε of one image gives a person with `IMAGES` images ``person_epsilon``."""
    noise = least_noise(lambda noise: [Mechanism(1.0, noise, 1)], DELTA, person_epsilon, "ε")
    return epsilon([Mechanism(1.0, noise * IMAGES, 1)], DELTA)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()

    def cell(dp: str, **more: float) -> str:
        found = []
        for seed in arguments.seeds:
            found.append(100 * exact_accuracy({"dp": dp, **more}, arguments.data_dir, seed))
        return of_seeds(found)

    print(f"none: {cell('none')}", flush=True)
    persons = ["a person"]
    five_images = ["five images"]
    samples = ["a sample (ε of a person)"]
    for wanted in EPSILONS:
        persons.append(cell("person", dp_epsilon=wanted))
        five_images.append(cell("sample", dp_epsilon=of_a_sample(wanted)))
        of_one = cell("sample", dp_epsilon=wanted)
        samples.append(f"{of_one} ({of_a_person(wanted):.1f})")
    heads = ["noise for", *(f"ε = {wanted:g}" for wanted in EPSILONS)]
    print(markdown(heads, [persons, five_images, samples]))


if __name__ == "__main__":
    main()
