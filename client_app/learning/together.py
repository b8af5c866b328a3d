"""Several simulated clients of one process at once: their trainings become one of stacked weights.

Each client is a `Visit`, with a thread of its own, of which only one runs at a time. It runs until
it wants to train. Once all clients of a cohort have come so far, those whose trainings are alike
train together: the gradients of all come from one call of ``torch.func``, over weights [K, …] of K
clients. So the calls of PyTorch are as many as for one client; with small networks and batches they
are what takes the time.

Clients are independent of one another: each has its own weights, optimizer state, batches and seed,
and sees its batches in the order in which it would see them alone. So the result is the same up to
the rounding of floats. What cannot be stacked (`reason_alone`) trains alone, as ever.

Symbols: K clients, k of whom take a step, B samples of each in it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from client_app.learning import training
from client_app.learning.data import Samples
from client_app.learning.training import FusedStep, LossTerms, Step, rows_of_batches
from protofl_common.config.sections import TrainingSettings
from protofl_common.models.devices import seed_torch
from protofl_common.models.split import HiddenHead, LinearHead, SplitModel

R = TypeVar("R")
Method = TypeVar("Method", bound=Callable[..., LossTerms])
LAYERS = (nn.Linear, LinearHead, HiddenHead, nn.ReLU, nn.Flatten, nn.Identity, nn.BatchNorm1d)
"""What networks are made of whose steps take less time together; convolutions take more."""
CONTAINERS = (SplitModel, nn.Sequential)
ONE_BY_ONE = "clients-at-once: clients train one after another, as "


def reads_only(*names: str) -> Callable[[Method], Method]:
    """Mark a loss that reads nothing of its half but these attributes, and changes nothing.

    Hyper-parameters and the task are the same for all clients; it may read them without a name.
    Clients who have the same attributes of these names can share one call of the loss.
    """

    def mark(method: Method) -> Method:
        method.reads = names  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True, eq=False)
class Training:
    """What `training.train` is called with."""

    step: Step
    data: Samples
    settings: TrainingSettings
    seed: int
    checks: bool

    def alone(self) -> dict[str, float]:
        return training.train(self.step, self.data, self.settings, self.seed, self.checks)

    @property
    def half(self) -> Any:
        """The client's half, of which the loss is a method; None for another kind of loss."""
        return getattr(self.step.loss, "__self__", None)


def reason_alone(each: Training) -> str:
    """Say why this training cannot be one of several at once; "" if it can."""
    step = each.step
    if type(step) not in (Step, FusedStep) or step.correction or step.gradient_sums:
        return "the method, or a protection, has steps of its own"
    if not hasattr(step.loss, "reads"):
        return "the method's loss depends on the single client"
    if len(step.modules) > 1:
        return "the method trains several modules"
    if not isinstance(each.data.inputs, Tensor) or each.data.augment:
        return "inputs are read or changed batch by batch"
    for part in step.model.modules():
        kind = type(part)
        if kind in CONTAINERS:
            continue
        if kind not in LAYERS or getattr(part, "dropout", False) or part._forward_hooks:
            return f"the network has a {kind.__name__}"
    if not each.checks or not len(each.data):
        return "a client has no samples"
    return ""


def train(each: Training) -> dict[str, float]:
    """Train, together with other clients if this one is visited with others.

    Returns the mean of each loss term.
    """
    visit = _VISIT.get()
    if visit is None:
        return each.alone()
    reason = reason_alone(each)
    if reason:
        visit.say(f"{ONE_BY_ONE}{reason}")
        return each.alone()
    losses = visit.wait_for_others(each)
    if losses is None:
        return each.alone()
    seed_torch(each.seed)  # as alone: no step has drawn from it
    return losses


# -- visits
class _AbandonedError(BaseException):
    """The cohort is given up, as after Ctrl-C."""


class Visit(Thread, Generic[R]):
    """One client's work, which stops where it wants to train."""

    def __init__(self, work: Callable[[], R], say: Callable[[str], object]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.say = say
        self.waits_to_train: Training | None = None
        self.losses: dict[str, float] | None = None  # of the training that it waited for
        self.result: R
        self.error: BaseException | None = None
        self.is_abandoned = False
        self._may_go_on = Semaphore(0)
        self._has_stopped = Semaphore(0)

    def run(self) -> None:
        self._may_go_on.acquire()
        _VISIT.set(self)
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        self._has_stopped.release()

    def go_on(self) -> None:
        """Let the work run until it wants to train, or has ended."""
        self._may_go_on.release()
        self._has_stopped.acquire()

    def abandon(self) -> None:
        self.is_abandoned = True
        self._may_go_on.release()

    def wait_for_others(self, each: Training) -> dict[str, float] | None:
        """Stop, in this visit's thread; return the losses of the training, None without one."""
        self.waits_to_train = each
        self._has_stopped.release()
        self._may_go_on.acquire()
        if self.is_abandoned:
            raise _AbandonedError
        self.waits_to_train = None
        return self.losses


_VISIT: ContextVar[Visit[Any] | None] = ContextVar("visit", default=None)


def visit_together(works: Sequence[Callable[[], R]], say: Callable[[str], object]) -> list[R]:
    """Return what the ``works`` return, whose trainings become one where they can.

    ``say`` is told why some cannot, each time.
    """
    visits = [Visit(work, say) for work in works]
    for visit in visits:
        visit.start()
    try:
        going = visits
        while going:
            for visit in going:
                visit.go_on()
            going = [visit for visit in going if visit.waits_to_train]
            _train_waiting(going)
    finally:
        for visit in visits:
            visit.abandon()
    for visit in visits:
        if visit.error:
            raise visit.error
    return [visit.result for visit in visits]


def _train_waiting(visits: Sequence[Visit[Any]]) -> None:
    """Give each visit the losses of its training, or None where it must train alone."""
    for group in _groups_alike(visits):
        trainings = [visit.waits_to_train for visit in group if visit.waits_to_train]
        found: Sequence[dict[str, float] | None] = [None] * len(group)
        if len(group) > 1:
            try:
                found = train_stacked(trainings)
            except RuntimeError as error:  # vmap knows no code that looks at single numbers
                group[0].say(f"{ONE_BY_ONE}their steps cannot be stacked: {error}")
        for visit, losses in zip(group, found, strict=True):
            visit.losses = losses


def _groups_alike(visits: Sequence[Visit[Any]]) -> list[list[Visit[Any]]]:
    groups: list[list[Visit[Any]]] = []
    for visit in visits:
        for group in groups:
            if _are_alike(group[0].waits_to_train, visit.waits_to_train):
                group.append(visit)
                break
        else:
            groups.append([visit])
    return groups


def _are_alike(one: Training | None, other: Training | None) -> bool:
    """Return whether a step of one is a step of the other, but for weights and samples."""
    assert one is not None
    assert other is not None
    loss = one.step.loss
    other_loss = other.step.loss
    if loss.__func__ is not other_loss.__func__ or one.settings != other.settings:  # type: ignore[attr-defined]
        return False
    if _shapes(one.step.model) != _shapes(other.step.model):
        return False
    if one.half.hparams != other.half.hparams or one.half.task != other.half.task:
        return False
    for name in loss.reads:  # type: ignore[attr-defined]
        if not _are_equal(getattr(one.half, name, None), getattr(other.half, name, None)):
            return False
    return True


def _shapes(model: nn.Module) -> list[tuple[str, Any, Any, bool]]:
    """The network's layers, and its weights' and buffers' shapes, types and use."""
    facts: list[tuple[str, Any, Any, bool]] = []
    for name, part in model.named_modules():
        facts.append((name, type(part), getattr(part, "eps", None), part.training))
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        facts.append((name, value.shape, value.dtype, value.requires_grad))
    return facts


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if is_dataclass(one):
        names = [field.name for field in fields(one)]
        return all(_are_equal(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)


# -- stacked training
def train_stacked(trainings: Sequence[Training]) -> list[dict[str, float] | None]:
    """Train all in place as `training.train` would; return the means of the loss terms of each.

    Nothing has changed of a client that gets None: its training has broken down, and would alone.
    """
    most_samples_first = sorted(trainings, key=lambda each: len(each.data), reverse=True)
    stack = Stack(most_samples_first)
    for epoch in zip(*(_batches(each) for each in most_samples_first), strict=True):
        for members, rows in together(epoch, stack.batch_size):
            stack.step(members, rows)
    found = dict(zip(most_samples_first, stack.finish(), strict=True))
    return [found[each] for each in trainings]


def _batches(each: Training) -> Iterator[list[Tensor]]:
    """Yield the rows of the batches of each epoch, as `training.train` draws them.

    With ``local-steps``, which may be several epochs, all are in one.
    """
    settings = each.settings
    generator = torch.Generator().manual_seed(each.seed)
    draw = partial(
        rows_of_batches,
        len(each.data),
        settings.batch_size,
        generator,
        no_single=each.step.mixes_samples,
        drop_last=settings.drop_last,
    )
    if not settings.local_steps:
        for _ in range(settings.local_epochs):
            yield [*draw()]
        return
    rows: list[Tensor] = []
    while len(rows) < settings.local_steps:
        rows += draw()
    yield rows[: settings.local_steps]


def together(
    batches: Sequence[list[Tensor]], batch_size: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield who takes a step with whom in an epoch, and the rows of their batches of one size.

    Each client's batches come in their order. Whole batches come first, as long as there are some.
    """
    waiting = {client: list(reversed(own)) for client, own in enumerate(batches) if own}
    while waiting:
        clients_of: dict[int, list[int]] = defaultdict(list)
        for client, left in waiting.items():
            clients_of[len(left[-1])].append(client)
        members = clients_of.get(batch_size) or max(clients_of.values(), key=len)
        yield members, [waiting[client].pop() for client in members]
        for client in members:
            if not waiting[client]:
                del waiting[client]


class Stack:
    """The weights, samples and losses of K clients whose trainings are alike."""

    def __init__(self, trainings: Sequence[Training]) -> None:
        self.trainings = trainings
        self.batch_size = trainings[0].settings.batch_size
        for each in trainings:
            each.step.model.train()
        self.first = trainings[0].step
        # `functional_call` takes modules only: what this one gives is the loss of a batch
        self.alone = nn.ModuleList([self.first.model])
        self.alone.forward = self._loss
        self.fixed = _stacked([dict(_named_parameters(each)) for each in trainings])
        self.buffers = _stacked([dict(_named_buffers(each)) for each in trainings])
        trained = [*_own_weights(trainings[0])]
        self.weights = {name: self.fixed.pop(name) for name in trained}
        self.descent = DESCENTS[trainings[0].settings.optimizer](self.weights, trainings)
        self.inputs = torch.cat([each.data.in_memory for each in trainings])
        self.labels = torch.cat([each.data.labels for each in trainings])
        sizes_K = torch.tensor([len(each.data) for each in trainings])
        self.start_K = sizes_K.cumsum(0) - sizes_K
        self.sums: dict[str, Tensor] = {}  # of each loss term, over all samples seen, [K]
        self.seen = [0] * len(trainings)  # samples

    def step(self, members: list[int], rows: Sequence[Tensor]) -> None:
        """Take a step of the clients ``members``, each with the ``rows`` [B] of its own samples."""
        rows_kB = torch.stack([*rows])
        index_kB = (rows_kB + self.start_K[members, None]).to(self.labels.device)
        batch = (self.inputs[index_kB], self.labels[index_kB], rows_kB.to(self.labels.device))
        weights = _of(self.weights, members)
        others = {**_of(self.fixed, members), **_of(self.buffers, members)}
        gradients, terms = vmap(grad(self._total, has_aux=True))(weights, others, batch)
        _put(self.buffers, members, others)
        if terms:
            self.descent.step(members, weights, gradients)
            _put(self.weights, members, weights)
        batch_size = rows_kB.shape[1]
        for client in members:
            self.seen[client] += batch_size
        for name, value_k in terms.items():
            sums_K = self.sums.setdefault(name, value_k.new_zeros(len(self.trainings)))
            sums_K[members] += value_k * batch_size

    def _total(
        self, weights: Mapping[str, Tensor], others: Mapping[str, Tensor], batch: tuple[Tensor, ...]
    ) -> tuple[Tensor, LossTerms]:
        """Return the loss of one client's batch under its weights, and its terms."""
        terms: LossTerms = functional_call(self.alone, {**weights, **others}, batch)
        return terms.get("total", batch[1].new_zeros((), dtype=torch.float32)), terms

    def _loss(self, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        return self.first.terms(self.first.model, inputs, labels, index)

    @torch.no_grad()
    def finish(self) -> list[dict[str, float] | None]:
        """Give the clients their weights and states, but those whose numbers are not finite."""
        is_finite_K = torch.ones(len(self.trainings), dtype=torch.bool, device=self.labels.device)
        for value in (*self.weights.values(), *self.buffers.values(), *self.sums.values()):
            is_finite_K &= value.reshape(len(self.trainings), -1).isfinite().all(1)
        is_finite = is_finite_K.tolist()
        sums = {name: value_K.tolist() for name, value_K in self.sums.items()}
        found: list[dict[str, float] | None] = []
        for client, each in enumerate(self.trainings):
            if not is_finite[client]:
                found.append(None)
                continue
            for name, own in _own_weights(each).items():
                own.copy_(self.weights[name][client])
                each.step.optimizer.state[own] |= self.descent.state(client, name)
            for name, buffer in _named_buffers(each):
                buffer.copy_(self.buffers[name][client])
            means = {name: value[client] / self.seen[client] for name, value in sums.items()}
            found.append(means)
        return found


class Descent:
    """The optimizer of the settings, for stacked weights: each client has a state of its own."""

    parts: tuple[str, ...]
    """What PyTorch calls the tensors of a weight's state."""

    def __init__(self, weights: Mapping[str, Tensor], trainings: Sequence[Training]) -> None:
        self.settings = trainings[0].settings
        clients = len(trainings)
        device = trainings[0].data.labels.device
        self.steps_K = torch.zeros(clients, device=device)
        self.states: dict[str, dict[str, Tensor]] = {}  # part -> name of the weight -> [K, …]
        for part in self.parts:
            self.states[part] = {name: torch.zeros_like(value) for name, value in weights.items()}
        for client, each in enumerate(trainings):
            for name, own in _own_weights(each).items():
                known = each.step.optimizer.state.get(own, {})
                for part in self.parts:
                    if known.get(part) is not None:
                        self.states[part][name][client] = known[part]
                if "step" in known:
                    self.steps_K[client] = known["step"]

    def step(
        self, members: list[int], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Change the weights [k, …] of the clients ``members`` by their gradients, in place."""
        self.steps_K[members] += 1
        states = {part: _of(stacks, members) for part, stacks in self.states.items()}
        decay = self.settings.weight_decay
        for name, weight in weights.items():
            gradient = gradients[name]
            if decay:
                gradient = gradient.add(weight, alpha=decay)
            own_states = [states[part][name] for part in self.parts]
            self.descend(weight, gradient, own_states, self.steps_K[members])
        for part, stacks in self.states.items():
            _put(stacks, members, states[part])

    def descend(
        self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], steps_k: Tensor
    ) -> None:
        raise NotImplementedError

    def state(self, client: int, name: str) -> dict[str, Tensor]:
        """Return a weight's state as PyTorch's optimizer keeps it."""
        if not self.steps_K[client]:
            return {}
        return {part: self.states[part][name][client].clone() for part in self.parts}


class Sgd(Descent):
    parts = ("momentum_buffer",)

    def descend(
        self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], steps_k: Tensor
    ) -> None:
        if self.settings.momentum:
            gradient = states[0].mul_(self.settings.momentum).add_(gradient)
        weight.sub_(gradient, alpha=self.settings.lr)

    def state(self, client: int, name: str) -> dict[str, Tensor]:
        return super().state(client, name) if self.settings.momentum else {}


class Adam(Descent):
    parts = ("exp_avg", "exp_avg_sq")

    def descend(
        self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], steps_k: Tensor
    ) -> None:
        mean, square = states
        mean.lerp_(gradient, 1 - BETA1)
        square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        steps = steps_k.double().view(-1, *[1] * (weight.dim() - 1))
        root = (1 - BETA2**steps).sqrt().to(weight)
        rate = (self.settings.lr / (1 - BETA1**steps)).to(weight)
        weight.sub_(rate * mean / (square.sqrt().div_(root).add_(EPSILON)))

    def state(self, client: int, name: str) -> dict[str, Tensor]:
        state = super().state(client, name)
        return {"step": self.steps_K[client].clone(), **state} if state else {}


BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # of PyTorch's Adam
DESCENTS: dict[str, type[Descent]] = {"sgd": Sgd, "adam": Adam}


def _of(stacks: Mapping[str, Tensor], members: list[int]) -> dict[str, Tensor]:
    """The parts of stacks that are of these clients: views if they are the first, else copies."""
    chosen = slice(len(members)) if members[-1] == len(members) - 1 else members
    return {name: stack[chosen] for name, stack in stacks.items()}


def _put(stacks: Mapping[str, Tensor], members: list[int], parts: Mapping[str, Tensor]) -> None:
    """Write what `_of` has returned into the stacks, unless it is there."""
    if members[-1] != len(members) - 1:
        for name, stack in stacks.items():
            if name in parts:
                stack[members] = parts[name]


def _own_weights(each: Training) -> dict[str, nn.Parameter]:
    """The weights of one client that its optimizer trains."""
    trained: set[int] = set()
    for group in each.step.optimizer.param_groups:
        trained |= {id(weight) for weight in group["params"]}
    return {name: weight for name, weight in _named_parameters(each) if id(weight) in trained}


def _named_parameters(each: Training) -> Iterator[tuple[str, nn.Parameter]]:
    return nn.ModuleList([each.step.model]).named_parameters()


def _named_buffers(each: Training) -> Iterator[tuple[str, Tensor]]:
    return nn.ModuleList([each.step.model]).named_buffers()


@torch.no_grad()
def _stacked(named: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name].detach() for each in named]) for name in named[0]}
