"""The client that answers a message, and what the message asks of it."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from secrets import token_hex

from flwr.app import Context, Message, MessageType, RecordDict

from client_app.site import audit
from client_app.site.consent import check_consent, site_key
from client_app.site.state import StateFolder
from protofl_common.basics.files import digest, locked, write_text
from protofl_common.basics.run_history import RunHistory
from protofl_common.basics.seeding import derive_seed
from protofl_common.config.lists import names_in
from protofl_common.config.python_names import allow
from protofl_common.config.sections import KEYED, PER_UNIT
from protofl_common.experiment.node import NodeConfig, allow_named, is_site, site_folder
from protofl_common.experiment.settings import Settings, baseline_config, digest_of
from protofl_common.experiment.study import EXTENSION, Study, about_site, study_id
from protofl_common.wire.records import (
    SEEN,
    Instructions,
    check_settings,
    unpack_baseline,
    unpack_counted,
    unpack_head,
    unpack_instructions,
)
from protofl_common.wire.schema import RefusedMessage

DIVISION_KEY_FILE = "division.key"


@dataclass(frozen=True, eq=False, repr=False)
class Client:
    """The facts about a client and the message that it answers.

    `open_client` makes one for each message. Data, device and model are in its `Workshop`.
    """

    settings: Settings  # the run's, or those of the baseline that the message is about
    node: NodeConfig
    run_id: int
    site_folder: Path  # of its key, its approvals and its audit log
    arch: str
    content: RecordDict  # of the message
    trains_now: bool  # the message asks for training
    instructions: Instructions  # of round 0 in its introduction, which comes before all rounds
    study: Study | None = None  # in which this site takes part now; None for a simulated client

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def evaluates(self) -> bool:
        """True where the run's settings plan an evaluation for this message.

        The message does not decide it, so a server cannot ask for more evaluations.
        """
        return not self.trains_now or self.settings.evaluates(self.instructions.round)

    @property
    def reports_failed_training(self) -> bool:
        """True where the server may learn that a training failed.

        A site hides it where the server shall only learn sums over clients.
        """
        return not (self.settings.privacy.sums_only and self.node.is_site)

    def seed_for(self, purpose: str, *more: str | int) -> int:
        """Return the seed of this client's draws for a purpose, such as ``"train"`` and a round."""
        return derive_seed(self.settings.run.seed, purpose, self.name, *more)

    # -- its files -----------------------------------------------------------------------------
    @property
    def root(self) -> Path:
        """The folder of what never leaves this client.

        It is ``state-dir`` of the node config, which no server chooses, or ``out-dir`` for a
        simulated client.
        """
        return Path(self.settings.machine.state_dir or self.settings.run.out_dir).expanduser()

    def own_file(self, run_name: str, name: str) -> Path:
        """Return the path of a client's file ``name``, in the folder of a run.

        The server chooses ``run_name``, so with another name it makes the client begin a new file:
        what a site must not forget from run to run is kept elsewhere.
        """
        return self.root / run_name / "clients" / self.name / name

    def division_key(self) -> bytes:
        """Return the secret by which a site divides its own data into training and test parts.

        It is b"" unless ``test-from = "keyed"``. The first call writes it to a file. Whoever had it
        could say in which part a sample is; and if the file were lost, another key would be made
        and test samples would become training samples.
        """
        if not self.node.has_own_data or self.settings.data.test_from != KEYED:
            return b""
        path = self.site_folder / DIVISION_KEY_FILE
        with locked(path):
            if not path.exists():
                write_text(path, token_hex(32), private=True)
            return bytes.fromhex(path.read_text(encoding="utf-8"))

    @cached_property
    def states(self) -> StateFolder:
        """The states that this client has stored after earlier rounds of the run.

        A state is tied to its ``use``: it is not loaded for another algorithm, exchange, ``dp`` or
        study. An extension of a study is no other one.
        """
        settings = self.settings
        use = f"{settings.run.algo} ({digest(repr(settings.exchange))})"
        dp = settings.privacy.dp
        if dp != "none":
            use += f", with differential privacy{PER_UNIT[dp]}"
        if self.study and self.study.name:
            extended_id = study_id(settings.given, EXTENSION)
            use += f", in the study {self.study.name} ({extended_id})"

        run_history = self.instructions.run_history
        run_folder = self.instructions.run_name
        if self.node.is_site:  # two servers may choose the same name for a run
            run_folder += f"-{run_history.first}"
        folder = self.root / run_folder / "clients"
        return StateFolder(folder, self.name, run_history, is_site=self.node.is_site, use=use)

    def signature(self, purpose: str) -> bytes:
        """Sign this site's name, the study, the Flower run and ``purpose`` with the site's key.

        Return b"" where the study names no sites, so that nobody could check it.
        """
        if self.study is None or not self.settings.named_sites:
            return b""
        about = about_site(self.settings.study, self.name, self.run_id, purpose)
        return site_key(self.site_folder).sign(about)


def open_client(context: Context, message: Message | None = None) -> Client:
    """Return the client that answers a message, once a site's operator has agreed to the run.

    Checks everything that can be checked without reading data: RefusedMessage, SettingsError or
    StateError where the client does not answer. Without a message, as where an algorithm is tried
    alone, no operator is asked and the round is 0.
    """
    kind = message.metadata.message_type if message else ""
    content = message.content if message else RecordDict()
    # Flower gives "train.default" to the handler of "train", too, but the checks below would not
    # take it for training
    if kind.endswith(".default"):
        raise RefusedMessage(f"a message of the unknown kind {kind!r}")
    settings = _read_settings(context, content)
    node = NodeConfig.of(context.node_config)
    introduces_itself = kind == MessageType.QUERY
    if introduces_itself:  # first, lest an operator be asked about settings the server does not use
        check_settings(content, digest_of(settings.given))
    study = None
    if message and node.is_site:
        study = check_consent(
            context.run_config,
            context.run_id,
            context.node_config,
            approves=node.approves,
            counts=not introduces_itself,
        )
    instructions = Instructions(0, "", RunHistory(context.run_id))
    if message and not introduces_itself:
        instructions = _read_instructions(content, settings, context.run_id, node.name)
        if node.is_site:
            _check_witness(content, node.name, site_folder(context.node_config))
    # where all clients need one architecture, they take the first of the list
    number_in_list = 0 if settings.exchange.needs_one_architecture else node.partition
    return Client(
        settings=settings,
        node=node,
        run_id=context.run_id,
        site_folder=site_folder(context.node_config),
        arch=settings.architecture(number_in_list, settings.model.arch),
        content=content,
        trains_now=kind == MessageType.TRAIN,
        instructions=instructions,
        study=study,
    )


def _check_witness(content: RecordDict, name: str, folder: Path) -> None:
    """Raise RefusedMessage where the server has seen a line that this site's audit log lacks.

    ``state-dir`` is an older copy or a new folder then, so its counts (what was spent, answered,
    approved) are too low. A server that lies about it only stops its own run.
    """
    head = unpack_head(content, name)
    if head and not audit.has_line(folder, head):
        raise RefusedMessage(
            f"{SEEN}.{name}: the server has seen a line that this site's audit log lacks: state-dir"
            " is an older copy, or a new one; see Backup and restore in docs/operations.md. Or"
            f" another machine has called itself {name}, in a run without study-sites"
        )


def _read_settings(context: Context, content: RecordDict) -> Settings:
    """Return the settings of the run, or of the baseline that a message is about.

    Also allows the import of Python modules that settings may name: at a site those that its node
    config names, and in simulation those of the run. RefusedMessage for a baseline that is not
    among the run's.
    """
    run_config = context.run_config
    node = context.node_config
    baseline = unpack_baseline(content)
    allow_named(node if is_site(node) else run_config)
    allow(names_in(node.get("allow-python")))
    settings = Settings.from_run_config(run_config, node)
    if not baseline:
        return settings
    if baseline not in settings.baselines:
        raise RefusedMessage(f"baseline is {baseline!r}, which the run's settings do not name")
    return Settings.from_run_config(baseline_config(run_config, baseline), node)


def _read_instructions(
    content: RecordDict, settings: Settings, run_id: int, name: str
) -> Instructions:
    """Return what a message asks for: its round, and which earlier rounds count.

    RefusedMessage for a round that the run does not have, and for another Flower run's history.
    """
    instructions = unpack_instructions(content)
    number = instructions.round
    rounds = settings.run.rounds
    if not 1 <= number <= rounds:
        raise RefusedMessage(f"round.round is {number} in a run of {rounds} rounds")
    run_history = instructions.run_history
    if run_history.run_id != run_id:
        raise RefusedMessage(
            f"round.run_history is {run_history.text!r} in the Flower run {run_id}"
        )
    if settings.privacy.secagg:
        return replace(instructions, counted=unpack_counted(content, name))
    return instructions
