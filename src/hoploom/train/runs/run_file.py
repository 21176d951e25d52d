"""The keys of run.toml, as frozen dataclasses, section by section; and how the file is read, checked and written again.

Each key is declared once, with its default, a check of its value, and its help text. The reader, the file that
`hoploom init` writes and the table in docs/training.md are made from these. A key with `only` has an effect for some
values of another key only. Errors name the file and line. Conflicts between keys are found when a file is read.
Before the ranks start, `check_run` looks for conflicts with the number of processes and the output folder.
"""

# ruff: noqa: RUF009  (key() is dataclasses.field)

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from hoploom.config import rules
from hoploom.config.rules import (
    MOST_SEED,
    REQUIRED,
    SET,
    Document,
    Headings,
    Key,
    KeyCondition,
    absolute,
    accepted,
    default_of,
    key,
    key_of,
    keys_in,
    parse_document,
    problem,
    read_document,
)
from hoploom.config.values import as_toml
from hoploom.errors import ConfigError
from hoploom.gpu.placement import read_features, read_topology
from hoploom.nn.decoders import DECODERS
from hoploom.nn.models import KINDS, Norm
from hoploom.ops import RowRule
from hoploom.ranking.losses import LOSSES
from hoploom.ranks import environment
from hoploom.store.format import STORE_FILE
from hoploom.train.checkpoint import MINUTES
from hoploom.train.journal import NAMES, check_loggers

NODE_KINDS = ("node-classification", "multi-label", "node-regression")
LINKS = "link-prediction"
USUAL_THREADS = 2  # per process, that make batches

OF_NODES = KeyCondition("task.kind", NODE_KINDS)
OF_LABELS = KeyCondition("task.kind", NODE_KINDS, other="task.more")  # of nodes, also beside links
OF_CLASSES = KeyCondition("task.kind", ("node-classification",))
OF_LINKS = KeyCondition("task.kind", (LINKS,))
ERRORS = ("mse", "mae")  # squared and absolute
WITH_LOSS = KeyCondition("task.kind", ("node-regression", LINKS))
DRAWN_LINKS = KeyCondition("task.links", absent=True)
BUILT_IN = KeyCondition("model.factory", absent=True)
OWN = KeyCondition("model.factory")
ATTENTION = KeyCondition("model.name", tuple(name for name, kind in KINDS.items() if kind.has_heads))
WITH_FEATURES, WITH_WEIGHTS = (
    KeyCondition("model.name", tuple(name for name, kind in KINDS.items() if read in kind.reads))
    for read in ("features", "weights")
)
CURVES = KeyCondition("scheduler.name", ("cosine", "plateau", "warmup-cosine"))
WITH_STORE = KeyCondition("store")
CUTS = KeyCondition("scheduler.name", ("step", "plateau"))

RELATION_FANOUTS = rules.table_of(
    rules.FANOUTS, 'a table of lists by relation, e.g. { "author writes paper" = [5, 5] }'
)
LEARNED = rules.table_of(rules.whole(1), "a table of widths by node type, e.g. { user = 128 }")
MORE = rules.table_of(rules.choice(*NODE_KINDS), 'a table of kinds by field, e.g. { year = "node-regression" }')
WEIGHTS = rules.table_of(rules.number(), "a table of numbers by field, e.g. { year = 0.1 }")
CATEGORIES = rules.table_of(rules.whole(1), "a table of numbers by field, e.g. { kind = 12 }")
ROW_OPTIMIZERS = tuple(rule.name for rule in RowRule)
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
        None, "the node type to train on, if several have splits", rules.TEXT, example="paper", only=OF_LABELS
    )
    label: str = key("y", "the field that holds the labels", rules.TEXT, only=OF_NODES)
    more: dict[str, str] = key({}, "further labels to learn, by field: node-regression, ...", MORE)
    weights: dict[str, float] = key({}, "weights of the labels' losses, by field; 1 by default", WEIGHTS)
    num_classes: int | None = key(
        None, "number of classes; default: counted from the labels", rules.whole(2), example=16, only=OF_CLASSES
    )
    train: str = key("train", "the split to train on", rules.TEXT, only=OF_LABELS)
    val: str = key("val", 'the split to validate on; "" turns validation off', rules.TEXT_OR_EMPTY, only=OF_LABELS)
    test: str = key("test", 'the split to evaluate at the end; "" turns it off', rules.TEXT_OR_EMPTY, only=OF_LABELS)
    loss: str | None = key(
        None,
        "default: mse for numbers, binary for links",
        rules.choice("mse", "mae", *LOSSES),
        example="bpr",
        only=WITH_LOSS,
    )
    relation: str | None = key(
        None, "the relation whose links the model predicts", rules.TEXT, example="author writes paper", only=OF_LINKS
    )
    relation_field: str | None = key(
        None, "the field of edges with their relation's number", rules.TEXT, example="edge_type", only=OF_LINKS
    )
    links: Path | None = key(
        None, "a folder with train, val and test; default: random shares", rules.PATH, example="links", only=OF_LINKS
    )
    val_share: float = key(0.05, "of links: share of the edges held out for validation", rules.SHARE, only=DRAWN_LINKS)
    test_share: float = key(0.1, "of links: share of the edges held out for the test", rules.SHARE, only=DRAWN_LINKS)
    negatives: float = key(1.0, "random negative links per true link", rules.number(open_ends=True), only=OF_LINKS)
    strict_negatives: bool = key(False, "negative links are never edges of the graph", rules.FLAG, only=OF_LINKS)
    candidates: str = key(
        "uniform",
        "which negatives: by degree ^ 0.75, shared by a step, or all nodes; only all holds in evaluation",
        rules.choice("uniform", "degree", "joint", "all"),
        only=OF_LINKS,
    )
    eval_negatives: int = key(
        100, "negatives that each link is ranked among, in validation and test", rules.whole(1), only=OF_LINKS
    )
    metrics: tuple[str, ...] | None = key(
        None,
        "auroc, average_precision, mrr, mean_rank or hits@k; by default those that go with the loss",
        rules.METRICS,
        example=("mrr", "hits@10"),
        only=OF_LINKS,
    )
    exclude: str | None = key(
        None,
        "edges that are left out of a step's messages: its links, their reverses, or both; default: all there are",
        rules.choice("none", "self", "reverse", "both"),
        example="both",
        only=OF_LINKS,
    )


@dataclass(frozen=True)
class ModelSection:
    """The model: a built-in one by name, or your own from a factory function."""

    name: str = key("sage", "the built-in model", rules.choice(*KINDS), only=BUILT_IN)
    hidden: int = key(128, "width of the hidden layers", rules.whole(1), only=BUILT_IN)
    layers: int | None = key(None, "number of layers: one per fanout", rules.whole(1), example=2, only=BUILT_IN)
    dropout: float = key(0.0, "share of the hidden values that are dropped in training", rules.SHARE, only=BUILT_IN)
    heads: int = key(4, "number of attention heads", rules.whole(1), only=ATTENTION)
    norm: Norm = key(
        False,
        'true or "layer": layer norm before every layer; "batch", "graph": batch or graph norm over all processes',
        rules.NORM,
        only=BUILT_IN,
    )
    residual: bool = key(
        False, "residual connections, between a linear first and last layer", rules.FLAG, only=BUILT_IN
    )
    edges: tuple[str, ...] | None = key(
        None,
        "the fields of edges that the model reads as features",
        rules.texts("a field, or a list", single=True),
        example=("edge_attr",),
        only=WITH_FEATURES,
    )
    categories: dict[str, int] = key(
        {},
        "numbers of categories by field of edges; default: counted before training",
        CATEGORIES,
        example={"kind": 12},
        only=WITH_FEATURES,
    )
    weights: str | None = key(
        None, "the field of edges that weights what is summed", rules.TEXT, example="weight", only=WITH_WEIGHTS
    )
    learned: dict[str, int] = key(
        {},
        "widths of learned rows by node type; default: hidden where there are no features",
        LEARNED,
        example={"user": 128},
    )
    decoder: str = key("dot", "scores a link from the outputs of its ends", rules.choice(*DECODERS), only=OF_LINKS)
    factory: str | None = key(
        None, "makes your own model: factory(store, num_outputs, **options)", rules.FUNCTION, example="my_model:make"
    )
    options: dict[str, Any] = key({}, "further arguments for the factory", rules.TABLE, only=OWN)
    modules: Path | None = key(
        None, "the folder of the factory's module; default: that of this file", rules.PATH, example=".", only=OWN
    )


@dataclass(frozen=True)
class LoaderSection:
    """The sampling of batches."""

    fanouts: tuple[int, ...] = key((15, 10), "neighbours per node, one number per layer; -1: all", rules.FANOUTS)
    relation_fanouts: dict[str, tuple[int, ...]] = key(
        {}, "other fanouts for some relations", RELATION_FANOUTS, example={"author writes paper": (5, 5)}
    )
    batch_size: int = key(1024, "seeds per step, over all processes together", rules.whole(1))
    mode: str = key(
        "blocks", "blocks: every layer samples anew; subgraph: one graph, as in PyG", rules.choice("blocks", "subgraph")
    )
    threads: int | None = key(
        None, "threads per process that build batches; default: 2, 1 on one core", rules.whole(0, 1024), example=4
    )
    replace: bool = key(False, "sample with replacement", rules.FLAG)
    labor: bool = key(False, "LABOR sampling: fewer distinct nodes, because seeds share neighbours", rules.FLAG)
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
        None, "batch_size in evaluation; default: the same, less if links have candidates", rules.whole(1), example=4096
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
    learned: str = key("rowwise_adagrad", "the optimizer of learned rows", rules.choice(*ROW_OPTIMIZERS))
    learned_lr: float = key(0.05, "learning rate of learned rows", rules.number(open_ends=True))


@dataclass(frozen=True)
class SchedulerSection:
    """The schedule of the learning rate."""

    name: str = key("none", "the schedule", rules.choice("none", "cosine", "step", "plateau", "warmup-cosine"))
    warmup: float = key(
        0.05, "share of all steps that warm up", rules.SHARE, only=KeyCondition("scheduler.name", ("warmup-cosine",))
    )
    every: int = key(10, "epochs between reductions", rules.whole(1), only=KeyCondition("scheduler.name", ("step",)))
    wait: int = key(
        3, "epochs to wait for improvement", rules.whole(0), only=KeyCondition("scheduler.name", ("plateau",))
    )
    factor: float = key(0.5, "a reduction multiplies the rate by this", rules.number(0, 1, open_ends=True), only=CUTS)
    min_lr: float = key(0.0, "the lowest learning rate", rules.number(), only=CURVES)


@dataclass(frozen=True)
class TrainSection:
    """The settings of training: its length, device, precision and checkpoints."""

    epochs: int = key(10, "passes over all training seeds", rules.whole(1))
    processes: int = key(1, "processes on this machine; torchrun and Slurm override it", rules.whole(1, 4096))
    device: str = key("auto", "auto: one GPU per process, else the CPU", rules.choice("auto", "cpu", "cuda"))
    precision: str = key("fp32", "floating-point type that the model computes in", rules.choice("fp32", "bf16", "fp16"))
    accumulate: int = key(1, "batches per optimizer step", rules.whole(1))
    clip_norm: float | None = key(
        None, "the largest gradient norm; larger gradients are scaled down", rules.number(open_ends=True), example=1.0
    )
    monitor: str | None = key(
        None, "the metric that picks the best checkpoint; default: the task's first", rules.TEXT, example="accuracy"
    )
    patience: int | None = key(None, "stop after this many epochs without improvement", rules.whole(1), example=5)
    max_steps: int | None = key(None, "stop after this many optimizer steps", rules.whole(1), example=10_000)
    checkpoint_minutes: float = key(
        MINUTES, "minutes between checkpoints in an epoch; the first step has one; 0: only after epochs", rules.number()
    )
    checkpoint_every: int | None = key(
        None, "steps between two checkpoints, in addition to checkpoint_minutes", rules.whole(1), example=1000
    )
    whole_steps: bool = key(False, "run each step as CUDA graphs; needs [placement]", rules.FLAG)
    margin: float = key(0.1, "extra buffer space for whole_steps, as a share of the largest batch", rules.number())


@dataclass(frozen=True)
class ClusterSection:
    """The place of the graph, if it is not on this machine alone."""

    servers: tuple[str, ...] | None = key(
        None, "graph servers; default: hoploom launch's, or one per host", rules.ADDRESSES, example=("10.0.0.1:7000",)
    )
    parts: tuple[int, ...] | None = key(
        None, "the parts to map here; default: its share", rules.ids("parts", least=1), example=(0,), only=WITH_STORE
    )
    topology: str = key(
        "auto",
        "local: every host maps all edges; parted: only its own; auto: local if they fit",
        rules.choice("auto", "local", "parted"),
        only=WITH_STORE,
    )
    locality: bool = key(False, "give each process seeds from the parts of its own host", rules.FLAG, only=WITH_STORE)
    cache: str | None = key(
        None, "cache per process for the most visited feature rows of other hosts", rules.SHARE_OR_SIZE, example="20%"
    )
    look_ahead: int | None = key(
        None, "batches whose remote rows are fetched together", rules.whole(1, 1024), example=4, only=WITH_STORE
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
        None, "where edges are; host: pinned memory; auto: what fits", TOPOLOGY, example="cuda", only=WITH_STORE
    )
    features: str | float | None = key(
        None, "where rows are, likewise; 20%: that share in GPU memory", FEATURES, example="20%", only=WITH_STORE
    )


@dataclass(frozen=True)
class OutputSection:
    """The places of the results."""

    folder: Path = key(Path("run"), "the folder for checkpoints, journal and result", rules.PATH)
    loggers: tuple[str, ...] | None = key(
        None, "copy metrics there; default: TensorBoard if installed", rules.choices(*NAMES), example=("tensorboard",)
    )


@dataclass(frozen=True)
class RunFile:
    """The settings of a run.

    >>> run_file = read_run_file("run.toml", ["train.epochs=3"])
    >>> run_file.train.epochs
    3
    """

    store: Path | None = key(
        REQUIRED, "the graph's store: a folder; optional if servers build batches", rules.PATH, example="graph.store"
    )
    memory: str | None = key(
        None, "memory per process for the graph; the rest is read from disk", rules.SIZE, only=WITH_STORE, example="6GB"
    )
    scratch: Path | None = key(
        None,
        "with memory: a folder for the rows of the next batches, and for learned rows that exceed memory",
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
        """Return an error about the key `name`; its message begins with the file and line that set the key."""
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


# --- reading ---------------------------------------------------------------------------------------

RUN_FILE = "run.toml"
LAST, BEST = "last", "best"  # checkpoints
NO_CACHE = "cluster.cache has no effect where servers make the batches; leave it out, and start them with --cache"
# Keys that may differ between a run and its continuation: how long and where it trains, not what is learned.
MAY_CHANGE = {"store", "model.categories", "loader.threads", "loader.eval_fanouts", "loader.eval_batch_size"}
MAY_CHANGE |= {name for name in FIELDS if name.startswith(("cluster.", "placement.", "output.", "train."))}
MAY_CHANGE -= {"cluster.locality"}
MAY_CHANGE -= {"train.precision", "train.accumulate", "train.clip_norm", "train.monitor"}

Values = Mapping[str, Any]  # of all keys, by full name
Problems = Iterator[tuple[str, str]]  # a key, and a message on its conflict with other keys


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Return the settings in a run.toml; overrides are `section.key=value`.

    Relative paths are relative to the file, those of overrides to the current directory.
    """
    if Path(path, STORE_FILE).is_file():
        raise ConfigError(f"{path} is a store; train on it with the run.toml that `hoploom init --store {path}` writes")
    if Path(path, RUN_FILE).is_file():
        way_out = f"continue it with `hoploom train {path}/run.toml --resume`, or give the path of a run.toml"
        raise ConfigError(f"{path} is the folder of a run; {way_out}")
    absent = f"`hoploom init {path}` writes one to start from"
    return _run_file(read_document(path, HEADINGS, absent=absent, overrides=overrides))


def parse_run_file(
    text: str, overrides: Sequence[str] = (), *, name: str = "run.toml", folder: Path = Path()
) -> RunFile:
    """Return the settings in the text of a run.toml. Messages call the file `name`; paths are relative to `folder`."""
    return _run_file(parse_document(text, HEADINGS, name=name, folder=folder, overrides=overrides))


def _run_file(document: Document) -> RunFile:
    where = document.where
    served = "cluster.servers" in where or bool(environment.read_launch_settings().servers)
    values = document.top(optional=("store",) if served else ())  # servers can make the batches
    sections = {section: owner for section, owner in HEADINGS.items() if section}
    for section, owner in sections.items():
        read = document.section((section,), owner=owner)
        values |= {f"{section}.{name}": value for name, value in read.items()}
    unused = [key for key in FIELDS if not applies(key, values)]
    for name in filter(where.__contains__, unused):
        only = KEYS[name].only
        assert only is not None
        only = only if applies(only.selector, values) else KEYS[only.selector].only or only
        if where[name].startswith(SET) or not where.get(only.selector, "").startswith(SET):  # --set changes the choice
            raise problem(where, name, f"{name} {only.refusal(values[only.selector])}")
    values |= {key: default_of(FIELDS[key]) for key in unused}
    values["output.folder"] = absolute(document.folder, values["output.folder"])
    if values["model.factory"] is not None and values["model.modules"] is None:
        values["model.modules"] = absolute(document.folder, Path())
    for name, message in _problems(values, where):
        raise problem(where, name, message)
    values["model.layers"] = len(values["loader.fanouts"])
    made = {
        section: owner(**{name: values[f"{section}.{name}"] for name in keys_in(owner)})
        for section, owner in sections.items()
    }
    return RunFile(**{name: values[name] for name in keys_in(RunFile)}, **made, where=where)


def applies(name: str, values: Values) -> bool:
    """Return whether the key `name` has an effect, given the values of all keys."""
    only = KEYS[name].only
    if only is None or values.get(only.other):
        return True
    return applies(only.selector, values) and only.allows(values[only.selector])


# --- checks --------------------------------------------------------------------------------------


def _problems(values: Values, where: Mapping[str, str]) -> Problems:
    """Yield each key that contradicts another key, with the error message."""
    fanouts, layers, others = values["loader.fanouts"], values["model.layers"], values["loader.relation_fanouts"]
    if layers not in (None, len(fanouts)):
        at = f" (model.layers, {where['model.layers']})" if "loader.fanouts" in where else ""
        example = [*fanouts, *fanouts[-1:] * layers][:layers]
        message = f"loader.fanouts has {_entries(fanouts)} for {layers} layers{at}; give one per layer, e.g. {example}"
        yield "loader.fanouts" if at else "model.layers", message
    lists = {f"loader.relation_fanouts, {name!r},": counts for name, counts in others.items()}
    for name, counts in (lists | {"loader.eval_fanouts": values["loader.eval_fanouts"] or fanouts}).items():
        if len(counts) != len(fanouts):
            message = f"{name} has {_entries(counts)}, loader.fanouts {len(fanouts)}; give one per layer"
            yield name.partition(",")[0], message
    hidden, heads = values["model.hidden"], values["model.heads"]
    concatenates = len(fanouts) > 1 or values["model.residual"]  # else heads are averaged
    if applies("model.heads", values) and concatenates and hidden % heads:
        message = f"model.hidden is {hidden}, no multiple of model.heads = {heads}; make it one"
        yield "model.hidden" if "model.hidden" in where else "model.heads", message
    if (values["model.name"], values["loader.mode"]) == ("gcn", "blocks") and values["model.weights"]:
        yield "model.weights", 'model.weights of "gcn" needs loader.mode = "subgraph"; set it, or take another model'
    for name in ("loader.replace", "loader.weighted", "loader.temporal"):
        if values["loader.labor"] and values[name]:
            yield name, f"{name} cannot be combined with loader.labor; drop one"
    if values["loader.weighted"] and values["loader.temporal"] == "last":
        yield "loader.temporal", 'loader.temporal = "last" draws nothing, so loader.weighted has no effect; drop one'
    label, more = values["task.label"], values["task.more"]
    if label in more and values["task.kind"] != LINKS:
        yield "task.more", f"task.more has {label!r}, which is task.label; set task.kind for it, and leave it out here"
    if values["task.weights"] and not more:
        yield "task.weights", "task.weights has no effect without task.more; name further labels there, or drop it"
    losses = LOSSES if values["task.kind"] == LINKS else ERRORS
    if values["task.loss"] not in (None, *losses):
        yield "task.loss", f"task.loss is {values['task.loss']!r}; for this task, choose one of {list(losses)}"
    decoder, field_name = values["model.decoder"], values["task.relation_field"]
    if field_name is not None and values["task.loss"] in (None, "binary"):
        yield "task.relation_field", 'task.relation_field needs a loss that ranks; set task.loss, such as "softmax"'
    if field_name is not None and decoder in ("dot", "cosine") and values["model.factory"] is None:
        message = f"model.decoder is {decoder!r}, which scores all relations alike; take another, such as 'complex'"
        yield "model.decoder" if "model.decoder" in where else "task.relation_field", message
    if decoder in ("complex", "rotate") and hidden % 2:
        yield "model.hidden", f"model.hidden is {hidden}, and model.decoder = {decoder!r} needs an even number"
    is_validated, way_out = bool(values["task.val"]), "name one in task.val"
    if values["task.kind"] == LINKS:
        held_out = values["task.val_share"] + values["task.test_share"]
        if held_out >= 1:
            name = "task.test_share" if "task.test_share" in where else "task.val_share"
            yield name, f"task.val_share and task.test_share add up to {held_out:g}; leave some to train on"
        is_validated, way_out = values["task.links"] is not None or values["task.val_share"] > 0, "set task.val_share"
    for name in ("train.patience", "train.monitor"):
        if values[name] is not None and not is_validated:
            yield name, f"{name} needs a validation split; {way_out}, or leave it out"
    if values["scheduler.name"] == "plateau" and not is_validated:
        message = f'scheduler.name = "plateau" needs a validation split; {way_out}, or take another schedule'
        yield "scheduler.name", message
    given = [name for name in ("cluster.cert", "cluster.key") if values[name] is not None]
    if len(given) == 1:
        yield given[0], f"{given[0]} is given alone; give cluster.cert and cluster.key"
    if given and values["cluster.ca"] is None:
        yield "cluster.cert", "cluster.cert is given without cluster.ca; give the CA of the servers too"
    if values["store"] is None and values["cluster.cache"] is not None:
        yield "cluster.cache", NO_CACHE
    if values["scheduler.min_lr"] >= values["optimizer.lr"]:
        message = f"scheduler.min_lr is {values['scheduler.min_lr']}, optimizer.lr only {values['optimizer.lr']}"
        yield "scheduler.min_lr", f"{message}; give less"


def _entries(counts: Sequence[int]) -> str:
    return f"{len(counts)} entr{'y' if len(counts) == 1 else 'ies'}"


def check_run(run_file: RunFile, world_size: int, *, resume: bool) -> None:
    """Raise ConfigError if a run cannot start with this many processes, or with what the output folder contains."""
    if run_file.loader.batch_size < world_size:
        message = f"loader.batch_size is {run_file.loader.batch_size} for {world_size} processes"
        raise run_file.problem("loader.batch_size", f"{message}; give at least {world_size}")
    try:
        check_loggers(run_file.output.loggers or ())
    except ConfigError as error:
        raise run_file.problem("output.loggers", f"{error}, or leave it out of output.loggers") from error
    placement, model = run_file.placement, run_file.model
    reasons = {
        "need a graph on the device; set placement.topology and placement.features": None
        in (placement.topology, placement.features),
        f"have no {model.norm} norm; take model.norm = true": model.norm in ("batch", "graph"),
        "read no fields of edges; leave model.edges and model.weights out": bool(model.edges or model.weights),
        "learn links alone; leave task.more out": run_file.task.kind == LINKS and bool(run_file.task.more),
        "do not go with loader.temporal": run_file.loader.temporal is not None,
        'do not go with train.precision = "fp16"; take "bf16"': run_file.train.precision == "fp16",
        "do not go with train.accumulate; take a larger loader.batch_size": run_file.train.accumulate > 1,
    }
    if (reason := next((r for r, found in reasons.items() if found), "")) and run_file.train.whole_steps:
        raise run_file.problem("train.whole_steps", f"whole steps {reason}; or leave train.whole_steps out")
    folder = run_file.output.folder
    if not (folder / f"{LAST}.safetensors").exists():
        return
    if not resume:
        message = f"{folder} holds a run already; continue it with --resume, or name another output.folder"
        raise run_file.problem("output.folder", message)
    if not (folder / RUN_FILE).exists():
        return
    earlier = values_of(read_run_file(folder / RUN_FILE))
    for name, value in values_of(run_file).items():
        if name not in MAY_CHANGE and value != earlier[name]:
            was, now = (as_toml(entry) if entry is not None else "left out" for entry in (earlier[name], value))
            message = f"{name} is {now}, but was {was} when the run in {folder} began"
            raise run_file.problem(name, f"{message}; leave it so, or start anew in another output.folder")


def values_of(run_file: RunFile) -> dict[str, Any]:
    """Return the value of every key by the key's full name, such as "optimizer.lr"."""
    return {name: reduce(getattr, name.split("."), run_file) for name in FIELDS}


def to_toml(run_file: RunFile) -> str:
    """Return the text of a run.toml with every key that has an effect, which reads back as an equal RunFile."""
    values = values_of(run_file)
    lines: list[str] = []
    for section, owner in HEADINGS.items():
        lines += [f"\n[{section}]"] if section else []
        for name in keys_in(owner):
            key = f"{section}.{name}".removeprefix(".")
            if applies(key, values) and values[key] is not None:
                lines.append(f"{name} = {as_toml(values[key])}")
    return "\n".join(lines) + "\n"
