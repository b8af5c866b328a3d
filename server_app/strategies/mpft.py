"""MPFT (Zhang et al., ICLR 2025), server half: adapter and classifier, trained on the clients' centres.

Other half: `client_app/algorithms/mpft.py`.
Symbols: r_p a centre with its class y_p; g∘h classifier and adapter.

Training            min Σ_p CE(g(h(r_p)), y_p) by AdamW, S = ``server-epochs`` epochs in shuffled minibatches

A client's centres count until it sends others, so one round is enough, and who joins later adds to it. Of n samples, as
far as these are let count, ρ · n and one more for each class are taken: the number of centres weighs a client.
"""

import torch

from protofl_common.experiment.catalog import MPFTHparams
from protofl_common.models.build import initial_model
from server_app.strategies.base import Federation, Payload, Prototypes, ServerStrategy, StateDict, Upload, vectors_of
from server_app.training import classified_by, server_device, train


class MPFT(ServerStrategy[MPFTHparams]):
    """Keeps the model and every client's centres; before the first training there is nothing to send."""

    state: tuple[str, ...] = ("model", "generator", "centres")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        card, settings, seed = self.card, self.settings, self.settings.run.seed
        self.model = initial_model(card.arch, card.input_shape, self.num_classes, settings.model, seed, "global")
        self.model.to(server_device(settings.machine))
        self.generator = torch.Generator().manual_seed(self.seed)
        self.centres: dict[str, Prototypes] = {}

    def payload_down(self) -> Payload:
        return Payload(weights=self.global_weights if self.centres else None)

    @property
    def global_weights(self) -> StateDict:
        return {name: value.cpu() for name, value in self.model.state_dict().items()}

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        sent, rho, cards = vectors_of(uploads), self.hparams.sample_ratio, self.federation.cards
        most = {of.site: round(rho * of.train_samples + len(cards[of.site].present), 6) for of in uploads}
        self.centres |= {site: each.thinned(most[site]) for site, each in sent.items()}
        above = [site for site, each in sent.items() if len(each) > most[site]]
        self.reduced |= {f"{site}: more centres than its samples have; {most[site]:g} count" for site in above}
        centres = Prototypes.joined(self.centres[site] for site in sorted(self.centres))
        cuda = next(self.model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.hparams.server_lr, capturable=cuda)
        self.model.train()
        loss, vectors = classified_by(self.model), (centres.means, centres.labels)
        mean = train(loss, vectors, optimizer, self.hparams, self.generator, fewest=2)  # for batch normalisation
        self.model.eval()
        return {"server-loss": mean, "centres": float(len(centres))}
