"""run.toml and --set become a RunFile; what is wrong is named with its file and line.

What must hold between keys is checked here, too; what needs the store or the processes is for the run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hoploom.config.document import SET, Document, absolute, parse_document, read_document
from hoploom.config.rules import default_of, keys_in, problem
from hoploom.ranks import environment
from hoploom.train.runs.run_file import FIELDS, HEADINGS, KEYS, LINKS, RunFile, applies

NO_CACHE = "cluster.cache has no effect where servers make the batches; leave it out, and start them with --cache"


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """The run.toml at a path; overrides are `section.key=value`.

    Relative paths are relative to the file, those of overrides to the current directory.
    """
    absent = f"`hoploom init {path}` writes one to start from"
    return _run_file(read_document(path, HEADINGS, absent=absent, overrides=overrides))


def parse_recipe(text: str, overrides: Sequence[str] = (), *, name: str = "run.toml", folder: Path = Path()) -> RunFile:
    """The run.toml in a text. `name` is what messages call it, `folder` what its relative paths are relative to."""
    return _run_file(parse_document(text, HEADINGS, name=name, folder=folder, overrides=overrides))


def _run_file(document: Document) -> RunFile:
    where = document.where
    served = "cluster.servers" in where or bool(environment.read_launch_settings().servers)
    values = document.top(optional=("store",) if served else ())  # servers can make the batches
    for section, owner in HEADINGS.items():
        if section:
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
    _check(values, where)
    sections = {
        section: owner(**{name: values[f"{section}.{name}"] for name in keys_in(owner)})
        for section, owner in HEADINGS.items()
        if section
    }
    return RunFile(**{name: values[name] for name in keys_in(RunFile)}, **sections, where=where)


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


def _check(values: dict[str, Any], where: Mapping[str, str]) -> None:
    """Raise ConfigError for the first pair of keys that disagree; set what follows from others."""
    _check_layers(values, where)
    _check_heads(values, where)
    _check_sampling(values, where)
    _check_links(values, where)
    _check_validation(values, where)
    _check_cluster(values, where)
    if values["scheduler.min_lr"] >= values["optimizer.lr"]:
        message = f"scheduler.min_lr is {values['scheduler.min_lr']}, optimizer.lr only {values['optimizer.lr']}"
        raise problem(where, "scheduler.min_lr", f"{message}; give less")


def _check_layers(values: dict[str, Any], where: Mapping[str, str]) -> None:
    fanouts, layers = values["loader.fanouts"], values["model.layers"]
    if layers is not None and layers != len(fanouts):
        at = f" (model.layers, {where['model.layers']})" if "loader.fanouts" in where else ""
        name = "loader.fanouts" if "loader.fanouts" in where else "model.layers"
        example = [*fanouts, *fanouts[-1:] * layers][:layers]
        message = f"loader.fanouts has {_entries(fanouts)} for {layers} layers{at}; give one per layer, e.g. {example}"
        raise problem(where, name, message)
    lists = {
        f"loader.relation_fanouts, {name!r},": counts for name, counts in values["loader.relation_fanouts"].items()
    }
    if values["loader.eval_fanouts"] is not None:
        lists["loader.eval_fanouts"] = values["loader.eval_fanouts"]
    for name, counts in lists.items():
        if len(counts) != len(fanouts):
            message = f"{name} has {_entries(counts)}, loader.fanouts {len(fanouts)}; give one per layer"
            raise problem(where, name.partition(",")[0], message)
    values["model.layers"] = len(fanouts)


def _check_heads(values: dict[str, Any], where: Mapping[str, str]) -> None:
    hidden, heads = values["model.hidden"], values["model.heads"]
    beside = values["model.layers"] > 1 or values["model.residual"]  # else they are averaged
    if applies("model.heads", values) and beside and hidden % heads:
        name = "model.hidden" if "model.hidden" in where else "model.heads"
        raise problem(where, name, f"model.hidden is {hidden}, no multiple of model.heads = {heads}; make it one")


def _entries(counts: tuple[int, ...]) -> str:
    return f"{len(counts)} entr{'y' if len(counts) == 1 else 'ies'}"


def _check_sampling(values: dict[str, Any], where: Mapping[str, str]) -> None:
    if values["loader.labor"]:
        for name in ("replace", "weighted", "temporal"):
            if values[f"loader.{name}"]:
                raise problem(where, f"loader.{name}", f"loader.{name} cannot be combined with loader.labor; drop one")
    if values["loader.weighted"] and values["loader.temporal"] == "last":
        message = 'loader.temporal = "last" draws nothing, so loader.weighted has no effect; drop one'
        raise problem(where, "loader.temporal", message)


def _check_links(values: dict[str, Any], where: Mapping[str, str]) -> None:
    if values["task.kind"] != LINKS:
        return
    held_out = values["task.val_share"] + values["task.test_share"]
    if held_out >= 1:
        name = "task.test_share" if "task.test_share" in where else "task.val_share"
        raise problem(where, name, f"task.val_share and task.test_share add up to {held_out:g}; leave some to train on")
    for name in ("task.val_share", "task.test_share"):
        if values["task.links"] is not None and name in where:
            raise problem(where, name, f"{name} has no effect with task.links; drop one of the two")


def _check_validation(values: dict[str, Any], where: Mapping[str, str]) -> None:
    """What looks at the validation split needs one."""
    if values["task.kind"] == LINKS:
        missing = values["task.links"] is None and values["task.val_share"] == 0
        way_out = "set task.val_share"
    else:
        missing, way_out = not values["task.val"], "name one in task.val"
    if not missing:
        return
    for name in ("train.patience", "train.monitor"):
        if values[name] is not None:
            raise problem(where, name, f"{name} needs a validation split; {way_out}, or leave it out")
    if values["scheduler.name"] == "plateau":
        message = f'scheduler.name = "plateau" needs a validation split; {way_out}, or take another schedule'
        raise problem(where, "scheduler.name", message)


def _check_cluster(values: dict[str, Any], where: Mapping[str, str]) -> None:
    given = {name for name in ("cert", "key") if values[f"cluster.{name}"] is not None}
    if len(given) == 1:
        name = given.pop()
        raise problem(where, f"cluster.{name}", f"cluster.{name} is given alone; give cluster.cert and cluster.key")
    if "cert" in given and values["cluster.ca"] is None:
        raise problem(where, "cluster.cert", "cluster.cert is given without cluster.ca; give the CA of the servers too")
    if values["store"] is None and values["cluster.cache"] is not None:
        raise problem(where, "cluster.cache", NO_CACHE)


def check_world(run_file: RunFile, world_size: int) -> None:
    """Raise ConfigError unless the seeds of a step can be shared out evenly."""
    batch_size = run_file.loader.batch_size
    if batch_size % world_size == 0:
        return
    below = batch_size // world_size * world_size
    nearest = " or ".join(str(size) for size in (below, below + world_size) if size)
    message = f"loader.batch_size is {batch_size} for {world_size} processes; give {nearest}"
    raise run_file.problem("loader.batch_size", message)


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
