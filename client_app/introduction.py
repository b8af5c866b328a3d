"""Before the first round: a client says who it is, and finds out whether it can take part."""

import copy

import torch
from flwr.app import Context, Message, RecordDict

from client_app.algorithms.base import client_half
from client_app.answers import log
from client_app.client import Client
from client_app.protections.differential_privacy import check_affordable
from protofl_common.backbones.features import check_images
from protofl_common.basics.files import digest
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import is_python_name, load
from protofl_common.experiment.node import own_division
from protofl_common.experiment.settings import default_run_config
from protofl_common.models.build import check_model
from protofl_common.wire import records

_KNOWN_MODELS: dict[str, tuple[int, str]] = {}  # Cache of `_about_model`, by what a model depends on


def introduction(message: Message, context: Context) -> RecordDict:
    """Check that this client can train, and describe it. What is wrong with its data shows now."""
    client = Client(context, message)
    if client.node.has_own_data:
        own, asked = own_division(context.node_config, default_run_config()), context.run_config
        ignored = ", ".join(["seed", *(key for key, value in own.items() if asked.get(key) != value)])
        log("INFO", f"run {client.run_id}: this site divides its own data, and ignores the run's {ignored}")
    for name in filter(is_python_name, client.settings.metrics):
        load(name, "metrics")
    about_model = _about_model(client)
    _check_batches(client)
    check_affordable(client)
    if client.node.has_own_data and client.data.columns:
        log("INFO", f"run {client.run_id}: its inputs, in this order: {', '.join(client.data.columns)}")
    if client.node.has_own_data and client.plan is not None and client.data.train_inputs.dtype.kind == "f":
        log("WARNING", f"run {client.run_id}: under dp its numbers are not standardised: scale them by known limits")
    return RecordDict({"site": records.pack_site_card(card_of(client, *about_model))})


def card_of(client: Client, parameters: int, weights: str) -> records.SiteCard:
    """Describe a client; ``weights``: a digest of all weights that it exchanges, "" for none."""
    data, hidden, tells = client.data, client.settings.privacy.sums_only, client.settings.row.tells_classes
    refuses = not hidden or client.settings.row.one_shot  # moments of no class are no numbers, which nobody can sum
    present = client.classes_present if refuses else ()
    return records.SiteCard(
        name=client.name,
        partition=client.node.partition,
        num_partitions=client.node.num_partitions,
        domain=client.node.domain if client.node.has_own_data else data.domain,
        arch=client.arch,
        input_shape=client.input_shape,
        parameters=parameters,
        train_samples=client.stated_samples,
        test_samples=0 if hidden else len(data.test_labels),
        classes=data.classes,
        present=present if tells and not hidden else (),
        weights=weights,
        device=str(client.device),
        found=0 if hidden else data.found - len(data.train_labels) + client.stated_samples,
        validation_samples=0 if hidden else len(data.validation_labels),
        real=client.node.is_site,
        signature=client.signature("introduction").hex(),
        columns=digest(data.columns)[:4] if data.columns and data.mean else "",
    )


def _about_model(client: Client) -> tuple[int, str]:
    """Parameters of the model, and a digest of the weights that it exchanges; made once for clients that are alike."""
    settings, exchange = client.settings, client.settings.exchange
    of_model = settings.model, client.arch, client.input_shape, bool(client.data.mean), client.num_classes
    noise = settings.privacy.dp != "none", settings.noise.gradient_noise
    kind = repr((settings.run.algo, settings.hparams, *of_model, *noise))
    if kind in _KNOWN_MODELS:
        return _KNOWN_MODELS[kind]
    if settings.backbones:
        check_images(client.data.train_inputs, settings.backbones)
    else:
        try:
            check_model(client.model, client.arch, _zeros(client, 2), settings.model.feature_dim)
        except ValueError as error:
            raise SettingsError(str(error)) from error
    algorithm = client_half(settings.row)(client, 0)
    if any(noise) and not settings.row.one_shot:
        algorithm.step()  # refuses what DP-SGD cannot train
    weights = {**algorithm.templates(exchange.down), **algorithm.templates(exchange.up)}
    about = sum(parameter.numel() for parameter in client.model.parameters()), digest(weights) if weights else ""
    if algorithm.of_catalog:
        _KNOWN_MODELS[kind] = about
    return about


def _check_batches(client: Client) -> None:
    """SettingsError where a batch is of one sample, and the model's batch normalisation cannot train on it."""
    size = client.settings.training.batch_size
    try:
        if min(size, len(client.data.train_labels)) <= 1:
            with torch.no_grad():
                copy.deepcopy(client.model).train().body(_zeros(client, 1))
    except ValueError as error:
        why = "batch normalisation cannot train on a batch of one sample; set norm = 'group', or bring more samples"
        raise SettingsError(f"batch-size = {size}: {why}") from error  # how many it has may only be in a sum


def _zeros(client: Client, number: int) -> torch.Tensor:
    """Return inputs to try a network on: its error goes to the server, and may quote what it was given."""
    dtype = torch.float32 if client.data.mean or client.settings.backbones else torch.int64
    return torch.zeros(number, *client.input_shape, dtype=dtype, device=client.device)
