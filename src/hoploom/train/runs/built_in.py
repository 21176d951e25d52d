"""The built-in model of a run: its shape, the edge fields that it reads, and the options of its loader."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hoploom.errors import ConfigError
from hoploom.nn import GNN, Shape
from hoploom.nn.edge_fields import MOST_CATEGORIES, are_categories
from hoploom.nn.models import KINDS
from hoploom.schema import DTYPES, Relation
from hoploom.store import Store
from hoploom.store.base import scan_rows
from hoploom.train.runs.link_splits import unknown_name
from hoploom.train.runs.run_file import RunFile
from hoploom.train.tasks import NodeTask, Task

MOST_EDGES = 1 << 24  # of a relation whose numbers are checked; categories are counted over all edges


def shape_of(run_file: RunFile, num_outputs: int, categories: Mapping[str, int]) -> Shape:
    """Return the shape that run.toml gives the model."""
    section = run_file.model
    return Shape(
        hidden=section.hidden,
        num_layers=len(run_file.loader.fanouts),
        out=num_outputs,
        dropout=section.dropout,
        heads=section.heads if KINDS[section.name].has_heads else 1,
        norm=section.norm,
        residual=section.residual,
        edges=section.edges or (),
        weights=section.weights,
        categories=categories,
    )


@contextmanager
def naming_model(run_file: RunFile) -> Iterator[None]:
    """Name the line of model.name in a ConfigError of this block."""
    try:
        yield
    except ConfigError as error:
        message = f"model.name = {run_file.model.name!r} does not fit the store: {error}"
        raise run_file.problem("model.name", message) from error


def read_edge_fields(run_file: RunFile, store: Store) -> dict[str, int]:
    """Return the number of categories of each integer field of edges that the model reads.

    Raise ConfigError, with the line of run.toml, for a field that is not there, that has a number that is not finite,
    or, if the model is "gcn", for a negative weight.
    """
    section, counts = run_file.model, dict[str, int]()
    given = [("model.edges", name) for name in section.edges or ()]
    given += [("model.weights", section.weights)] if section.weights else []
    there = {name: field for relation in store.schema.relations for name, field in relation.fields.items()}
    for key, name in given:
        if name not in there:
            raise unknown_name(run_file, key, f"{key} names {name!r}, no field of edges", name, sorted(there))
        for relation in (r for r in store.schema.relations if name in r.fields):
            if key == "model.edges" and are_categories(relation.fields[name]):
                counts[name] = max(counts.get(name, 0), _count_categories(run_file, store, relation, name))
            else:
                _check_numbers(run_file, store, relation, key, name)
    return counts


def _count_categories(run_file: RunFile, store: Store, relation: Relation, name: str) -> int:
    low, high = 0, 0
    for rows in scan_rows(store.features, relation.key, name, relation.num_edges):
        if rows.numel():
            low, high = min(low, int(rows.min())), max(high, int(rows.max()))
    if low < 0 or high >= MOST_CATEGORIES:
        message = (
            f"{name!r} of {relation.key} holds integers from {low:,} to {high:,}, and the model learns a row of each"
        )
        raise run_file.problem("model.edges", f"{message}; number categories from 0, or store numbers as floats")
    return high + 1


def _check_numbers(run_file: RunFile, store: Store, relation: Relation, key: str, name: str) -> None:
    is_weight, first = key == "model.weights" and run_file.model.name == "gcn", 0
    for rows in scan_rows(store.features, relation.key, name, min(relation.num_edges, MOST_EDGES)):
        wrong = ~rows.isfinite() | (rows < 0) if is_weight else ~rows.isfinite()
        if bool(wrong.any()):
            at = tuple(int(index) for index in torch.nonzero(wrong)[0])
            wanted = "a number of at least 0" if is_weight else "a finite number"
            message = (
                f"{name!r} of edge {first + at[0]} of {relation.key} is {float(rows[at])}; give every edge {wanted}"
            )
            raise run_file.problem(key, message)
        first += len(rows)


def loader_options(model: GNN, store: Store, task: Task, *, are_whole: bool) -> dict[str, Any]:
    """Return the options of a loader for the model: the fields that it and the task read, and what layer one takes.

    `are_whole`: the batches are of whole steps, which read what they need themselves.
    """
    floats = [DTYPES[t.fields["x"].dtype].is_floating_point for t in store.schema.node_types if "x" in t.fields]
    reduce = model.first_reduce if all(floats) and not are_whole and not store.learned else None
    fields: dict[Any, Sequence[str]] = dict(model.fields)
    if isinstance(task, NodeTask):
        name = task.node_type or store.schema.node_types[0].name
        fields[name] = [*fields.get(name, ()), task.label]
    return {"aggregate": reduce, "degrees": model.needs_degrees, "fields": None if are_whole else fields}
