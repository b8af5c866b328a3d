"""FedDAP (Le et al., CVPR 2026), server half: FedAvg, and a prototype per class and domain.

Other half: `client_app/algorithms/feddap.py`.
Symbols: p_i client i's prototype of a class, of the N clients of one domain that have the class;
T = ``fusion-temperature``.

Models              as FedAvg
Prototypes          g^{y,d} = Σ_i a_i p_i,   a = softmax_i( Σ_j cos(p_i, p_j) / T )
To a client         the g^{y,d} of its own domain, and those of all others

A client's domain is the one that its introduction names; clients of none, or of several, are a
domain of their own. Where a domain has one client, the others receive that client's prototypes.
``merging`` may put a median or trimmed mean in the place of FedAvg's mean, and leave out the p_i of
the clients least like the others.

Deviations: the authors' code averages models without regard to samples. A class that nobody sent in
a round retains its prototypes.
"""

from urllib.parse import quote

from protofl_common.algorithms.feddap import FedDAPHparams
from protofl_common.maths.aggregation import fuse_by_similarity
from server_app.strategies.base import Federation, Payload, Prototypes, Upload, vectors_of
from server_app.strategies.fedavg import FedAvg


class FedDAP(FedAvg[FedDAPHparams]):
    """Keeps the global model, and the prototypes of each domain, which `prototypes` joins."""

    state = ("weights", "prototypes", "of_domains")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.of_domains: dict[str, Prototypes] = {}

    def domain_of(self, site: str) -> str:
        """Return a site's domain, quoted: a slash would nest names in a checkpoint."""
        return quote(self.federation.cards[site].domain, safe="")

    def payload_down(self) -> Payload:
        return Payload(weights=self.weights)

    def payload_for(self, site: str, common: Payload) -> Payload:
        """Return the weights, the prototypes of the site's domain, and those of all others."""
        domain_of_site = self.domain_of(site)
        others = [sent for domain, sent in self.of_domains.items() if domain != domain_of_site]
        return Payload(
            weights=common.weights(),
            prototypes=self.of_domains.get(domain_of_site),
            others=Prototypes.joined(others) if others else None,
        )

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Average the weights, and fuse the prototypes within each domain by similarity.

        A class that nobody of a domain sent retains its prototype there.
        """
        super().merge(uploads)
        sent_in: dict[str, list[Prototypes]] = {}  # Domain -> the set of each of its clients
        for site, prototypes in vectors_of(uploads).items():
            if len(prototypes):  # ``merging`` may have left out all
                sent_in.setdefault(self.domain_of(site), []).append(prototypes)

        merged = dict(self.of_domains)
        for domain, sent in sent_in.items():
            fused = fuse_by_similarity(sent, self.hparams.fusion_temperature)
            if domain in merged:
                fused = fused.completed_by(merged[domain])
            merged[domain] = fused
        # sorted as in a checkpoint, so that a resumed run joins them in the same order
        self.of_domains = {domain: merged[domain] for domain in sorted(merged)}
        if merged:
            self.prototypes = Prototypes.joined(self.of_domains.values())
        return {"domains": float(len(merged))}
