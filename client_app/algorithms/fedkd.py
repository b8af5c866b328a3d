"""FedKD (Wu et al., Nature Communications 2022), client half: a private teacher and a shared student, updates by SVD.

Other half: `server_app/strategies/fedkd.py`.
Symbols: t the teacher, which is the private model, s the student; y_t, y_s their class probabilities, H_t, H_s their
features, W^h a private matrix [D, D]; L^t_t, L^t_s their cross-entropies; A a weight's update; T the energy.

Teacher             L_t = L^t_t + KL(y_s ‖ y_t) / (L^t_t + L^t_s) + MSE(H_t, W^h H_s) / (L^t_t + L^t_s)
Student             L_s = L^t_s + KL(y_t ‖ y_s) / (L^t_t + L^t_s) + MSE(H_t, W^h H_s) / (L^t_t + L^t_s)
Each model descends on its own loss, with what the other says as fixed; W^h on both. Inference: the teacher.
Upload              A = U Σ Vᵀ cut to the smallest K with Σ_{i≤K} σ_i² ≥ T · Σ_i σ_i²
Energy              T = T_start + (T_end − T_start) · round / rounds

Down: the update of the student, to a client that lacks what it changes the student itself. Up: the update. Stays: the
teacher, of any architecture, W^h, and the student as it was received.

Deviations: an update is the change over a round of local training, as in the authors' code, where the text has the
gradient of a batch. H is the last features; attention maps, for Transformers only, are not matched. UΣ travels as one
factor, a convolution is a matrix [out, in·k·k], and what would not get smaller goes as it is. HtFLlib compresses the
weights instead of their updates. Their code lets each term move both models, and takes KL's mean over classes.
"""

from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from client_app.algorithms.base import Batch, Client, ClientAlgorithm, LossTerms, Payload, StateDict
from client_app.state import StateError
from protofl_common.basics.devices import seeded
from protofl_common.experiment.catalog import FedKDHparams
from protofl_common.maths.losses import adaptive, divergence
from protofl_common.maths.low_rank import applied, change, compressed


class FedKD(ClientAlgorithm[FedKDHparams]):
    """Teacher, student and W^h, with one optimizer; ``received`` is the student of the round's start."""

    state: tuple[str, ...] = ("model", "projection", "received")
    trains: tuple[str, ...] = ("model", "student", "projection")

    def __init__(self, client: Client, round_number: int) -> None:
        super().__init__(client, round_number)
        self.student = client.new_model(self.settings.architecture(0, self.hparams.student), "global")
        self.trained = {name for name, _ in self.student.named_parameters()}
        self.received: StateDict = {}
        with seeded(client.seed_for("fedkd")):
            self.projection = nn.Linear(*(self.settings.model.feature_dim,) * 2, bias=False)
        self.projection.to(client.device)

    def receive(self, payload: Payload) -> None:
        weights, update = payload.weights(), payload.weights("update")
        if weights is not None:
            self.received = {name: value.to(self.client.device) for name, value in weights.items()}
        elif update is not None and self.received:
            update = {name: value.to(self.client.device) for name, value in update.items()}
            self.received = applied(self.received, update, self.trained)
        elif update is not None:
            raise StateError(f"{self.client.name} is sent an update of the student, and has lost the student itself")
        if self.received:
            self.student.load_state_dict(self.received)

    def loss(self, batch: Batch) -> LossTerms:
        self.student.train(self.client.train_set.unlabelled is None or len(batch.labels) > 1)  # for batch normalisation
        hidden_BD = self.student.body(batch.inputs)
        student_BC = self.student.head(hidden_BD)
        own, other = cross_entropy(batch.logits, batch.labels), cross_entropy(student_BC, batch.labels)
        distance = mse_loss(batch.features, self.projection(hidden_BD.detach()))
        student_distance = mse_loss(batch.features.detach(), self.projection(hidden_BD))
        return {
            "cross-entropy": own,
            "mutual": adaptive(divergence(batch.logits, student_BC.detach()), own, other),
            "hidden": adaptive(distance, own, other),
            "student-cross-entropy": other,
            "student-mutual": adaptive(divergence(student_BC, batch.logits.detach()), other, own),
            "student-hidden": adaptive(student_distance, other, own),
        }

    def upload(self) -> Payload:
        energy = self.hparams.energy(self.round, self.settings.run.rounds)
        update = self.privacy.post_processed(change, self.weights(), self.received, self.trained)
        return Payload(weights=self.privacy.post_processed(compressed, update, energy))
