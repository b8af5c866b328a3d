"""The settings of a run that no algorithm owns: a frozen dataclass per section.

Each field has the legal values of its key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import get_type_hints

from protofl_common.config.architectures import (
    GROUPS,
    HEADS,
    ORTHOGONAL_SHARED,
    OTHER_NETWORKS,
    OTHER_NETWORKS_IN_WORDS,
    architecture_option,
)
from protofl_common.config.datasets import DATASETS, OTHER_DATASETS, PARTITIONS
from protofl_common.config.options import Affects, Needed, Scalar, Table, key_of, option

TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
"""Experiment trackers (`server_app/callbacks/trackers.py`)."""
KEYED = "keyed"
"""The value of ``test-from`` with which a sample's side depends on nothing but the sample."""
FEWEST_TESTED = 20
"""The fewest test samples of a figure under ``min-class-samples``: one of few samples would say
which of them are predicted right."""
HIDES_UPLOADS = "hides the single uploads that it needs"
HIDES_FIGURES = "hides the single figures that it needs"
SAME_CLIENTS = "forbids sums over different clients, whose difference shows single uploads"
DEVICE = re.compile(r"cuda:\d+|xpu(:\d+)?")
NOISE = re.compile(r"(gaussian|laplace) (\d+|\d*\.\d+) (\d+|0*\.\d+)")
"""No part of it can be read in two ways."""


class RunSettings(Table):
    """The run itself."""

    algo: str = option(
        default="fedproto",
        help="`protofl list algorithms` names them; a package may bring others",
    )
    hparams: str = option(
        default="",
        help='hyper-parameters of an algorithm of another package: "mu=5.0, temperature=0.5"',
    )
    baselines: str = option(
        default="",
        affects="display",
        with_dp=Needed(
            "",
            "each baseline would spend ε once more on the same samples; make it a run of its own",
        ),
        help=(
            "algorithms that the same clients train with too, after the run, to compare with:"
            ' "local,fedavg"'
        ),
    )
    rounds: int = option(default=20, minimum=1, at_most="max-rounds", help="communication rounds")
    early_stopping: int = option(
        default=0,
        help=(
            "the run ends when this many rounds have not raised early-stopping-metric on"
            " validation data, for which it needs validation-fraction; 0: never"
        ),
    )
    early_stopping_metric: str = option(
        default="",
        help=(
            "the figure by which the best round of the run is chosen: head, prototype, or one of"
            ' `metrics` such as head/auc; "": head, or prototype if there is no head'
        ),
    )
    keep_best: bool = option(
        default=False,
        affects="display",
        help=(
            "true: each client also keeps its model of the best round on its disk, for `protofl"
            " export --best`"
        ),
    )
    seed: int = option(
        default=42,
        maximum=2**63 - 1,  # of PyTorch, TOML and Protocol Buffers
        help=(
            "all random choices of the run follow from it, with three exceptions: the noise of dp"
            " never repeats; K-means of prototypes, and the division of a site's own data, are the"
            " same for every seed"
        ),
    )
    run_name: str = option(
        default="",
        affects="name",
        help='name of the results folder; "": time, algorithm and data set',
    )
    out_dir: str = option(
        default="runs",
        affects="name",
        help=(
            "where results folders are made, relative to the working directory of the SuperLink"
            " or SuperNode"
        ),
    )
    resume: bool = option(
        default=False,
        affects="name",
        help=(
            "true: continue the stopped run run-name after its last finished round;"
            " <run>/resume.toml has all settings that this takes"
        ),
    )
    report: bool = option(
        default=True,
        affects="display",
        help="draw report.html when the run ends; `protofl report RUN` draws it at any time",
    )
    metrics: str = option(
        default="",
        affects="display",
        with_dp=Needed("", "only numbers of right predictions have noise"),
        help=(
            "beside accuracy, comma-separated: names that `protofl list metrics` prints, or"
            " module:function"
        ),
    )
    callback: str = option(
        default="",
        affects="display",
        help=(
            "a tracker: mlflow, tensorboard (files in <run>/tensorboard), trackio, wandb; or"
            " module:function on the server, called with every row of metrics.jsonl"
        ),
    )


class FederationSettings(Table):
    """Who takes part, and how long the server waits."""

    num_clients: int = option(
        default=0,
        affects="waiting",
        help="clients to wait for before round 1; 0: as many as the clients' num-partitions says",
    )
    min_clients: int = option(
        default=0,
        affects="waiting",
        help=(
            "the run begins with this many clients if the others cannot take part, or are not"
            " there after join-timeout; 0: with all, or with more than half if clients bring data"
            " of their own"
        ),
    )
    participation: float = option(
        default=1.0,
        above=0,
        maximum=1,
        with_secagg=Needed(1.0, SAME_CLIENTS),
        help="fraction of the clients sampled in each round",
    )
    drop_rate: float = option(
        default=0.0,
        maximum=0.99,
        with_secagg=Needed(0.0, SAME_CLIENTS),
        help=(
            "the probability that a client that is asked does not answer, drawn anew for each"
            " client and round; only for clients that divide a data set"
        ),
    )
    slow_rate: float = option(
        default=0.0,
        maximum=0.99,
        with_secagg=Needed(0.0, SAME_CLIENTS),
        help=(
            "this part of the clients is slow, drawn once for the run, at least one client: each"
            " reply comes slow-factor rounds late, and until then the client is not asked again;"
            " only for clients that divide a data set"
        ),
    )
    slow_factor: int = option(
        default=1,
        minimum=1,
        help="by how many rounds the reply of a slow client is late (slow-rate)",
    )
    new_clients: int = option(
        default=0,
        with_secagg=Needed(0, HIDES_FIGURES),
        with_dp=Needed(0, "the privacy ledger counts rounds, and they train after the last one"),
        help=(
            "this many of the clients that divide a data set never train; the final evaluation"
            " shows their figures separately (head/new-clients)"
        ),
    )
    new_domain: str = option(
        default="",
        with_secagg=Needed("", HIDES_FIGURES),
        with_dp=Needed(
            "", "the privacy ledger counts rounds, and its clients train after the last one"
        ),
        help="the clients of this domain never train, as with new-clients: a held-out domain",
    )
    new_client_epochs: int = option(
        default=0,
        at_most="max-epochs",
        help=(
            "for how many epochs a new client trains before it is evaluated; 0: it uses what it"
            " receives without training"
        ),
    )
    min_replies: int = option(
        default=1,
        minimum=1,
        affects="waiting",
        help=(
            "a round with fewer valid replies changes nothing, and three such rounds in a row end"
            " the run; if there are several sites with operators, at least two must answer,"
            " whatever this says"
        ),
    )
    join_timeout: float = option(
        default=300.0,
        above=0,
        affects="waiting",
        help="seconds to wait for the clients to connect and to prepare their data",
    )
    round_timeout: float = option(
        default=3600.0,
        above=0,
        affects="waiting",
        help="seconds to wait at most for the replies of a round",
    )
    grace: float = option(
        default=3.0,
        affects="waiting",
        help=(
            "where clients bring data of their own: once min-replies clients have answered, a round"
            " waits for the others no longer than grace times the median time of these replies."
            " With late = discard it waits for grace times the slowest time so far of a client that"
            " has not answered, if that is longer, and in the first round for round-timeout."
            " grace never makes the wait shorter than min-wait. 0: every round waits for"
            " round-timeout"
        ),
    )
    min_wait: float = option(
        default=120.0,
        affects="waiting",
        help=(
            "the least seconds that grace waits; Flower takes 60 to notice that a client died, and"
            " the client then has 30 to come back"
        ),
    )
    late: str = option(
        default="discard",
        choices=("discard", "next-round"),
        with_secagg=Needed("discard", HIDES_UPLOADS),
        help=(
            "what happens to a reply that comes after its round. discard: it is dropped."
            " next-round: it counts in the round that is under way when it comes, with the weight"
            " that staleness leaves it. With next-round a round ends after grace times the median"
            " time of its replies, however slow the other clients are, and no client is asked"
            " again while it works"
        ),
    )
    staleness: float = option(
        default=0.5,
        maximum=1,
        help=(
            "with late = next-round, a reply that is a rounds old has (1 + a) ^ -staleness of the"
            " weight that it would have had in its own round; 0: the whole weight"
        ),
    )
    max_silent_rounds: int = option(
        default=5,
        affects="waiting",
        help=(
            "a client that does not answer in this many rounds in a row is left out of as many"
            " rounds, then tried again; 0: it is asked in every round"
        ),
    )
    evaluate_every: int = option(
        default=1,
        minimum=1,
        help="clients evaluate in every so many rounds, and always after the last",
    )
    liars: int = option(
        default=-1,
        minimum=-1,
        maximum=2,
        with_secagg=Needed(0, HIDES_UPLOADS),
        help=(
            "how many lying sites the server guards against, 0, 1 or 2: it bounds replies, changes"
            " of weights and claimed numbers of samples, and leaves out this many values at each"
            " end of a mean of prototypes; -1: 1 if a site with an operator takes part and a round"
            " asks three or more clients, 0 among simulated clients and with secagg"
        ),
    )

    @property
    def late_replies_count(self) -> bool:
        """Whether a reply that comes after its round counts in a later one."""
        return self.late == "next-round"


class BoundsSettings(Table):
    """For experts: the bounds on single clients, where they shall not follow from `liars`."""

    max_prototype_norm: float = option(
        default=10000.0,
        above=0,
        help="a reply with a prototype of larger Euclidean norm is refused",
    )
    max_prototypes_per_class: int = option(
        default=100,
        minimum=1,
        help=(
            "a reply with more prototypes of a class is refused, where an algorithm allows"
            " several at all"
        ),
    )
    max_norm_ratio: float = option(
        default=0.0,
        minimum=1,
        or_zero=True,
        help=(
            "a reply is refused if its largest prototype, or its model, is longer than this many"
            " times the median of the replies, if there are three or more; 0: 5 with liars,"
            " otherwise 1000"
        ),
    )
    max_samples_ratio: float = option(
        default=0.0,
        minimum=1,
        or_zero=True,
        help=(
            "in means weighted by samples, a client weighs at most as if it had this many times"
            " the median number of training samples of all clients; 0: 8 with liars, otherwise no"
            " bound"
        ),
    )
    max_samples_lead: float = option(
        default=0.0,
        minimum=1,
        or_zero=True,
        help=(
            "with three or more clients, a client also weighs at most as if it had this many times"
            " the largest number of samples of the others, liars left out; 0: 2 with liars,"
            " otherwise no bound"
        ),
    )
    max_update_ratio: float = option(
        default=0.0,
        with_secagg=Needed(0.0, HIDES_UPLOADS),
        help=(
            "a client's change of the weights, buffers included, is cut to this many times the"
            " median length of the round's changes; 0: 2 with liars, otherwise it is not cut"
        ),
    )
    merging: str = option(
        default="auto",
        choices=("auto", "mean", "median", "trimmed-mean"),
        with_secagg=Needed("mean", HIDES_UPLOADS),
        help=(
            "how the server makes one prototype or weight of the clients' values: mean, median,"
            " trimmed-mean; if the server trains on prototypes or clusters them, the last two leave"
            " out those of the clients least like the others; auto: the mean; but for prototypes"
            " whose features can be compared across all clients, the mean without the smallest and"
            " the largest values, as many of each as liars says"
        ),
    )
    trim_fraction: float = option(
        default=0.2,
        maximum=0.49,
        help=(
            'with merging = "trimmed-mean": which part of the clients is left out at each end of'
            " every coordinate, rounded up"
        ),
    )


class DataSettings(Table):
    """The data, and their division among the clients."""

    dataset: str = option(
        default="digit-domains",
        choices=DATASETS,
        or_like=OTHER_DATASETS,
        or_words="MODULE:FUNCTION of your own",
        affects="data",
        site=(
            "how the files are read: `image-folder`, `domain-folder`, `manifest`, `arrays`,"
            " `text-csv`, `MODULE:FUNCTION`, `hf:NAME`; a run names none of these. Needed with"
            " data of its own"
        ),
        help="`protofl list datasets` names them; or MODULE:FUNCTION of your own, hf:NAME",
    )
    data_dir: str = option(
        default="",
        affects="machine",
        site=(
            "its data, [in any form](data.md#your-own-data), all that a run may read; nothing"
            " is written there unless downloads are allowed"
        ),
        help="folder or file of the data set (not needed by the embedded ones)",
    )
    download: bool = option(
        default=False,
        affects="machine",
        help=(
            "let torchvision download a missing data set into data-dir; a site must allow it:"
            " node config allow-download"
        ),
    )
    cache_dir: str = option(
        default="",
        affects="machine",
        site="the folder of decoded images and features; if not set, `~/.cache/protofl`",
        help='decoded images and partitions; "": protofl in the user\'s cache folder',
    )
    image_size: int = option(
        default=0,
        affects="data",
        at_most="max-image-size",
        site="pixels a side; if not set, the run's",
        help=(
            "resize images to this many pixels a side; 0: the data set's own size, or 64 where"
            " its images have none in common (folders, lists, Flowers-102)"
        ),
    )
    max_unreadable: float = option(
        default=0.0,
        maximum=0.5,
        affects="data",
        site="the share of its image files that may be unreadable; if not set, the run's",
        help=(
            "which share of your own image files may be unreadable; these are left out and named."
            " If there are more, or with 0 a single one, the data are refused"
        ),
    )
    text_length: int = option(
        default=64,
        minimum=1,
        maximum=65536,
        affects="data",
        at_most="max-text-length",
        site="words and signs of a text; if not set, the run's",
        help="texts: words and signs that count; longer texts are cut",
    )
    classes: str = option(
        default="",
        affects="data",
        site=(
            "the names of its classes, in label order, with commas; if not set, the run's."
            " Needed with a demand (`min-class-samples`, `require-dp`, `require-secagg`)"
        ),
        help=(
            "data of your own: class names in label order, comma-separated, which also pick the"
            ' folders of a domain-folder; "": those that occur, sorted'
        ),
    )
    task: str = option(
        default="single-label",
        choices=("single-label", "multi-label"),
        affects="data",
        with_dp=Needed("single-label", "a sample of several labels adds to several classes"),
        help=(
            "multi-label: a sample has several labels, each of which holds, does not, or is not"
            " known; see docs/several-labels.md"
        ),
    )
    label_map: str = option(
        default="",
        affects="data",
        site=(
            "what its own data call the labels of a run: `Effusion=Pleural Effusion`, the name in"
            " the data first; several with commas. Only with several labels a sample"
        ),
        help=(
            "several labels a sample: the names in the data and the labels of the run that they"
            ' stand for, "Fluid=Effusion, Nodule=Mass"'
        ),
    )
    uncertain: str = option(
        default="refuse",
        choices=("refuse", "missing", "0", "1"),
        affects="data",
        site="what a label of -1 means in its data; if not set, as the run says",
        help=(
            "several labels a sample: what -1 stands for, CheXpert's mark of an uncertain label:"
            " missing, 0 or 1; refuse: it is an error"
        ),
    )
    annotated_labels: int = option(
        default=0,
        help=(
            "several labels a sample, in a simulation: how many of the labels each client has"
            " annotated. The client trains on these alone, and is tested on all labels; 0: all"
        ),
    )
    columns: str = option(
        default="",
        affects="data",
        site=(
            "[which columns of a table](data.md#tables) become inputs; if not set, all. A run"
            " may only say the same"
        ),
        help=(
            "a table of your own (CSV, Parquet): the columns of the inputs, in this order,"
            ' comma-separated; "": all but label, client, domain, split'
        ),
    )
    drop: str = option(
        default="",
        affects="data",
        site="which columns do not; a run may only say the same",
        help="a table of your own: columns that are no inputs, comma-separated",
    )
    one_hot: str = option(
        default="",
        affects="data",
        site="which columns are categories; a run may only say the same",
        help=(
            'a table of your own: columns of categories, the same at all sites, "sex:f|m,'
            ' ward:a|b|c"; a value that is not listed is refused'
        ),
    )
    impute: str = option(
        default="none",
        choices=("none", "mean", "median"),
        affects="data",
        with_dp=Needed(
            "none",
            "values in the place of missing ones are made of all samples; fill them in yourself",
        ),
        site="how gaps in numbers are filled; if not set, as the run says",
        help=(
            "what missing numbers become: the mean or the median of the client's own training"
            " samples; none: they are refused"
        ),
    )
    standardise: str = option(
        default="auto",
        choices=("auto", "client", "pooled"),
        affects="data",
        with_dp=Needed("auto", "its mean and deviation are made of all samples"),
        site="how numbers are scaled; if not set, as the run says",
        help=(
            "whose mean and deviation scale inputs. client: those of each client's own training"
            " samples (auto, for numbers); pooled: those of all clients of a simulation; auto, for"
            " images: those of the whole data set"
        ),
    )
    partition: str = option(
        default="iid",
        choices=PARTITIONS,
        help="`protofl list partitions` names them",
    )
    alpha: float = option(
        default=0.1,
        above=0,
        help="concentration of the Dirichlet distribution",
    )
    classes_per_client: int = option(default=2, minimum=1, help="classes of each client")
    ways: int = option(default=3, minimum=1, help="mean number of classes per client")
    ways_stdev: int = option(default=2, help="n is drawn from ways ± ways-stdev")
    shots: int = option(default=100, minimum=1, help="mean number of training samples per class")
    shots_stdev: int = option(default=0, help="k is drawn from shots ± shots-stdev")
    clients_per_domain: str = option(
        default="",
        help=(
            'the number of clients of each domain, such as "1,4,2,2,1"; "": the domains are dealt'
            " out in turn"
        ),
    )
    total_samples: int = option(
        default=0,
        help=(
            'how many samples are drawn before they are divided, with test-from = "official" or'
            ' "official-all" from the training part alone; 0: all'
        ),
    )
    train_samples: int = option(
        default=0,
        help=(
            "at most that many training samples per client, balanced over its classes unless the"
            " partition shapes their proportions; 0: all"
        ),
    )
    test_samples: int = option(
        default=0,
        help="at most that many test samples per client; 0: all",
    )
    test_from: str = option(
        default="split",
        choices=("split", "balanced", "official", "official-own", "official-all", KEYED),
        site=(
            "[which samples are for testing](data.md#training-and-test-samples); only at a site"
            " with data of its own, where the run's value does not count; if not set, `split`, or"
            " with `require-dp` `keyed`"
        ),
        help=(
            "on which samples a client is tested. split: a part of its own share; balanced:"
            " samples of its domain on which nobody trains, each class equally often; official:"
            " the data set's test part, of the client's classes; official-own: the samples of the"
            " test part that are in the client's share; official-all: the whole test part; keyed:"
            " at a site with data of its own, those that a keyed hash picks, so that one sample"
            " more moves no other"
        ),
    )
    train_fraction: float = option(
        default=0.75,
        above=0,
        maximum=0.99,
        site=(
            "the part of its own samples that is for training; only at a site with data of its"
            " own, where the run's value does not count; if not set, 0.75"
        ),
        help=(
            'test-from = "split": part of a client\'s share used for training; "balanced": part of'
            " all samples"
        ),
    )
    validation_fraction: float = option(
        default=0.0,
        maximum=0.9,
        site=(
            "the part of its training samples that is for validation; only at a site with data of"
            " its own, where the run's value does not count; if not set, 0"
        ),
        help=(
            "part of a client's training samples set aside to choose by (best round, early"
            " stopping); 0: chosen on test data; a split `validation` of your own data is used as"
            " it stands"
        ),
    )
    positive_rate: float = option(
        default=1.0,
        above=0,
        maximum=1,
        affects="data",
        with_dp=Needed(1.0, "terms of unlabelled samples compare samples"),
        help=(
            "part of each class's training samples that a client has labelled; below 1:"
            " semi-supervised"
        ),
    )


class ModelSettings(Table):
    """The networks."""

    models: str = option(
        default="small3",
        choices=GROUPS,
        several=True,
        or_like=OTHER_NETWORKS,
        or_words=OTHER_NETWORKS_IN_WORDS,
        help=(
            "group; client i gets architecture i mod group size (`protofl list groups`); or a"
            ' list of architectures and MODULE:CLASS of your own, "cnn4,mynets:TinyViT"'
        ),
    )
    arch: str = architecture_option(
        site="its network, whatever the others have; if not set, the run's",
        help="one architecture for this client in place of the group's; meant for the node config",
    )
    feature_dim: int = option(
        default=64,
        minimum=1,
        maximum=16384,
        help="D, the width of the features that all architectures share",
    )
    head: str = option(
        default="trainable",
        choices=(*HEADS, ORTHOGONAL_SHARED),
        help=(
            "trainable; orthogonal-frozen: the last layer is orthogonal and never trained"
            " (FedProto-UH); orthogonal-shared: the same, with one layer for all clients"
        ),
    )
    initial_weights: str = option(
        default="auto",
        choices=("auto", "own", "shared"),
        help=(
            "shared: clients of one architecture begin with the same weights; own: each client"
            " draws its own first weights; auto: shared in algorithms that share weights of the"
            " clients' models or of a part (FedAvg, FedPer, FedRep, LG-FedAvg, FedGen, FedGH, …),"
            " own in all others"
        ),
    )
    backbones: str = option(
        default="auto",
        help=(
            "frozen networks whose features a small trained projection gets, instead of models:"
            " names, or auto (the embedded ones for fedpcl, mpft, gaussian), or none. With none,"
            " mpft and gaussian take vectors that you have made yourself, as they are"
        ),
    )
    norm: str = option(
        default="batch",
        choices=("batch", "group"),
        help=(
            "batch: normalisation as in the papers; group: GroupNorm in its place, which"
            " differential privacy needs"
        ),
    )


class TrainingSettings(Table):
    """Local training and evaluation."""

    local_epochs: int = option(
        default=1,
        at_most="max-epochs",
        help="passes over the client's training data in a round; 0: nothing is trained",
    )
    local_steps: int = option(
        default=0,
        at_most="max-steps",
        with_dp=Needed(0, "the privacy ledger counts epochs"),
        help=(
            "how many steps a client trains in a round, in place of local-epochs and whatever its"
            " number of samples; 0: epochs"
        ),
    )
    batch_size: int = option(
        default=10,
        minimum=1,
        at_most="max-batch-size",
        help="training samples of a step",
    )
    drop_last: bool = option(
        default=False,
        help=(
            "true: leave out an epoch's last batch if it is smaller than the others; it may be too"
            " small for batch normalisation"
        ),
    )
    augment: str = option(
        default="none",
        choices=("none", "flip", "rotate"),
        several=True,
        help=(
            "changes of training images, drawn anew for each batch: none, flip (left and right),"
            ' rotate (up to 30°), or "flip,rotate"'
        ),
    )
    optimizer: str = option(default="sgd", choices=("sgd", "adam"), help="of local training")
    lr: float = option(default=0.05, above=0, help="learning rate")
    lr_schedule: str = option(
        default="constant",
        choices=("constant", "cosine", "step"),
        help=(
            "the learning rate over the rounds: constant; cosine: falls from lr towards 0; step:"
            " is multiplied by lr-decay after every lr-step rounds"
        ),
    )
    lr_step: int = option(
        default=10,
        minimum=1,
        help=("with lr-schedule = step: rounds between two changes of the rate"),
    )
    lr_decay: float = option(
        default=0.1, above=0, maximum=1, help="with lr-schedule = step: the factor of each change"
    )
    momentum: float = option(default=0.5, maximum=0.9999, help="of the optimizer sgd")
    weight_decay: float = option(
        default=0.0,
        help="the optimizer's L2 penalty",
    )
    keep_optimizer: bool = option(
        default=False,
        help=(
            "true: a client's optimizer state lives on from round to round; false: a new optimizer"
            " each round, as in the papers"
        ),
    )
    eval_batch_size: int = option(
        default=250,
        minimum=1,
        at_most="max-batch-size",
        help="batch size of the passes without gradient: evaluation and prototypes",
    )
    predict_among: str = option(
        default="all",
        choices=("all", "own"),
        with_dp=Needed("all", "predictions would show which classes a client has"),
        help=(
            "which prototypes predict. all: all global prototypes; own: those of the classes on"
            " which the client has trained"
        ),
    )
    pu_weight: float = option(
        default=0.0,
        help=(
            "weight of FedPU's risk of the unlabelled samples (positive-rate below 1); 0: nothing"
            " is learned from these samples"
        ),
    )
    pu_risk: str = option(
        default="unbiased",
        choices=("unbiased", "non-negative"),
        help=(
            "how FedPU's risk (pu-weight) is estimated: unbiased, as in FedPU, or non-negative, in"
            " which a class's part that falls below 0 counts as 0"
        ),
    )


PER_UNIT = {"sample": "", "person": " per person"}
"""What is written behind ε, by ``dp``: whose privacy it bounds."""


class PrivacySettings(Table):
    """Protections of a client's data, beyond keeping them at the client (`privacy`)."""

    min_class_samples: int = option(
        default=1,
        minimum=1,
        help=(
            "a client sends no prototype, count or mean output of a class or cluster of fewer"
            " training samples than this, and no figure over fewer test samples than this, or than"
            " 20; 1: no limit; node config: min-class-samples raises it"
        ),
    )
    dp: str = option(
        default="none",
        choices=("none", "sample", "person"),
        help=(
            "differential privacy in all that a client sends: sample (of each sample), person (of"
            " all samples of a person together, as the column `client` of its data says), none"
        ),
    )
    dp_epsilon: float = option(
        default=8.0,
        above=0,
        help="ε of the whole run, which no client exceeds; the noise is chosen accordingly",
    )
    dp_delta: float = option(
        default=1e-05,
        above=0,
        maximum=0.1,
        help=(
            "the δ that belongs to ε; choose it well below 1 / number of training samples, or of"
            " persons"
        ),
    )
    dp_clip: float = option(
        default=1.0,
        minimum=1e-06,
        maximum=1000000.0,
        help="the gradient of a sample, or of a person, is cut to this length",
    )
    dp_feature_clip: float = option(
        default=1.0,
        minimum=1e-06,
        maximum=1000000.0,
        help="a sample's features are cut to this length in class sums",
    )
    dp_honest_sites: int = option(
        default=1,
        minimum=1,
        maximum=1000,
        at_most="max-honest-sites",
        help=(
            "with dp and secagg, for Gaussian heads: how many sites of each sum must be honest for"
            " ε to hold. Together these add as much noise as one site alone would add; 1: each site"
            " adds all of the noise, and ε relies on nobody else"
        ),
    )
    secagg: bool = option(
        default=False,
        help=(
            "secure aggregation: the server learns sums over the clients, no single upload or"
            " figure; for algorithms that average; node config: require-secagg"
        ),
    )
    secagg_threshold: float = option(
        default=0.67,
        above=0.5,
        maximum=1,
        affects="waiting",
        help=(
            "which part of a round's clients, at least three, must stay to its end; fewer cannot"
            " unmask an upload (but if all clients except one subtract their own uploads from the"
            " sum, the last one's upload is left)"
        ),
    )

    @property
    def sums_only(self) -> bool:
        """Whether the server learns only sums over the clients: of none its upload or figures."""
        return self.secagg


class NoiseSettings(Table):
    """Noise of papers' experiments, which guarantees nothing (`privacy/release.py`)."""

    prototype_noise: str = option(
        default="none",
        choices=("none",),
        or_like=NOISE,
        or_words="gaussian S P, laplace S P",
        help=(
            'noise on what a client sends of classes, "gaussian S P" or "laplace S P": (1 - P) x +'
            " noise of scale S (FedPCL, FedPLVM)"
        ),
    )
    image_noise: str = option(
        default="none",
        choices=("none",),
        or_like=NOISE,
        or_words="gaussian S P, laplace S P",
        help="the same noise on training images scaled to -1..1, drawn once (FedPCL)",
    )
    gradient_noise: float = option(
        default=0.0,
        with_dp=Needed(0.0, "the noise follows from dp-epsilon"),
        help=(
            "training by DP-SGD with the noise of this ε over all rounds, while everything else is"
            " sent as it is (FedPLVM); 0: no noise"
        ),
    )


class MachineSettings(Table):
    """The machine a client runs on."""

    device: str = option(
        default="auto",
        choices=("auto", "cpu", "cuda", "mps"),
        or_like=DEVICE,
        or_words="cuda:N, xpu",
        affects="machine",
        site="`auto`, `cpu`, `cuda`, `cuda:1` …; if not set, the run's",
        help="auto (CUDA when present), cpu, cuda, cuda:0, …",
    )
    precision: str = option(
        default="fp32",
        choices=("fp32", "tf32"),
        affects="machine",
        help=(
            "on a GPU: fp32, or tf32, which is faster in large networks and rounds factors to 10"
            " bits"
        ),
    )
    threads: int = option(
        default=0,
        affects="machine",
        help="intra-op threads of a client; 0: the CPUs Flower grants it, else torch's own choice",
    )
    state_dir: str = option(
        default="",
        affects="machine",
        site=(
            "the folder of its model, privacy ledgers, approvals and log; if not set, `runs`;"
            " absolute with `require-dp`"
        ),
        help=(
            'where a client keeps its private model; "": under the run\'s own folder. At a site the'
            " run's state-dir, data-dir and cache-dir do not count, only those of its node config"
        ),
    )


class StudySettings(Table):
    """The study that a run belongs to (`experiment/study.py`)."""

    study: str = option(
        default="",
        affects="waiting",
        help='the study\'s name; "": the run belongs to none',
    )
    study_sites: str = option(
        default="",
        affects="waiting",
        help=(
            "the sites that may take part, each with the key that `protofl site key` prints:"
            ' "north:KEY, south:KEY"; "": any site'
        ),
    )
    study_until: str = option(
        default="", affects="waiting", help=('the study\'s last day: "2027-06-30"')
    )
    study_runs: int = option(
        default=0,
        affects="waiting",
        help="in how many runs a site takes part; 0: any number",
    )
    study_purpose: str = option(
        default="",
        affects="waiting",
        help="a sentence for the people who approve the study",
    )
    study_by: str = option(
        default="",
        affects="waiting",
        help=(
            "who has signed the study, NAME:KEY; `protofl study sign` writes this and the next key"
        ),
    )
    study_signature: str = option(
        default="",
        affects="waiting",
        help="the signature over all settings but run-name, resume and out-dir",
    )


@dataclass(frozen=True)
class Sections:
    """The settings of a run that no algorithm owns."""

    run: RunSettings
    federation: FederationSettings
    bounds: BoundsSettings
    data: DataSettings
    model: ModelSettings
    training: TrainingSettings
    privacy: PrivacySettings
    noise: NoiseSettings
    machine: MachineSettings
    study: StudySettings


SECTIONS: dict[str, type] = get_type_hints(Sections)


def keys_that_change(*kinds: Affects) -> frozenset[str]:
    """Return the keys of the general settings whose ``affects`` is one of ``kinds``.

    Hyper-parameters of algorithms are not among them: they all change the result.
    """
    keys = set()
    for section in SECTIONS.values():
        for field in fields(section):
            if field.metadata["affects"] in kinds:
                keys.add(key_of(field.name))
    return frozenset(keys)


PROMISE_OF_SUMS = (
    "without noise (dp) sums protect from a server that follows the protocol, and from whoever gets"
    " its disks; with noise also from a hostile server, up to ε"
)
DANGER_OF_WEIGHTS = (
    "a server that chooses the weights can read single samples from uploads, and from sums of them"
)


def _on_honest_sites(settings: Mapping[str, Scalar]) -> str:
    """Return a clause that says how many sites of a sum must be honest for ε to hold.

    It begins with a space. "" if a site adds enough noise by itself.
    """
    honest_sites = settings.get("dp-honest-sites", 1)
    if honest_sites == 1:
        return ""
    return f" as long as {honest_sites} sites of each sum are honest, which share the noise,"


def protections(settings: Mapping[str, Scalar]) -> list[str]:
    """Return a line for people on each protection of the clients' data that a run asks for.

    ``settings`` are a run's, by key; a site may protect more. A setting that is missing has its
    default: no protection.
    """
    lines = []
    min_class_samples = settings.get("min-class-samples", 1)
    if min_class_samples != 1:
        fewest_tested = max(FEWEST_TESTED, int(min_class_samples))
        lines.append(
            "small classes: nothing is sent of classes and clusters of fewer than"
            f" {min_class_samples} training samples. No figure is sent of fewer than"
            f" {fewest_tested} test samples. Metrics count only classes with at least"
            f" {fewest_tested} test samples"
        )
    if settings.get("secagg", False):
        lines.append(
            "secure aggregation: the server learns sums over the clients, not one client's upload,"
            f" figures or classes; {PROMISE_OF_SUMS}. As the server sees no single upload, it"
            " cannot bound what one site sends (liars)"
        )
    if settings.get("dp", "none") != "none":
        units = {"sample": "sample of a client", "person": "person of a client (all samples of it)"}
        lines.append(
            f"differential privacy: at most ε = {settings['dp-epsilon']},"
            f" δ = {settings['dp-delta']} for each {units[str(settings['dp'])]},"
            " of all that the client sends,"
            f"{_on_honest_sites(settings)}"
            " with noise: weights, prototypes, class moments, numbers of right predictions;"
            " not covered: numbers of samples, times of replies."
            " A round's line shows ε as planned for the client that the run costs most."
            " Clients may also tell the ε that their own ledgers count for this run: then the"
            " largest of these stands beside it"
        )
    return lines
