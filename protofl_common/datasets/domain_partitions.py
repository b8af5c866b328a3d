"""Partitions that give each client one domain: ``feature-shift``, ``feature-label-shift``."""

from __future__ import annotations

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.pool import Pool, Shares
from protofl_common.datasets.raw import DataError
from protofl_common.datasets.shares import Generator, by_class, dealt_evenly


def feature_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """One domain per client; a domain is divided evenly, class by class, among its clients.

    Client i has domain i mod n, or the domains' numbers of clients are those of ``clients-per-domain``.

    Raises
    ------
    DataError
        When ``clients-per-domain`` does not fit the domains and the number of clients, or a domain has fewer
        samples than clients.
    """
    domains = np.array(_domain_of_clients(settings, pool.domain_names, clients))
    shares = [np.empty(0, dtype=np.int64)] * clients
    for domain in np.unique(domains):
        members = np.flatnonzero(domains == domain)
        positions = np.flatnonzero(pool.domains == domain)
        if len(positions) < len(members):
            raise DataError(
                f"partition = {settings.partition!r}: domain {pool.domain_names[domain]!r} has {len(positions)} "
                f"samples for {len(members)} clients; use fewer clients, or a larger total-samples"
            )
        for client, share in zip(members, dealt_evenly(pool.labels[positions], len(members), rng), strict=True):
            shares[client] = positions[share]
    return shares


def feature_label_shift(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """One domain per client as in `feature_shift`; within it, class c is thinned out to p_c / max p, p ~ Dir(alpha).

    So the client's most frequent class keeps all its samples, and the samples thinned out are used by nobody. Where
    only one would be left, the client gets two, of its most frequent classes.
    """
    shares = []
    for share in feature_shift(pool, settings, clients, rng):
        decks = by_class(pool.labels[share], rng)
        wanted = rng.dirichlet(np.full(len(decks), settings.alpha))
        parts = [deck[: round(len(deck) * part)] for deck, part in zip(decks, wanted / wanted.max(), strict=True)]
        kept = np.concatenate(parts)
        if len(kept) < 2:
            kept = np.concatenate([decks[index] for index in np.argsort(-wanted, kind="stable")])[:2]
        shares.append(share[kept])
    return shares


def parse_clients_per_domain(text: str) -> list[int]:
    """``"1,4,2,2,1"`` -> the number of clients of each domain; empty for ``""``.

    Raises
    ------
    DataError
        When it is anything else than whole numbers of at least 0, separated by commas.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise DataError(f"clients-per-domain = {text!r}: must be numbers separated by commas, such as '1,4,2,2,1'")
    return [int(part) for part in parts]


def _domain_of_clients(settings: DataSettings, domain_names: tuple[str, ...], clients: int) -> list[int]:
    """The domain of each client."""
    text = settings.clients_per_domain
    counts = parse_clients_per_domain(text)
    if not counts:
        return [client % len(domain_names) for client in range(clients)]
    if len(counts) != len(domain_names):
        raise DataError(
            f"clients-per-domain = {text!r} names {len(counts)} domains; the data have {len(domain_names)}: "
            f"{', '.join(domain_names)}"
        )
    if sum(counts) != clients:
        raise DataError(f"clients-per-domain = {text!r} sums to {sum(counts)} clients, but num-partitions is {clients}")
    return [domain for domain, count in enumerate(counts) for _ in range(count)]
