"""The job in pfl-research 0.6: one process, as its own simulation does it without horovod."""

import torch
from job import Clock, Network, arguments  # type: ignore[import-not-found]
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.metrics import Metrics  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

job, data, _ = arguments()
clock, network = Clock(), Network()


class Ticks(TrainingProcessCallback):  # type: ignore[misc]
    def after_central_iteration(
        self, *_: object, central_iteration: int, **__: object
    ) -> tuple[bool, Metrics]:
        clock.tick()
        return False, Metrics()


users = FederatedDataset(
    lambda user: Dataset(raw_data=list(data.of(user)), user_id=str(user)),
    get_user_sampler("minimize_reuse", list(range(job.users))),
)
model = PyTorchModel(
    model=network,
    local_optimizer_create=torch.optim.SGD,
    central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
)
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(job.rounds, job.rounds + 1, job.asked, None),
    backend=SimulatedBackend(training_data=users, val_data=None),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch
    ),
    callbacks=[Ticks()],
)
clock.report(network.accuracy(data))
