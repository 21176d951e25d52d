"""run.toml and --set become a RunFile, and a RunFile becomes text; what is wrong is named with its file and line.

What must hold between keys is checked here, too; what needs the store or the processes is for the run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field
from functools import reduce
from pathlib import Path
from typing import Any

from hoploom.config.document import SET, Document, absolute, parse_document, read_document
from hoploom.config.rules import default_of, key_of, key_table, keys_in, problem
from hoploom.config.values import as_toml
from hoploom.errors import ConfigError
from hoploom.ranks import environment
from hoploom.store.format import STORE_FILE
from hoploom.train.loggers import check_loggers
from hoploom.train.runs.run_file import FIELDS, HEADINGS, KEYS, LINKS, RunFile

NO_CACHE = "cluster.cache has no effect where servers make the batches; leave it out, and start them with --cache"
MANY = 4  # keys of a section that need the same choice, which then have a table of their own
Disagreements = Iterator[tuple[str, str]]  # a key, and what is wrong with it beside other keys


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """The run.toml at a path; overrides are `section.key=value`.

    Relative paths are relative to the file, those of overrides to the current directory.
    """
    if Path(path, STORE_FILE).is_file():
        raise ConfigError(f"{path} is a store; train on it with the run.toml that `hoploom init --store {path}` writes")
    if Path(path, "run.toml").is_file():
        way_out = f"continue it with `hoploom train {path}/run.toml --resume`, or give the path of a run.toml"
        raise ConfigError(f"{path} is the folder of a run; {way_out}")
    absent = f"`hoploom init {path}` writes one to start from"
    return _run_file(read_document(path, HEADINGS, absent=absent, overrides=overrides))


def parse_run_file(
    text: str, overrides: Sequence[str] = (), *, name: str = "run.toml", folder: Path = Path()
) -> RunFile:
    """The run.toml in a text. `name` is what messages call it, `folder` what its relative paths are relative to."""
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
    for key in unused:
        if key in where:
            _check_has_effect(key, values, where)
    values |= {key: default_of(FIELDS[key]) for key in unused}
    values["output.folder"] = absolute(document.folder, values["output.folder"])
    if values["model.factory"] is not None and values["model.modules"] is None:
        values["model.modules"] = absolute(document.folder, Path())
    for key, message in _disagreements(values, where):
        raise problem(where, key, message)
    values["model.layers"] = len(values["loader.fanouts"])
    made = {
        section: owner(**{name: values[f"{section}.{name}"] for name in keys_in(owner)})
        for section, owner in sections.items()
    }
    return RunFile(**{name: values[name] for name in keys_in(RunFile)}, **made, where=where)


def applies(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a key has an effect under these values (by full name)."""
    only = KEYS[name].only
    return only is None or (applies(only.selector, values) and only.allows(values[only.selector]))


def _check_has_effect(key: str, values: Mapping[str, Any], where: Mapping[str, str]) -> None:
    """A key without effect is a mistake, unless --set has changed the other key that it depends on."""
    only = KEYS[key].only
    assert only is not None
    if not applies(only.selector, values):
        only = KEYS[only.selector].only or only
    if where.get(only.selector, "").startswith(SET) and not where[key].startswith(SET):
        return
    raise problem(where, key, f"{key} {only.refusal(values[only.selector])}")


# --- what must hold between keys -----------------------------------------------------------------


def _disagreements(values: Mapping[str, Any], where: Mapping[str, str]) -> Disagreements:
    """Keys that do not go together, each with what is wrong and the way out."""
    yield from _of_layers(values, where)
    yield from _of_sampling(values)
    yield from _of_splits(values, where)
    yield from _of_cluster(values)
    if values["scheduler.min_lr"] >= values["optimizer.lr"]:
        message = f"scheduler.min_lr is {values['scheduler.min_lr']}, optimizer.lr only {values['optimizer.lr']}"
        yield "scheduler.min_lr", f"{message}; give less"


def _of_layers(values: Mapping[str, Any], where: Mapping[str, str]) -> Disagreements:
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
    beside = len(fanouts) > 1 or values["model.residual"]  # else they are averaged
    if applies("model.heads", values) and beside and hidden % heads:
        message = f"model.hidden is {hidden}, no multiple of model.heads = {heads}; make it one"
        yield "model.hidden" if "model.hidden" in where else "model.heads", message


def _entries(counts: Sequence[int]) -> str:
    return f"{len(counts)} entr{'y' if len(counts) == 1 else 'ies'}"


def _of_sampling(values: Mapping[str, Any]) -> Disagreements:
    for key in ("loader.replace", "loader.weighted", "loader.temporal"):
        if values["loader.labor"] and values[key]:
            yield key, f"{key} cannot be combined with loader.labor; drop one"
    if values["loader.weighted"] and values["loader.temporal"] == "last":
        yield "loader.temporal", 'loader.temporal = "last" draws nothing, so loader.weighted has no effect; drop one'


def _of_splits(values: Mapping[str, Any], where: Mapping[str, str]) -> Disagreements:
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


def _of_cluster(values: Mapping[str, Any]) -> Disagreements:
    given = [key for key in ("cluster.cert", "cluster.key") if values[key] is not None]
    if len(given) == 1:
        yield given[0], f"{given[0]} is given alone; give cluster.cert and cluster.key"
    if given and values["cluster.ca"] is None:
        yield "cluster.cert", "cluster.cert is given without cluster.ca; give the CA of the servers too"
    if values["store"] is None and values["cluster.cache"] is not None:
        yield "cluster.cache", NO_CACHE


def check_world(run_file: RunFile, world_size: int) -> None:
    """Raise ConfigError unless every process gets a seed of each step."""
    if run_file.loader.batch_size < world_size:
        message = (
            f"loader.batch_size is {run_file.loader.batch_size} for {world_size} processes; give at least {world_size}"
        )
        raise run_file.problem("loader.batch_size", message)


def check_packages(run_file: RunFile) -> None:
    """Raise ConfigError where a logger's package is not installed."""
    try:
        check_loggers(run_file.output.loggers or ())
    except ConfigError as error:
        raise run_file.problem("output.loggers", f"{error}, or leave it out of output.loggers") from error


def check_whole_steps(run_file: RunFile, world_size: int) -> None:
    """Raise ConfigError where whole steps cannot be taken, as far as the file shows."""
    if not run_file.train.whole_steps:
        return
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


# --- as text -------------------------------------------------------------------------------------


def values_of(run_file: RunFile) -> dict[str, Any]:
    """Every key's value by its full name."""
    return {name: reduce(getattr, name.split("."), run_file) for name in FIELDS}


def to_toml(run_file: RunFile) -> str:
    """Every key that has an effect: `read_run_file` reads an equal one. It is the run.toml that a run leaves behind."""
    values = values_of(run_file)
    lines: list[str] = []
    for section, owner in HEADINGS.items():
        lines += [f"\n[{section}]"] if section else []
        for name in keys_in(owner):
            key = f"{section}.{name}".removeprefix(".")
            if applies(key, values) and values[key] is not None:
                lines.append(f"{name} = {as_toml(values[key])}")
    return "\n".join(lines) + "\n"


def reference() -> str:
    """The tables of every key, in Markdown, for the documentation: a heading per section, then its keys."""
    lines = []
    for section, owner in HEADINGS.items():
        heading = f"### [{section}]" if section else "### Top of the file"
        lines += ["", heading, "", *([str(owner.__doc__), ""] if section else []), *_tables(keys_in(owner))]
    return "\n".join(lines) + "\n"


def _tables(keys: Mapping[str, "Field[Any]"]) -> list[str]:
    """One table, and one more for each choice that many of the keys need, such as a kind of task."""
    shared = Counter(key_of(described).only for described in keys.values())
    apart = [only for only, num_keys in shared.items() if only and only.words and num_keys >= MANY]
    lines = key_table((name, described) for name, described in keys.items() if key_of(described).only not in apart)
    for only in apart:
        chosen = ((name, described) for name, described in keys.items() if key_of(described).only == only)
        condition = only.condition()
        lines += ["", f"{condition[0].upper()}{condition[1:]}:", "", *key_table(chosen, under=only)]
    return lines
