"""FeSEM, three rounds.

The best first division of four clients by trying all, later the nearest centre.
"""

import itertools

import numpy as np
import pytest
import torch
from flwr.app import MessageType

from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.protections.changes import cut_changes
from server_app.run.replies import Upload
from server_app.strategies.base import StateDict
from tests.support import plain
from tests.support.declaration import Declared
from tests.support.fakes import server_of
from tests.support.harness import Outcome, run_config, run_federation

DECLARED = Declared(weights=True, acts={"centres": 1})

SITES = 4
K = 2
"""Centres."""
Division = list[list[int]]
"""Of each centre the clients, by their numbers."""


def vector(weights: plain.State) -> np.ndarray:
    """Return all weights of a model as one vector, in float64."""
    return np.concatenate([value.numpy().astype(np.float64).ravel() for value in weights.values()])


def best_division(models: list[plain.State]) -> Division:
    """Try all divisions into K groups; return the one with the least squares around their means.

    K-means seeks the same one.
    """
    points = [vector(one) for one in models]

    def spread(groups: Division) -> float:
        """Return the sum of the squared distances of the points to the centres of their groups."""
        squares = 0.0
        for group in groups:
            members = np.stack([points[i] for i in group])
            squares += ((members - members.mean(axis=0)) ** 2).sum()
        return squares

    divisions = []
    for labels in itertools.product(range(K), repeat=len(models)):
        groups = [[i for i, label in enumerate(labels) if label == k] for k in range(K)]
        if all(groups):
            divisions.append(groups)
    return min(divisions, key=spread)


def nearest(models: list[plain.State], centres: list[plain.State]) -> Division:
    """Return for each centre the models that are nearest to it."""
    groups: Division = [[] for _ in centres]
    for i, model in enumerate(models):
        squares = [((vector(model) - vector(centre)) ** 2).sum() for centre in centres]
        groups[int(np.argmin(squares))].append(i)
    return groups


def received(outcome: Outcome, kind: str, number: int) -> dict[int, plain.State]:
    """Return for each client the weights that a round's messages of this kind sent it."""
    weights = {}
    for message, _ in outcome.exchanged(kind, number):
        node = outcome.grid.nodes[message.metadata.dst_node_id]
        weights[node["partition-id"]] = plain.tensors(message.content.array_records["weights"])
    return weights


def centres_left(outcome: Outcome, number: int) -> list[plain.State]:
    """Return the centres that the run has left; their names are 0/…, 1/…"""
    centres: list[plain.State] = [{} for _ in range(number)]
    for name, value in plain.weights_left(outcome).items():
        k, _, parameter = name.partition("/")
        centres[int(k)][parameter] = value
    return centres


@pytest.mark.parametrize("domains", ["2,2,0,0,0", "3,1,0,0,0"])
def test_three_rounds_equal_an_independent_script(domains, tmp_path):
    """What each client is sent, its model and the centres are the script's."""
    settings = {
        "rounds": 3,
        "fesem__centres": K,
        "clients_per_domain": domains,
        "test_samples": 20,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, plain.SharingClient, "htcnn-1", SITES, algo="fesem", **settings
    )

    centres = [plain.copied(clients[0].model)] * K
    centre_of = [0] * SITES
    for number in (1, 2, 3):
        for index, weights in received(outcome, MessageType.TRAIN, number).items():
            plain.assert_close(weights, centres[centre_of[index]])

        models = [client.train(number, centres[centre_of[i]]) for i, client in enumerate(clients)]
        groups = best_division(models) if number == 1 else nearest(models, centres)

        for k, group in enumerate(groups):
            if group:
                members = [clients[i] for i in group]
                centres[k] = plain.mean_by_samples(members, [models[i] for i in group])
            for i in group:
                centre_of[i] = k
    assert len(set(centre_of)) == K

    at_the_end = received(outcome, MessageType.EVALUATE, 3)
    for index, client in enumerate(clients):
        centre = centres[centre_of[index]]
        plain.assert_close(at_the_end[index], centre)
        plain.assert_models_left(outcome, [client], centre)

    found = centres_left(outcome, K)
    if not torch.allclose(found[0]["head.weight"], centres[0]["head.weight"], atol=1e-5):
        found.reverse()  # K-means may number them otherwise
    for found_centre, centre in zip(found, centres, strict=True):
        plain.assert_close(found_centre, centre)


def uploads(sites: list[str], models: list[StateDict]) -> list[Upload]:
    """Return what sites send that have trained these models on 10 samples each."""
    pairs = zip(sites, models, strict=True)
    return [Upload(site, Payload(weights=model), Report(1, 10, 5)) for site, model in pairs]


def test_a_liar_is_bounded_in_a_cluster_of_two_and_changes_no_whole_numbers():
    """Three of five sites have the centre at 0, two that at 10; each moves by 0.1, the liar to 99.

    A change is cut to twice the median length, so that the liar moves by 0.2.
    """
    server = server_of("fesem", fesem__centres=K, liars=1)
    sites = [f"site-{i}" for i in range(5)]

    def at(place, index=7):
        return server.weights | {
            "head.bias": torch.tensor([place, 0.0]),
            "body.index": torch.tensor([index]),
        }

    server.centres = {"0": at(0), "1": at(10)}
    server.cluster_of = {site: torch.tensor(int(site > "site-2")) for site in sites}
    places = [at(0.1), at(0.1), at(0.1), at(10.1), at(99, index=1000)]

    accepted = cut_changes(uploads(sites, places), server)
    server.merge(accepted.kept)

    assert float(server.centres["1"]["head.bias"][0]) == pytest.approx(10 + (0.1 + 0.2) / 2)
    assert {int(centre["body.index"]) for centre in server.centres.values()} == {7}
    assert len(accepted.reduced) == 1


def test_later_rounds_ask_for_the_nearest_centre_and_not_for_new_clusters():
    """Each client goes to the nearest of the centres 0 and 10, which the first round has left.

    So of models at 0, 4, 4.5 and 5.5 the last is alone. K-means anew would leave the first alone.
    """
    server = server_of("fesem", fesem__centres=K)
    first = server.weights
    sites = [f"site-{i}" for i in range(SITES)]

    def merge(*places):
        """Send models at these places on a line; return the clients of each cluster."""
        moved = [first | {"head.bias": torch.tensor([place, 0.0])} for place in places]
        server.merge(uploads(sites, moved))
        return sorted([[s for s in sites if int(server.cluster_of[s]) == k] for k in range(K)])

    assert merge(-1, 1, 9, 11) == [["site-0", "site-1"], ["site-2", "site-3"]]
    assert merge(0, 4, 4.5, 5.5) == [["site-0", "site-1", "site-2"], ["site-3"]]

    biases = sorted(float(server.centres[str(k)]["head.bias"][0]) for k in range(K))
    assert biases == pytest.approx([(0 + 4 + 4.5) / 3, 5.5])


def test_more_centres_than_clients_and_clients_that_were_never_asked(tmp_path):
    """A centre without a client stays the first model.

    A client that has not trained is sent the first centre.
    """
    config = run_config(
        tmp_path, algo="fesem", models="htcnn-1", rounds=1, fesem__centres=5, participation=0.5
    )
    outcome = run_federation(config | {"test-samples": 20}, clients=SITES)

    centres = centres_left(outcome, 5)
    first = received(outcome, MessageType.TRAIN, 1)
    assert len(first) == 2  # half of the clients, which get a centre each of the five
    for k in (2, 3, 4):
        plain.assert_close(centres[k], next(iter(first.values())))

    for site, weights in received(outcome, MessageType.EVALUATE, 1).items():
        own = centres[:2] if site in first else centres[:1]
        assert any(torch.equal(weights["head.bias"], centre["head.bias"]) for centre in own)
