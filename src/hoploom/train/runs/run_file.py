"""run.toml: everything that a run follows from, as frozen dataclasses, section by section.

Each key stands here once, with its default, its rule and its help; the reader, the template of `hoploom init` and the
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
    Only,
    accepted,
    key,
    key_of,
    keys_in,
    problem,
)
from hoploom.errors import ConfigError
from hoploom.gpu.place.request import NARROW, read_features, read_topology
from hoploom.nn import KINDS
from hoploom.train.checkpoint import MINUTES

NODE_KINDS = ("node-classification", "multi-label", "node-regression")
LINKS = "link-prediction"
USUAL_THREADS = 2  # per process, that make batches

OF_NODES = Only("task.kind", NODE_KINDS)
OF_CLASSES = Only("task.kind", ("node-classification",))
OF_NUMBERS = Only("task.kind", ("node-regression",))
OF_LINKS = Only("task.kind", (LINKS,))
BUILT_IN = Only("model.factory", absent=True)
OWN = Only("model.factory")
ATTENTION = Only("model.name", ("gat", "rgat"))
CURVES = Only("scheduler.name", ("cosine", "plateau", "warmup-cosine"))
WITH_STORE = Only("store")
PLACED = Only("placement.features")
CUTS = Only("scheduler.name", ("step", "plateau"))

RELATION_FANOUTS = rules.table_of(
    rules.FANOUTS, 'a table of lists by relation, e.g. { "author writes paper" = [5, 5] }'
)
TOPOLOGY = accepted('"cuda", "host" or "auto"', read_topology, words=("cuda", "host", "auto"))
FEATURES = accepted(
    '"cuda", "host", "auto", "spread", a share such as "20%" or 0.2, or a size such as "4GB"',
    read_features,
    kinds=str | float,
    words=("cuda", "host", "auto", "spread"),
)


@dataclass(frozen=True)
class TaskSection:
    """What is learned, and on which nodes or links."""

    kind: str = key("node-classification", "what is learned", rules.choice(*NODE_KINDS, LINKS))
    node_type: str | None = key(
        None, "whose nodes; may be left out where one type has the splits", rules.TEXT, example="paper", only=OF_NODES
    )
    label: str = key("y", "the field with the labels", rules.TEXT, only=OF_NODES)
    num_classes: int | None = key(
        None, "classes; counted in the labels where left out", rules.whole(2), example=16, only=OF_CLASSES
    )
    train: str = key("train", "the split to train on", rules.TEXT, only=OF_NODES)
    val: str = key("val", 'the split that picks the best checkpoint; "": none', rules.TEXT_OR_EMPTY, only=OF_NODES)
    test: str = key("test", 'the split that is evaluated at the end; "": none', rules.TEXT_OR_EMPTY, only=OF_NODES)
    loss: str = key("mse", "squared or absolute error", rules.choice("mse", "mae"), only=OF_NUMBERS)
    relation: str | None = key(
        None, "the relation whose links are learned", rules.TEXT, example="author writes paper", only=OF_LINKS
    )
    reverse: str | None = key(
        None,
        "the relation that holds the same links in the other direction",
        rules.TEXT,
        example="paper rev_writes author",
        only=OF_LINKS,
    )
    links: Path | None = key(
        None,
        "a folder with train.npy, val.npy, test.npy, each [2, n] int64; left out: the relation's own edges are split",
        rules.PATH,
        example="links",
        only=OF_LINKS,
    )
    val_share: float = key(0.05, "share of the edges held out of the graph to validate", rules.SHARE, only=OF_LINKS)
    test_share: float = key(0.1, "share of the edges held out of the graph to test", rules.SHARE, only=OF_LINKS)
    negatives: float = key(
        1.0, "random links per link, as negative examples", rules.number(open_ends=True), only=OF_LINKS
    )
    strict_negatives: bool = key(False, "negative examples are never edges of the graph", rules.FLAG, only=OF_LINKS)


@dataclass(frozen=True)
class ModelSection:
    """What learns it: a built-in model by name, or your own by factory."""

    name: str = key("sage", "the built-in model", rules.choice(*KINDS), only=BUILT_IN)
    hidden: int = key(128, "width of the hidden layers", rules.whole(1), only=BUILT_IN)
    layers: int | None = key(None, "layers; one per fanout", rules.whole(1), example=2, only=BUILT_IN)
    dropout: float = key(0.0, "share of the hidden values dropped while training", rules.SHARE, only=BUILT_IN)
    heads: int = key(4, "attention heads", rules.whole(1), only=ATTENTION)
    norm: bool = key(False, "a layer norm before every layer", rules.FLAG, only=BUILT_IN)
    residual: bool = key(
        False, "every layer adds to its input, between a linear layer at both ends", rules.FLAG, only=BUILT_IN
    )
    factory: str | None = key(
        None,
        "your own model instead: factory(store, num_outputs, **options)",
        rules.FUNCTION,
        example="my_model:make",
    )
    options: dict[str, Any] = key({}, "further arguments of the factory", rules.TABLE, only=OWN)
    modules: Path | None = key(
        None, "the folder with the factory's module; left out: that of this file", rules.PATH, example=".", only=OWN
    )


@dataclass(frozen=True)
class LoaderSection:
    """How batches are sampled."""

    fanouts: tuple[int, ...] = key((15, 10), "picks per node, one count per layer; -1: all neighbours", rules.FANOUTS)
    relation_fanouts: dict[str, tuple[int, ...]] = key(
        {}, "other fanouts for some relations", RELATION_FANOUTS, example={"author writes paper": (5, 5)}
    )
    batch_size: int = key(1024, "seeds of a step, over all processes together", rules.whole(1))
    mode: str = key("blocks", "blocks: each layer samples afresh; subgraph: as PyG", rules.choice("blocks", "subgraph"))
    threads: int | None = key(
        None,
        "threads per process that make batches; left out: 2, or 1 where a process has one core",
        rules.whole(0, 1024),
        example=4,
    )
    replace: bool = key(False, "pick with replacement", rules.FLAG)
    labor: bool = key(False, "LABOR sampling: seeds share their picks, so batches hold fewer nodes", rules.FLAG)
    weighted: bool = key(False, "pick by the store's edge weights", rules.FLAG)
    temporal: str | None = key(
        None,
        "pick only edges that are not younger than their seed",
        rules.choice("uniform", "last"),
        example="uniform",
        only=OF_NODES,
    )
    eval_fanouts: tuple[int, ...] | None = key(
        None, "fanouts to evaluate with; left out: fanouts", rules.FANOUTS, example=(-1, -1)
    )
    eval_batch_size: int | None = key(
        None, "seeds of a batch to evaluate; left out: batch_size", rules.whole(1), example=4096
    )

    def num_threads(self, num_cores: int) -> int:
        """What makes a process's batches, where the process has so many cores."""
        return min(USUAL_THREADS, num_cores) if self.threads is None else self.threads


@dataclass(frozen=True)
class OptimizerSection:
    """How weights are updated."""

    name: str = key("adam", "the optimizer", rules.choice("adam", "adamw", "sgd"))
    lr: float = key(0.003, "learning rate", rules.number(open_ends=True))
    weight_decay: float = key(0.0, "weight decay", rules.number())
    momentum: float = key(0.0, "momentum", rules.SHARE, only=Only("optimizer.name", ("sgd",)))


@dataclass(frozen=True)
class SchedulerSection:
    """How the learning rate changes."""

    name: str = key("none", "the schedule", rules.choice("none", "cosine", "step", "plateau", "warmup-cosine"))
    warmup: float = key(
        0.05, "share of all steps that warms up", rules.SHARE, only=Only("scheduler.name", ("warmup-cosine",))
    )
    every: int = key(10, "epochs between two cuts", rules.whole(1), only=Only("scheduler.name", ("step",)))
    wait: int = key(
        3, "epochs without a better validation before a cut", rules.whole(0), only=Only("scheduler.name", ("plateau",))
    )
    factor: float = key(0.5, "what a cut multiplies by", rules.number(0, 1, open_ends=True), only=CUTS)
    min_lr: float = key(0.0, "the lowest learning rate", rules.number(), only=CURVES)


@dataclass(frozen=True)
class TrainSection:
    """How long and how."""

    epochs: int = key(10, "passes over all training seeds", rules.whole(1))
    processes: int = key(1, "processes on this machine; under torchrun, its number counts", rules.whole(1, 4096))
    device: str = key("auto", "auto: a GPU per process where there is one", rules.choice("auto", "cpu", "cuda"))
    precision: str = key(
        "fp32", "the floating point type that the model computes in", rules.choice("fp32", "bf16", "fp16")
    )
    accumulate: int = key(1, "batches per optimizer step", rules.whole(1))
    clip_norm: float | None = key(
        None, "the largest norm of the gradient; larger ones are scaled down", rules.number(open_ends=True), example=1.0
    )
    monitor: str | None = key(
        None, "the metric that picks the best checkpoint; left out: the task's own", rules.TEXT, example="accuracy"
    )
    patience: int | None = key(None, "epochs without a better validation before it ends", rules.whole(1), example=5)
    max_steps: int | None = key(None, "optimizer steps before it ends", rules.whole(1), example=10_000)
    checkpoint_minutes: float = key(
        MINUTES,
        "minutes between two checkpoints within an epoch; one is taken after the first step, too; 0: none",
        rules.number(),
    )
    checkpoint_every: int | None = key(
        None, "steps between two checkpoints, in addition to checkpoint_minutes", rules.whole(1), example=1000
    )
    whole_steps: bool = key(
        False, "sampling and learning replayed as CUDA graphs; one process, [placement] set", rules.FLAG
    )
    margin: float = key(
        0.1, "extra buffer space of whole steps, as a share of the largest sampled batch", rules.number()
    )


@dataclass(frozen=True)
class ClusterSection:
    """Where the graph is, if it is not on this machine alone."""

    servers: tuple[str, ...] | None = key(
        None,
        "graph servers; with store, each process maps its parts and asks them for the rest, without it they make the "
        "batches; left out: those of hoploom launch, or one beside the processes of each host",
        rules.ADDRESSES,
        example=("10.0.0.1:7000", "10.0.0.2:7000"),
    )
    parts: tuple[int, ...] | None = key(
        None,
        "the parts that this host maps; left out: its share",
        rules.ids("parts", least=1),
        example=(0,),
        only=WITH_STORE,
    )
    topology: str = key(
        "auto",
        "local: every host maps all edges; parted: its own; auto: local where it fits",
        rules.choice("auto", "local", "parted"),
        only=WITH_STORE,
    )
    locality: bool = key(False, "seeds go to processes of the host that holds them", rules.FLAG, only=WITH_STORE)
    cache: str | None = key(
        None,
        "a cache of other hosts' rows in each process, filled with the most visited ones",
        rules.SHARE_OR_SIZE,
        example="20%",
    )
    look_ahead: int | None = key(
        None, "batches whose missing rows are fetched together", rules.whole(1, 1024), example=4, only=WITH_STORE
    )
    timeout: float | None = key(
        None, "seconds that a request may take, all attempts together", rules.number(open_ends=True), example=60.0
    )
    token_file: Path | None = key(None, "a file with the servers' token", rules.PATH, example="token")
    ca: Path | None = key(None, "the CA of the servers' certificates: TLS", rules.PATH, example="ca.pem")
    cert: Path | None = key(None, "the certificate to show to servers", rules.PATH, example="client.pem")
    key: Path | None = key(None, "its key", rules.PATH, example="client.key")  # last: it hides key()


@dataclass(frozen=True)
class PlacementSection:
    """Which data of the graph a GPU reads directly."""

    topology: str | None = key(
        None,
        "device memory, pinned host memory, or what fits; left out: the CPU samples",
        TOPOLOGY,
        example="cuda",
        only=WITH_STORE,
    )
    features: str | float | None = key(
        None,
        "the same, or how much goes to device memory, the rest to host memory; spread: shared by the GPUs of this host",
        FEATURES,
        example="20%",
        only=WITH_STORE,
    )
    dtype: str | None = key(
        None,
        "a narrower type that float features are stored in; digits are lost",
        rules.choice(*NARROW),
        example="int8",
        only=PLACED,
    )


@dataclass(frozen=True)
class OutputSection:
    """Where it goes."""

    folder: Path = key(Path("run"), "checkpoints, journal and result", rules.PATH)
    tensorboard: bool = key(True, "write for TensorBoard too, where it is installed", rules.FLAG)


@dataclass(frozen=True)
class RunFile:
    """Everything that a run follows from.

    >>> run_file = read_run_file("run.toml", ["train.epochs=3"])
    >>> run_file.train.epochs
    3
    """

    store: Path | None = key(
        REQUIRED,
        "the graph: a store's directory; may be left out where servers make the batches",
        rules.PATH,
        example="graph.store",
    )
    seed: int = key(0, "all randomness derives from it", rules.whole(0, MOST_SEED))
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
        """An error about one of the keys, to be raised: it begins with where that key was set."""
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
