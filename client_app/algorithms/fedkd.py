"""FedKD, client half: a private teacher and a shared student, whose updates travel cut by SVD.

Source: Wu et al., Nature Communications 2022.
Other half: `server_app/strategies/fedkd.py`.
Symbols: t the teacher, which is the private model, s the student; y_t, y_s their class
probabilities, H_t, H_s their features, W^h a private matrix [D, D]; L^t_t, L^t_s their
cross-entropies; A a weight's update; T the energy.

Teacher             L_t = L^t_t + KL(y_s ‖ y_t) / (L^t_t + L^t_s)
                              + MSE(H_t, W^h H_s) / (L^t_t + L^t_s)
Student             L_s = L^t_s + KL(y_t ‖ y_s) / (L^t_t + L^t_s)
                              + MSE(H_t, W^h H_s) / (L^t_t + L^t_s)
Each model descends on its own loss, with what the other says as fixed; W^h on both.
Inference           the teacher
Upload              A = U Σ Vᵀ cut to the smallest K with Σ_{i≤K} σ_i² ≥ T · Σ_i σ_i²
Energy              T = T_start + (T_end − T_start) · round / rounds

Down: the update of the student, to a client that lacks what it changes the student itself. Up: the
update. Stays: the teacher, of any architecture, W^h, and the student as it was received.

Deviations: an update is the change over a round of local training, as in the authors' code, where
the text has the gradient of a batch. H is the last features; attention maps, for Transformers only,
are not matched. UΣ travels as one factor, a convolution is a matrix [out, in·k·k], and what would
not get smaller goes as it is. HtFLlib compresses the weights instead of their updates. Their code
lets each term move both models, and takes KL's mean over classes.
"""

from torch import nn
from torch.nn.functional import mse_loss

from client_app.algorithms.base import (
    Batch,
    ClientAlgorithm,
    ClientView,
    LossTerms,
    Payload,
    StateDict,
)
from client_app.site.record import StateError
from protofl_common.algorithms.fedkd import FedKDHparams
from protofl_common.maths.losses import adaptive_distillation, divergence
from protofl_common.maths.low_rank import apply_change, change_of, compress
from protofl_common.models.devices import seeded


class FedKD(ClientAlgorithm[FedKDHparams]):
    """Teacher, student and W^h, with one optimizer.

    ``received`` is the student of the round's start.
    """

    state: tuple[str, ...] = ("model", "projection", "received")
    trains: tuple[str, ...] = ("model", "student", "projection")

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        arch = self.settings.architecture(0, self.hparams.student)  # the same for all clients
        self.student = client.new_model(arch, "global")
        self.trained = {name for name, _ in self.student.named_parameters()}  # all but buffers
        self.received: StateDict = {}
        dim = self.settings.model.feature_dim
        with seeded(client.seed_for("fedkd")):
            self.projection = nn.Linear(dim, dim, bias=False)
        self.projection.to(client.device)

    def receive(self, payload: Payload) -> None:
        """Take over the student that the server sent, or apply the update to the student here.

        StateError for an update where this client has lost its student.
        """
        device = self.client.device
        weights = payload.weights()
        update = payload.weights("update")
        if weights is not None:
            self.received = {name: value.to(device) for name, value in weights.items()}
        elif update is not None:
            if not self.received:
                raise StateError(
                    f"{self.client.name} is sent an update of the student, "
                    "and has lost the student itself"
                )
            update = {name: value.to(device) for name, value in update.items()}
            self.received = apply_change(self.received, update, self.trained)

        if self.received:
            self.student.load_state_dict(self.received)

    def loss(self, batch: Batch) -> LossTerms:
        """Return the three terms of the teacher's loss and the three of the student's."""
        # one labelled sample among unlabelled ones: batch normalisation cannot train on it alone
        self.student.train(self.client.train_set.unlabelled is None or len(batch.labels) > 1)
        teacher_BC = batch.logits
        student_BD = self.student.body(batch.inputs)
        student_BC = self.student.head(student_BD)
        teacher_loss = self.task.loss(teacher_BC, batch.labels)
        student_loss = self.task.loss(student_BC, batch.labels)

        # `detach` makes the other model's outputs fixed targets; W^h is trained by both distances
        teacher_distance = mse_loss(batch.features, self.projection(student_BD.detach()))
        student_distance = mse_loss(batch.features.detach(), self.projection(student_BD))
        return {
            "cross-entropy": teacher_loss,
            "mutual": adaptive_distillation(
                divergence(teacher_BC, student_BC.detach()), teacher_loss, student_loss
            ),
            "hidden": adaptive_distillation(teacher_distance, teacher_loss, student_loss),
            "student-cross-entropy": student_loss,
            "student-mutual": adaptive_distillation(
                divergence(student_BC, teacher_BC.detach()), student_loss, teacher_loss
            ),
            "student-hidden": adaptive_distillation(student_distance, student_loss, teacher_loss),
        }

    def upload(self) -> Payload:
        """Return the student's change in this round, cut by SVD to the round's energy."""
        energy = self.hparams.energy(self.round, self.settings.run.rounds)
        update = self.privacy.post_processed(change_of, self.weights(), self.received, self.trained)
        return Payload(weights=self.privacy.post_processed(compress, update, energy))
