"""Before the first round: a client says who it is, and finds out whether it can take part."""

import copy

import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import save

from client_app.algorithms.base import build_half
from client_app.protections import protections_of
from client_app.protections.differential_privacy import check_affordable
from client_app.site.client import Client, open_client
from client_app.site.log import log
from client_app.site.workshop import Workshop, open_workshop
from protofl_common.backbones.features import check_images, check_vectors
from protofl_common.basics.files import digest
from protofl_common.basics.tensorfile import without_shared_memory
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import is_python_name, load
from protofl_common.experiment.node import own_division
from protofl_common.experiment.settings import default_run_config
from protofl_common.models.build import check_model
from protofl_common.wire import records
from protofl_common.wire.payloads import DTYPES
from protofl_common.wire.schema import Template

_KNOWN_MODELS: dict[str, tuple[int, str]] = {}
"""Cache of `_about_model`, by what a model depends on."""


def introduction(message: Message, context: Context) -> RecordDict:
    """Return a description of this client, after checks that it will be able to train.

    The data are read and the model is built, so that what is wrong with them shows now.
    """
    client = open_client(context, message)
    work = open_workshop(client)
    if client.node.has_own_data:
        _log_ignored(client, context)
    for name in client.settings.metrics:
        if is_python_name(name):
            load(name, "metrics")
    parameters, weights = _about_model(work)
    _check_batches(work)
    check_affordable(work)
    if client.node.has_own_data:
        _log_inputs(work)
    card = card_of(work, parameters, weights)
    return RecordDict({"site": records.pack_site_card(card)})


def _log_ignored(client: Client, context: Context) -> None:
    """Log which settings of the run have no effect, as this site divides its own data.

    The site's node config or the defaults take their place.
    """
    own_settings = own_division(context.node_config, default_run_config())
    ignored = [key for key, value in own_settings.items() if context.run_config.get(key) != value]
    names = ", ".join(["seed", *ignored])
    log(
        "INFO",
        f"run {client.run_id}: this site divides its own data, and ignores the run's {names}",
    )


def _log_inputs(work: Workshop) -> None:
    """Log what was read of a site's data, in which order columns are inputs, and any doubt."""
    for note in work.data.notes:
        log("INFO", f"run {work.client.run_id}: {note}")
    if work.data.columns:
        columns = ", ".join(work.data.columns)
        log("INFO", f"run {work.client.run_id}: its inputs, in this order: {columns}")
    are_unscaled = work.plan is not None and not work.settings.takes_vectors
    if are_unscaled and work.data.train_inputs.dtype.kind == "f":
        log(
            "WARNING",
            f"run {work.client.run_id}: under dp its numbers are not standardised: scale them by"
            " known limits",
        )


def card_of(work: Workshop, parameters: int, weights: str) -> records.SiteCard:
    """Return the description of a client that it sends to the server.

    ``parameters`` is the model's number of parameters, ``weights`` a digest of the names and shapes
    of all weights that it exchanges, "" for none. Where the server shall only learn sums, numbers
    of samples are 0 and classes are left out. SettingsError where no class is large enough to tell
    of (`require_large_classes`).
    """
    data = work.data
    row = work.settings.row
    hidden = work.settings.privacy.sums_only
    present: tuple[int, ...] = ()
    if row.one_shot or not hidden:
        work.require_large_classes()  # in a sum, too, a one-shot client needs a class
        present = work.classes_present
    return records.SiteCard(
        name=work.name,
        partition=work.client.node.partition,
        num_partitions=work.client.node.num_partitions,
        domain=work.client.node.domain if work.client.node.has_own_data else data.domain,
        arch=work.arch,
        input_shape=work.input_shape,
        parameters=parameters,
        train_samples=work.stated_samples,
        test_samples=0 if hidden else len(data.test_labels),
        classes=data.classes,
        present=present if row.tells_classes and not hidden else (),
        weights=weights,
        device=str(work.device),
        found=0 if hidden else work.found_samples,
        validation_samples=0 if hidden else len(data.validation_labels),
        real=work.client.node.is_site,
        signature=work.client.signature("introduction").hex(),
        # 16 bits for a table's columns in their order, to notice where those of sites differ
        columns=digest(data.columns)[:4] if data.columns and data.mean else "",
        task_kind=work.task.kind,
    )


def _about_model(work: Workshop) -> tuple[int, str]:
    """Return the number of the model's parameters, and a digest of what weights it exchanges.

    Builds the client's half, and checks on the way that model and data fit: SettingsError where
    they do not. Clients of one process for which all is equal that the result depends on share it,
    unless the algorithm is the user's own.
    """
    settings = work.settings
    has_dp = settings.privacy.dp != "none"
    depends_on = (
        settings.run.algo,
        settings.hparams,
        settings.model,
        work.arch,
        work.input_shape,
        bool(work.data.mean),
        work.num_classes,
        has_dp,
        settings.noise.gradient_noise,
    )
    key = repr(depends_on)
    if key in _KNOWN_MODELS:
        return _KNOWN_MODELS[key]

    if settings.backbones:
        check_images(work.data.train_inputs, settings.backbones)
    elif settings.takes_vectors:
        check_vectors(work.data.train_inputs, settings.run.algo)
    if not settings.backbones:
        try:
            inputs = _zeros(work, 2)
            check_model(work.model, work.arch, inputs, settings.model.feature_dim)
        except ValueError as error:
            raise SettingsError(str(error)) from error
    if is_python_name(work.arch):
        _check_storable(work)
    algorithm = build_half(work, 0, protections_of(work))  # round 0: before the first
    if (has_dp or settings.noise.gradient_noise) and not settings.row.one_shot:
        algorithm.step()  # refuses what DP-SGD cannot train

    exchange = settings.exchange
    weights = {**algorithm.templates(exchange.down), **algorithm.templates(exchange.up)}
    for template in weights.values():
        _check_sendable(template, work.arch)
    parameters = sum(parameter.numel() for parameter in work.model.parameters())
    about = (parameters, digest(weights) if weights else "")
    if algorithm.of_catalog:
        _KNOWN_MODELS[key] = about
    return about


def _check_storable(work: Workshop) -> None:
    """Raise SettingsError for a network of the user's own that cannot be written to a file.

    Sparse tensors, for example, cannot. Otherwise it would show only after the last round, when
    the trained model is lost.
    """
    try:
        save(without_shared_memory(work.model.state_dict()))
    except Exception as error:  # of torch, or safetensors
        raise SettingsError(
            f"arch = {work.arch!r}: its model cannot be written ({type(error).__name__}: {error});"
            " it may have dense tensors only, and no extra state"
        ) from error


def _check_sendable(template: Template, arch: str) -> None:
    """Raise SettingsError for weights of a type that messages cannot carry."""
    for name, (dtype, _) in template.items():
        if dtype not in DTYPES:
            raise SettingsError(
                f"arch = {arch!r}: {name} is {dtype}, and weights travel as {', '.join(DTYPES)};"
                " make it one of these, or a buffer that is not sent (persistent=False)"
            )


def _check_batches(work: Workshop) -> None:
    """Raise SettingsError where batches have one sample and the model cannot train on one.

    A model with batch normalisation cannot. A copy of the model is tried on such a batch.
    """
    size = work.settings.training.batch_size
    if min(size, len(work.data.train_labels)) > 1:
        return
    try:
        with torch.no_grad():
            copy.deepcopy(work.model).train().body(_zeros(work, 1))
    except ValueError as error:
        # not the client's number of samples, which may have to stay secret until it is in a sum
        raise SettingsError(
            f"batch-size = {size}: batch normalisation cannot train on a batch of one sample; "
            "set norm = 'group', or bring more samples"
        ) from error


def _zeros(work: Workshop, number: int) -> torch.Tensor:
    """Return a batch of zeros in the shape of the client's inputs, to try a network on.

    No samples are used, as an error goes to the server and may quote the inputs.
    """
    # images and tables have a mean, and features come from backbones: only texts have neither
    are_tokens = not (work.data.mean or work.settings.backbones)
    dtype = torch.int64 if are_tokens else torch.float32
    return torch.zeros(number, *work.input_shape, dtype=dtype, device=work.device)
