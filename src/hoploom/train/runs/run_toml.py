"""run.toml as text: read and checked, written again, and the template that `hoploom init` writes.

A mistake is named with its file and line. What must hold between keys is checked when a file is read, what depends on
the number of processes and the output folder by `check_run`, once, before the ranks start.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from hoploom.config.document import SET, Document, absolute, parse_document, read_document
from hoploom.config.rules import default_of, key_of, key_table, keys_in, problem
from hoploom.config.values import as_toml, printable
from hoploom.errors import ConfigError
from hoploom.ranks import environment
from hoploom.schema import ORIGINAL_ID, NodeType, Schema
from hoploom.store import Store, open_store
from hoploom.store.format import STORE_FILE
from hoploom.train.loggers import check_loggers
from hoploom.train.runs.run_file import FIELDS, HEADINGS, KEYS, LINKS, RunFile
from hoploom.train.tasks import largest_label

RUN_FILE = "run.toml"
LAST, BEST = "last", "best"  # checkpoints
NO_CACHE = "cluster.cache has no effect where servers make the batches; leave it out, and start them with --cache"
MANY = 4  # keys of a section that need the same choice, which then have a table of their own
# Keys that may differ between a run and its continuation: how long and where it trains, not what is learned.
MAY_CHANGE = {"store", "loader.threads", "loader.eval_fanouts", "loader.eval_batch_size"}
MAY_CHANGE |= {name for name in FIELDS if name.startswith(("cluster.", "placement.", "output.", "train."))}
MAY_CHANGE -= {"cluster.locality", "placement.dtype"}
MAY_CHANGE -= {"train.precision", "train.accumulate", "train.clip_norm", "train.monitor"}

Values = Mapping[str, Any]  # of all keys, by full name
Problems = Iterator[tuple[str, str]]  # a key, and what is wrong with it beside other keys


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
    """Return the settings in a text. Messages call it `name`, and its relative paths are relative to `folder`."""
    return _run_file(parse_document(text, HEADINGS, name=name, folder=folder, overrides=overrides))


def _run_file(document: Document) -> RunFile:
    document, where = _without_former_keys(document), document.where
    served = "cluster.servers" in where or bool(environment.read_launch_settings().servers)
    values = document.top(optional=("store",) if served else ())  # servers can make the batches
    sections = {section: owner for section, owner in HEADINGS.items() if section}
    for section, owner in sections.items():
        read = document.section((section,), owner=owner)
        values |= {f"{section}.{name}": value for name, value in read.items()}
    unused = [key for key in FIELDS if not applies(key, values)]
    for key in unused:
        if key in where:
            _check_has_effect(key, values, where)
    values |= {key: default_of(FIELDS[key]) for key in unused}
    values["output.folder"] = absolute(document.folder, values["output.folder"])
    if values["model.factory"] is not None and values["model.modules"] is None:
        values["model.modules"] = absolute(document.folder, Path())
    for check in (_layer_problems, _sampling_problems, _split_problems, _other_problems):
        for key, message in check(values, where):
            raise problem(where, key, message)
    values["model.layers"] = len(values["loader.fanouts"])
    made = {
        section: owner(**{name: values[f"{section}.{name}"] for name in keys_in(owner)})
        for section, owner in sections.items()
    }
    return RunFile(**{name: values[name] for name in keys_in(RunFile)}, **made, where=where)


def _without_former_keys(document: Document) -> Document:
    """Return a document without keys of earlier versions, which run folders hold with their default."""
    section = document.table(("cluster",))
    if "exchange" not in section:
        return document
    if section["exchange"] != "servers":
        raise document.problem("cluster.exchange", "cluster.exchange is gone: servers send remote rows; leave it out")
    kept = {name: value for name, value in section.items() if name != "exchange"}
    return replace(document, parsed={**document.parsed, "cluster": kept})


def applies(name: str, values: Values) -> bool:
    """Return whether a key has an effect under these values."""
    only = KEYS[name].only
    return only is None or (applies(only.selector, values) and only.allows(values[only.selector]))


def _check_has_effect(key: str, values: Values, where: Mapping[str, str]) -> None:
    """Raise ConfigError for a key without effect, unless --set has changed the other key that it depends on."""
    only = KEYS[key].only
    assert only is not None
    if not applies(only.selector, values):
        only = KEYS[only.selector].only or only
    if where.get(only.selector, "").startswith(SET) and not where[key].startswith(SET):
        return
    raise problem(where, key, f"{key} {only.refusal(values[only.selector])}")


# --- keys that contradict each other -------------------------------------------------------------


def _layer_problems(values: Values, where: Mapping[str, str]) -> Problems:
    fanouts, layers, others = (values[key] for key in ("loader.fanouts", "model.layers", "loader.relation_fanouts"))
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


def _entries(counts: Sequence[int]) -> str:
    return f"{len(counts)} entr{'y' if len(counts) == 1 else 'ies'}"


def _sampling_problems(values: Values, where: Mapping[str, str]) -> Problems:
    for key in ("loader.replace", "loader.weighted", "loader.temporal"):
        if values["loader.labor"] and values[key]:
            yield key, f"{key} cannot be combined with loader.labor; drop one"
    if values["loader.weighted"] and values["loader.temporal"] == "last":
        yield "loader.temporal", 'loader.temporal = "last" draws nothing, so loader.weighted has no effect; drop one'


def _split_problems(values: Values, where: Mapping[str, str]) -> Problems:
    if values["task.kind"] == LINKS:
        held_out = values["task.val_share"] + values["task.test_share"]
        if held_out >= 1:
            key = "task.test_share" if "task.test_share" in where else "task.val_share"
            yield key, f"task.val_share and task.test_share add up to {held_out:g}; leave some to train on"
        is_validated, way_out = values["task.links"] is not None or values["task.val_share"] > 0, "set task.val_share"
    else:
        is_validated, way_out = bool(values["task.val"]), "name one in task.val"
    for key in ("train.patience", "train.monitor"):
        if values[key] is not None and not is_validated:
            yield key, f"{key} needs a validation split; {way_out}, or leave it out"
    if values["scheduler.name"] == "plateau" and not is_validated:
        message = f'scheduler.name = "plateau" needs a validation split; {way_out}, or take another schedule'
        yield "scheduler.name", message


def _other_problems(values: Values, where: Mapping[str, str]) -> Problems:
    given = [key for key in ("cluster.cert", "cluster.key") if values[key] is not None]
    if len(given) == 1:
        yield given[0], f"{given[0]} is given alone; give cluster.cert and cluster.key"
    if given and values["cluster.ca"] is None:
        yield "cluster.cert", "cluster.cert is given without cluster.ca; give the CA of the servers too"
    if values["store"] is None and values["cluster.cache"] is not None:
        yield "cluster.cache", NO_CACHE
    if values["scheduler.min_lr"] >= values["optimizer.lr"]:
        message = f"scheduler.min_lr is {values['scheduler.min_lr']}, optimizer.lr only {values['optimizer.lr']}"
        yield "scheduler.min_lr", f"{message}; give less"


# --- before the ranks start ----------------------------------------------------------------------


def check_run(run_file: RunFile, world_size: int, *, resume: bool) -> None:
    """Raise ConfigError if a run cannot start with this many processes and the output folder as it is."""
    if run_file.loader.batch_size < world_size:
        message = f"loader.batch_size is {run_file.loader.batch_size} for {world_size} processes"
        raise run_file.problem("loader.batch_size", f"{message}; give at least {world_size}")
    try:
        check_loggers(run_file.output.loggers or ())
    except ConfigError as error:
        raise run_file.problem("output.loggers", f"{error}, or leave it out of output.loggers") from error
    if run_file.train.whole_steps:
        _check_whole_steps(run_file, world_size)
    _check_folder(run_file, resume=resume)


def _check_whole_steps(run_file: RunFile, world_size: int) -> None:
    placement = run_file.placement
    reasons = {
        f"are for one process, this is one of {world_size}": world_size > 1,
        "need a graph on the device; set placement.topology and placement.features": None
        in (placement.topology, placement.features),
        "are for the built-in models": run_file.model.factory is not None,
        "are for tasks on nodes": run_file.task.kind == LINKS,
        "do not go with loader.temporal": run_file.loader.temporal is not None,
        'do not go with train.precision = "fp16"; take "bf16"': run_file.train.precision == "fp16",
        "do not go with train.accumulate; take a larger loader.batch_size": run_file.train.accumulate > 1,
    }
    for reason, found in reasons.items():
        if found:
            raise run_file.problem("train.whole_steps", f"whole steps {reason}; or leave train.whole_steps out")


def _check_folder(run_file: RunFile, *, resume: bool) -> None:
    """Raise ConfigError if the folder holds a run that must not be overwritten, or that this one cannot continue."""
    folder = run_file.output.folder
    if not (folder / f"{LAST}.safetensors").exists():
        return
    if not resume:
        message = f"{folder} holds a run already; continue it with --resume, or name another output.folder"
        raise run_file.problem("output.folder", message)
    if not (folder / RUN_FILE).exists():
        return
    earlier = values_of(read_run_file(folder / RUN_FILE))
    for key, value in values_of(run_file).items():
        if key not in MAY_CHANGE and value != earlier[key]:
            was, now = (as_toml(entry) if entry is not None else "left out" for entry in (earlier[key], value))
            message = f"{key} is {now}, but was {was} when the run in {folder} began"
            raise run_file.problem(key, f"{message}; leave it so, or start anew in another output.folder")


# --- as text -------------------------------------------------------------------------------------


def values_of(run_file: RunFile) -> dict[str, Any]:
    """Return every key's value by its full name."""
    return {name: reduce(getattr, name.split("."), run_file) for name in FIELDS}


def to_toml(run_file: RunFile) -> str:
    """Return a run.toml of every key that has an effect, which reads as an equal RunFile. A run leaves it behind."""
    values = values_of(run_file)
    lines: list[str] = []
    for section, owner in HEADINGS.items():
        lines += [f"\n[{section}]"] if section else []
        for name in keys_in(owner):
            key = f"{section}.{name}".removeprefix(".")
            if applies(key, values) and values[key] is not None:
                lines.append(f"{name} = {as_toml(values[key])}")
    return "\n".join(lines) + "\n"


def run_reference() -> str:
    """Return the tables of every key, in Markdown, for the documentation: a heading per section, then its keys."""
    lines = []
    for section, owner in HEADINGS.items():
        heading = f"### [{section}]" if section else "### Top of the file"
        lines += ["", heading, "", *([str(owner.__doc__), ""] if section else []), *_tables(keys_in(owner))]
    return "\n".join(lines) + "\n"


def _tables(keys: Mapping[str, "Field[Any]"]) -> list[str]:
    """Return one table, and one more for each choice that many of the keys need, such as a kind of task."""
    shared = Counter(key_of(described).only for described in keys.values())
    apart = [only for only, num_keys in shared.items() if only and only.words and num_keys >= MANY]
    lines = key_table((name, described) for name, described in keys.items() if key_of(described).only not in apart)
    for only in apart:
        chosen = ((name, described) for name, described in keys.items() if key_of(described).only == only)
        condition = only.condition()
        lines += ["", f"{condition[0].upper()}{condition[1:]}:", "", *key_table(chosen, under=only)]
    return lines


# --- the template --------------------------------------------------------------------------------

HEADER = """\
# The settings of a run: `hoploom train` reads this file. Only `store` is required. All other lines show the default,
# and lines that begin with `# ` have no effect. To change a setting for one run: `--set optimizer.lr=0.01`.
"""
COLUMN, WIDTH = 32, 120  # where comments begin, and where they end
WHOLE_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "bool")


def template(known: Values | None = None, notes: Mapping[str, str] | None = None) -> str:
    """Return a commented run.toml. `known` are values to fill in, by full name; `notes` replace a key's help.

    >>> Path("run.toml").write_text(template({"store": "papers.store", "loader.fanouts": (10, 5)}))
    """
    known, notes = known or {}, notes or {}
    values = {key: default_of(described) for key, described in FIELDS.items()}
    values |= {"store": KEYS["store"].example} | dict(known)
    lines = [HEADER]
    for section, owner in HEADINGS.items():
        purpose = str(owner.__doc__).rstrip(".")
        lines += [f"\n[{section}]  # {purpose[0].lower()}{purpose[1:]}"] if section else []
        for name in keys_in(owner):
            key = f"{section}.{name}".removeprefix(".")
            if not KEYS[key].help.startswith("deprecated"):
                lines.append(_template_line(name, key, values, printable(notes.get(key, KEYS[key].help))))
    return "\n".join(lines) + "\n"


def _template_line(name: str, key: str, values: Values, help: str) -> str:
    value = values[key]
    has_effect = applies(key, values) and value not in (None, {})
    shown = KEYS[key].example if value in (None, {}) and KEYS[key].example is not None else value
    line = f"{'' if has_effect else '# '}{name} = {as_toml(shown)}"
    words = KEYS[key].rule.words
    choices = f": {', '.join(words)}" if words and not any(f"{word}:" in help for word in words) else ""
    commented = f"{line:<{COLUMN}}  # {help}{choices}"
    return commented if len(commented) <= WIDTH else f"# {help}{choices}:\n{line}"


def template_for(folder: Path, *, beside: Path) -> tuple[str, str]:
    """Return the template filled in from a store, for a file in the folder `beside`, and why it has this task."""
    store = open_store(folder)
    schema = store.schema
    known: dict[str, Any] = {"store": os.path.relpath(folder, beside)}
    notes: dict[str, str] = {}
    relations = ", ".join(as_toml(" ".join(relation.key)) for relation in schema.relations)
    labelled = next(((t, label) for t in schema.node_types if t.splits and (label := _label_of(t, schema))), None)
    if labelled is None:
        known |= {"task.kind": LINKS, "task.relation": " ".join(schema.relations[0].key)}
        notes["task.relation"] = f"the relation whose links the model predicts; one of {relations}"
        why = _why_links(schema)
    else:
        node_type, label = labelled
        known |= {"task.kind": _kind_of(node_type, label), "task.label": label, **_splits_of(node_type)}
        notes["task.label"] = "the field that holds the labels; one of " + ", ".join(
            name for name in node_type.fields if name != ORIGINAL_ID
        )
        if known["task.kind"] == "node-classification":
            counted = _num_classes(store, node_type, label)
            notes["task.num_classes"] = f"number of classes; default: counted, {counted} here"
        if not schema.homogeneous:
            known["task.node_type"] = node_type.name
        why = f"task: {known['task.kind']}, because {node_type.name!r} has splits and the label {label!r}"
    if not schema.homogeneous:
        known["model.name"] = "rsage"
        notes["loader.relation_fanouts"] = f"other fanouts for some relations; the relations are {relations}"
    return template(known, notes), why


def _why_links(schema: Schema) -> str:
    ready = next((t.name for t in schema.node_types if "y" in t.fields), None)
    if ready is not None:
        way_out = f"to predict it, add split to [nodes.{ready}] in graph.toml, and build again"
        return f"task: {LINKS}, because {ready!r} has the label 'y', but no split; {way_out}"
    way_out = "to predict a column of nodes, name it as label in graph.toml, and build again"
    return f"task: {LINKS}, because the store has no label field; {way_out}"


def _label_of(node_type: NodeType, schema: Schema) -> str | None:
    """Return `y`, else the first field of whole numbers."""
    if "y" in node_type.fields:
        return "y"
    others = ("x", ORIGINAL_ID, schema.time)
    fields = node_type.fields.items()
    return next((name for name, field in fields if field.dtype in WHOLE_NUMBERS and name not in others), None)


def _kind_of(node_type: NodeType, label: str) -> str:
    field = node_type.fields[label]
    if field.shape and field.shape != (1,):
        return "multi-label"
    return "node-classification" if field.dtype in WHOLE_NUMBERS else "node-regression"


def _num_classes(store: Store, node_type: NodeType, label: str) -> int:
    splits = [store.split(name, node_type.name) for name in node_type.splits]
    return int(largest_label(store, node_type.name, label, splits)) + 1


def _splits_of(node_type: NodeType) -> dict[str, str]:
    """Return train, val and test by these names or similar ones; the first split trains if none is called so."""
    names = list(node_type.splits)
    found = {"train": "train" if "train" in names else names[0]}
    found["val"] = next((name for name in ("val", "valid", "validation") if name in names), "")
    found["test"] = "test" if "test" in names else ""
    return {f"task.{split}": name for split, name in found.items()}
