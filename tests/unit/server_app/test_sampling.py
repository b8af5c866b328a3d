"""Seeded sampling, independent of node ids and of the order in which sites connected."""

from collections import Counter

from server_app.network.admission import sample_sites

SITES = [f"site-{i}" for i in range(20)]


def test_seed_and_round_alone_choose_the_sites_whatever_their_order() -> None:
    assert sample_sites(reversed(SITES), 1.0, 42, 1) == SITES
    assert sample_sites(SITES, 0.3, 42, 5) == sample_sites(reversed(SITES), 0.3, 42, 5)
    assert len({tuple(sample_sites(SITES, 0.3, seed, number)) for seed in (1, 2) for number in range(1, 6)}) == 10
    assert len(sample_sites(SITES, 0.3, 0, 1)) == 6
    assert len(sample_sites(SITES, 0.001, 0, 1)) == 1
    assert sample_sites(["only"], 0.5, 0, 1) == ["only"]


def test_every_site_is_chosen_about_equally_often() -> None:
    counts = Counter(site for number in range(1000) for site in sample_sites(SITES, 0.25, 0, number))
    assert min(counts.values()) > 200
    assert max(counts.values()) < 300
