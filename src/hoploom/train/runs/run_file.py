"""The keys of run.toml, as frozen dataclasses, section by section.

Each key is declared once, with its default, its rule and its help; the reader, the template of `hoploom init` and the
table in docs/training.md are made from them. `only` limits a key to some choices of another.
"""

# ruff: noqa: RUF009  (key() is dataclasses.field)

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hoploom.config import rules
from hoploom.config.rules import (
    MOST_SEED,
    REQUIRED,
    Headings,
    Key,
    KeyCondition,
    accepted,
    key,
    key_of,
    keys_in,
    problem,
)
from hoploom.errors import ConfigError
from hoploom.gpu.placement import NARROW, read_features, read_topology
from hoploom.nn.models import KINDS
from hoploom.train.checkpoint import MINUTES
from hoploom.train.loggers import NAMES

NODE_KINDS = ("node-classification", "multi-label", "node-regression")
LINKS = "link-prediction"
USUAL_THREADS = 2  # per process, that make batches

OF_NODES = KeyCondition("task.kind", NODE_KINDS)
OF_CLASSES = KeyCondition("task.kind", ("node-classification",))
OF_NUMBERS = KeyCondition("task.kind", ("node-regression",))
OF_LINKS = KeyCondition("task.kind", (LINKS,))
DRAWN_LINKS = KeyCondition("task.links", absent=True)
BUILT_IN = KeyCondition("model.factory", absent=True)
OWN = KeyCondition("model.factory")
ATTENTION = KeyCondition("model.name", ("gat", "rgat"))
CURVES = KeyCondition("scheduler.name", ("cosine", "plateau", "warmup-cosine"))
WITH_STORE = KeyCondition("store")
PLACED = KeyCondition("placement.features")
CUTS = KeyCondition("scheduler.name", ("step", "plateau"))

RELATION_FANOUTS = rules.table_of(
    rules.FANOUTS, 'a table of lists by relation, e.g. { "author writes paper" = [5, 5] }'
)
TOPOLOGY = accepted('"cuda", "host" or "auto"', read_topology, words=("cuda", "host", "auto"))
FEATURES = accepted(
    '"cuda", "host", "auto", a share such as "20%" or 0.2, or a size such as "4GB"',
    read_features,
    kinds=str | float,
    words=("cuda", "host", "auto"),
)


@dataclass(frozen=True)
class TaskSection:
    """The task, and the nodes or links that the model learns it on."""

    kind: str = key("node-classification", "what to learn", rules.choice(*NODE_KINDS, LINKS))
    node_type: str | None = key(
        None,
        "the node type to train on; needed only if several types have splits",
        rules.TEXT,
        example="paper",
        only=OF_NODES,
    )
    label: str = key("y", "the field that holds the labels", rules.TEXT, only=OF_NODES)
    num_classes: int | None = key(
        None, "number of classes; default: counted from the labels", rules.whole(2), example=16, only=OF_CLASSES
    )
    train: str = key("train", "the split to train on", rules.TEXT, only=OF_NODES)
    val: str = key(
        "val",
        'the split to validate on; it picks the best checkpoint; "" turns validation off',
        rules.TEXT_OR_EMPTY,
        only=OF_NODES,
    )
    test: str = key("test", 'the split to evaluate at the end; "" turns it off', rules.TEXT_OR_EMPTY, only=OF_NODES)
    loss: str = key(
        "mse", "the loss; mse: the squared error; mae: the absolute error", rules.choice("mse", "mae"), only=OF_NUMBERS
    )
    relation: str | None = key(
        None, "the relation whose links the model predicts", rules.TEXT, example="author writes paper", only=OF_LINKS
    )
    reverse: str | None = key(
        None,
        'the relation that loses the reverse of held-out links; default: all that lead back; "": none',
        rules.TEXT_OR_EMPTY,
        example="",
        only=OF_LINKS,
    )
    links: Path | None = key(
        None,
        "a folder with the links of train, val and test; default: the relation's edges are split at random",
        rules.PATH,
        example="links",
        only=OF_LINKS,
    )
    val_share: float = key(0.05, "of links: share of the edges held out for validation", rules.SHARE, only=DRAWN_LINKS)
    test_share: float = key(0.1, "of links: share of the edges held out for the test", rules.SHARE, only=DRAWN_LINKS)
    negatives: float = key(1.0, "random negative links per true link", rules.number(open_ends=True), only=OF_LINKS)
    strict_negatives: bool = key(False, "negative links are never edges of the graph", rules.FLAG, only=OF_LINKS)


@dataclass(frozen=True)
class ModelSection:
    """The model: a built-in one by name, or your own from a factory function."""

    name: str = key("sage", "the built-in model", rules.choice(*KINDS), only=BUILT_IN)
    hidden: int = key(128, "width of the hidden layers", rules.whole(1), only=BUILT_IN)
    layers: int | None = key(
        None, "number of layers; it must equal the number of fanouts", rules.whole(1), example=2, only=BUILT_IN
    )
    dropout: float = key(0.0, "share of the hidden values that are dropped in training", rules.SHARE, only=BUILT_IN)
    heads: int = key(4, "number of attention heads", rules.whole(1), only=ATTENTION)
    norm: bool = key(False, "layer norm before every layer", rules.FLAG, only=BUILT_IN)
    residual: bool = key(
        False,
        "residual connections, with a linear layer before the first layer and after the last",
        rules.FLAG,
        only=BUILT_IN,
    )
    factory: str | None = key(
        None,
        "a function that makes your own model: factory(store, num_outputs, **options)",
        rules.FUNCTION,
        example="my_model:make",
    )
    options: dict[str, Any] = key({}, "further arguments for the factory", rules.TABLE, only=OWN)
    modules: Path | None = key(
        None,
        "the folder with the factory's module; default: the folder of this file",
        rules.PATH,
        example=".",
        only=OWN,
    )


@dataclass(frozen=True)
class LoaderSection:
    """The sampling of batches."""

    fanouts: tuple[int, ...] = key(
        (15, 10), "neighbours to sample per node, one number per layer; -1: all", rules.FANOUTS
    )
    relation_fanouts: dict[str, tuple[int, ...]] = key(
        {}, "other fanouts for some relations", RELATION_FANOUTS, example={"author writes paper": (5, 5)}
    )
    batch_size: int = key(1024, "seeds per step, over all processes together", rules.whole(1))
    mode: str = key(
        "blocks",
        "blocks: every layer samples anew; subgraph: one subgraph, as in PyG",
        rules.choice("blocks", "subgraph"),
    )
    threads: int | None = key(
        None,
        "threads per process that build batches; default: 2, or 1 if a process has one core",
        rules.whole(0, 1024),
        example=4,
    )
    replace: bool = key(False, "sample with replacement", rules.FLAG)
    labor: bool = key(
        False, "LABOR sampling: batches have fewer distinct nodes, because seeds share neighbours", rules.FLAG
    )
    weighted: bool = key(False, "sample by the edge weights of the store", rules.FLAG)
    temporal: str | None = key(
        None,
        "sample only edges not newer than their seed; uniform: any of them; last: the newest",
        rules.choice("uniform", "last"),
        example="uniform",
        only=OF_NODES,
    )
    eval_fanouts: tuple[int, ...] | None = key(
        None, "fanouts for evaluation; default: those of training", rules.FANOUTS, example=(-1, -1)
    )
    eval_batch_size: int | None = key(
        None, "seeds per step in evaluation; default: batch_size", rules.whole(1), example=4096
    )

    def num_threads(self, num_cores: int) -> int:
        """Return the number of threads that make the batches of a process with this many cores."""
        return min(USUAL_THREADS, num_cores) if self.threads is None else self.threads


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer of the weights."""

    name: str = key("adam", "the optimizer", rules.choice("adam", "adamw", "sgd"))
    lr: float = key(0.003, "learning rate", rules.number(open_ends=True))
    weight_decay: float = key(0.0, "weight decay", rules.number())
    momentum: float = key(0.0, "momentum of SGD", rules.SHARE, only=KeyCondition("optimizer.name", ("sgd",)))


@dataclass(frozen=True)
class SchedulerSection:
    """The schedule of the learning rate."""

    name: str = key(
        "none", "the schedule of the learning rate", rules.choice("none", "cosine", "step", "plateau", "warmup-cosine")
    )
    warmup: float = key(
        0.05,
        "share of all steps used for warm-up",
        rules.SHARE,
        only=KeyCondition("scheduler.name", ("warmup-cosine",)),
    )
    every: int = key(
        10, "epochs between two reductions", rules.whole(1), only=KeyCondition("scheduler.name", ("step",))
    )
    wait: int = key(
        3,
        "epochs without improvement before a reduction",
        rules.whole(0),
        only=KeyCondition("scheduler.name", ("plateau",)),
    )
    factor: float = key(
        0.5, "a reduction multiplies the learning rate by this", rules.number(0, 1, open_ends=True), only=CUTS
    )
    min_lr: float = key(0.0, "the lowest learning rate", rules.number(), only=CURVES)


@dataclass(frozen=True)
class TrainSection:
    """The length and the manner of training."""

    epochs: int = key(10, "passes over all training seeds", rules.whole(1))
    processes: int = key(1, "processes on this machine; torchrun and Slurm override it", rules.whole(1, 4096))
    device: str = key(
        "auto", "auto: one GPU per process if there are GPUs, else the CPU", rules.choice("auto", "cpu", "cuda")
    )
    precision: str = key(
        "fp32", "the floating-point type that the model computes in", rules.choice("fp32", "bf16", "fp16")
    )
    accumulate: int = key(1, "batches per optimizer step", rules.whole(1))
    clip_norm: float | None = key(
        None, "the largest gradient norm; larger gradients are scaled down", rules.number(open_ends=True), example=1.0
    )
    monitor: str | None = key(
        None,
        "the metric that picks the best checkpoint; default: the first one of the task",
        rules.TEXT,
        example="accuracy",
    )
    patience: int | None = key(None, "stop after this many epochs without improvement", rules.whole(1), example=5)
    max_steps: int | None = key(None, "stop after this many optimizer steps", rules.whole(1), example=10_000)
    checkpoint_minutes: float = key(
        MINUTES,
        "minutes between two checkpoints within an epoch; the first step saves one, too; 0 saves only after epochs",
        rules.number(),
    )
    checkpoint_every: int | None = key(
        None, "steps between two checkpoints, in addition to checkpoint_minutes", rules.whole(1), example=1000
    )
    whole_steps: bool = key(False, "run each step as CUDA graphs; needs one process and [placement]", rules.FLAG)
    margin: float = key(
        0.1, "extra buffer space for whole_steps, as a share of the largest sampled batch", rules.number()
    )


@dataclass(frozen=True)
class ClusterSection:
    """The place of the graph, if it is not on this machine alone."""

    servers: tuple[str, ...] | None = key(
        None,
        "graph servers, for remote data (with store) or whole batches; default: hoploom launch's, or one per host",
        rules.ADDRESSES,
        example=("10.0.0.1:7000", "10.0.0.2:7000"),
    )
    parts: tuple[int, ...] | None = key(
        None,
        "the parts that this host maps; default: its share",
        rules.ids("parts", least=1),
        example=(0,),
        only=WITH_STORE,
    )
    topology: str = key(
        "auto",
        "local: every host maps all edges; parted: only its own; auto: local if they fit",
        rules.choice("auto", "local", "parted"),
        only=WITH_STORE,
    )
    locality: bool = key(False, "give each process seeds from the parts of its own host", rules.FLAG, only=WITH_STORE)
    cache: str | None = key(
        None,
        "cache in each process for the most visited feature rows of other hosts",
        rules.SHARE_OR_SIZE,
        example="20%",
    )
    look_ahead: int | None = key(
        None,
        "number of batches whose remote rows are fetched together",
        rules.whole(1, 1024),
        example=4,
        only=WITH_STORE,
    )
    timeout: float | None = key(
        None, "seconds that a request may take, with all attempts", rules.number(open_ends=True), example=60.0
    )
    token_file: Path | None = key(None, "the file with the token of the servers", rules.PATH, example="token")
    ca: Path | None = key(None, "the CA of the servers' certificates; it turns TLS on", rules.PATH, example="ca.pem")
    cert: Path | None = key(None, "the client certificate to show to the servers", rules.PATH, example="client.pem")
    key: Path | None = key(None, "the private key of cert", rules.PATH, example="client.key")  # last: it hides key()


@dataclass(frozen=True)
class PlacementSection:
    """Graph data that a GPU reads directly."""

    topology: str | None = key(
        None,
        "where edges are; cuda: GPU memory; host: pinned host memory; auto: what fits; default: the CPU samples",
        TOPOLOGY,
        example="cuda",
        only=WITH_STORE,
    )
    features: str | float | None = key(
        None,
        "where feature rows are, likewise; 20%: so many in GPU memory, others in host memory",
        FEATURES,
        example="20%",
        only=WITH_STORE,
    )
    dtype: str | None = key(
        None,
        "store float features in a narrower type; digits are lost",
        rules.choice(*NARROW),
        example="int8",
        only=PLACED,
    )


@dataclass(frozen=True)
class OutputSection:
    """The places of the results."""

    folder: Path = key(Path("run"), "the folder for checkpoints, journal and result", rules.PATH)
    loggers: tuple[str, ...] | None = key(
        None,
        "send losses and metrics there, too; default: TensorBoard, if it is installed",
        rules.choices(*NAMES),
        example=("tensorboard",),
    )
    tensorboard: bool = key(
        True,
        "deprecated: use loggers; false means loggers = []",
        rules.FLAG,
        only=KeyCondition("output.loggers", absent=True),
    )


@dataclass(frozen=True)
class RunFile:
    """The settings of a run.

    >>> run_file = read_run_file("run.toml", ["train.epochs=3"])
    >>> run_file.train.epochs
    3
    """

    store: Path | None = key(
        REQUIRED,
        "the graph: the folder of a store; optional if servers build the batches",
        rules.PATH,
        example="graph.store",
    )
    memory: str | None = key(
        None,
        "for a graph larger than memory: how much of it each process may hold; the rest is read from disk when needed",
        rules.SIZE,
        only=WITH_STORE,
        example="6GB",
    )
    scratch: Path | None = key(
        None,
        "with memory: a folder on disk where the rows of the next batches are stored together, to be read faster",
        rules.PATH,
        only=WITH_STORE,
        example="/mnt/nvme",
    )
    seed: int = key(0, "all random numbers derive from it; another seed gives another run", rules.whole(0, MOST_SEED))
    task: TaskSection = field(default_factory=TaskSection)
    model: ModelSection = field(default_factory=ModelSection)
    loader: LoaderSection = field(default_factory=LoaderSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    train: TrainSection = field(default_factory=TrainSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    output: OutputSection = field(default_factory=OutputSection)
    where: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)  # key -> "run.toml:7"

    def problem(self, name: str, message: str) -> ConfigError:
        """Return an error about a key, which begins with the line that set it."""
        return problem(self.where, name, message)


HEADINGS: Headings = {"": RunFile} | {  # type: ignore[assignment]
    section.name: section.default_factory for section in fields(RunFile) if is_dataclass(section.default_factory)
}
FIELDS: Mapping[str, Field[Any]] = {  # every key by its full name, as messages and --set call it: `loader.fanouts`
    f"{section}.{name}".removeprefix("."): described
    for section, owner in HEADINGS.items()
    for name, described in keys_in(owner).items()
}
KEYS: Mapping[str, Key] = {name: key_of(described) for name, described in FIELDS.items()}
