"""The built-in model of a run: its shape, the edge fields that it reads, and the options of its loader."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.nn import GNN, Shape
from hoploom.nn.edge_fields import MOST_CATEGORIES, are_categories
from hoploom.nn.models import KINDS
from hoploom.ranks.context import Context, all_or_none
from hoploom.schema import DTYPES, EDGE_ID, Relation
from hoploom.store import Store, Wanted
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


def read_edge_fields(run_file: RunFile, store: Store, context: Context, *, trains: bool) -> dict[str, int]:
    """Return the number of categories of each integer field of edges that the model reads. All ranks call.

    Each rank reads a share of the edges. Raise ConfigError, with the line of run.toml, for a field that is not there,
    and, if the run trains, for a number that is not finite, too large a category, or a negative weight for "gcn".
    """
    section, counts = run_file.model, dict(run_file.model.categories)
    given = [("model.edges", name) for name in section.edges or ()]
    given += [("model.weights", section.weights)] if section.weights else []
    there = {name: field for relation in store.schema.relations for name, field in relation.fields.items()}
    for key, name in given:
        if name not in there:
            raise unknown_name(run_file, key, f"{key} names {name!r}, no field of edges", name, sorted(there))
        for relation in (r for r in store.schema.relations if name in r.fields):
            is_counted = key == "model.edges" and are_categories(relation.fields[name])
            if trains or (is_counted and name not in section.categories):
                with all_or_none(context, f"reading {name!r} of {relation.key}"):
                    pieces, field = _share(store, context, relation, name, whole=is_counted), (relation, key, name)
                    read = _count_categories if is_counted else partial(_check_numbers, store)
                    found = read(run_file, pieces, *field)
                if is_counted and name not in section.categories:
                    counts[name] = max(counts.get(name, 0), context.max(found))
    return counts


def _share(
    store: Store, context: Context, relation: Relation, name: str, *, whole: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield this rank's share of the rows of an edge field, with the position of the first row of each piece."""
    count = relation.num_edges if whole else min(relation.num_edges, MOST_EDGES)
    first, end = (count * rank // context.world_size for rank in (context.rank, context.rank + 1))
    for rows in scan_rows(store.features, relation.key, name, end, begin=first):
        yield first, rows
        first += len(rows)


def _count_categories(
    run_file: RunFile, pieces: Iterator[tuple[int, Tensor]], relation: Relation, key: str, name: str
) -> int:
    low, high, most = 0, 0, run_file.model.categories.get(name, MOST_CATEGORIES)
    for _, rows in pieces:
        if rows.numel():
            low, high = min(low, int(rows.min())), max(high, int(rows.max()))
    if low < 0 or high >= most:
        message = f"{name!r} of {relation.key} holds integers from {low:,} to {high:,}, and the model learns a row"
        message = f"{message} of each of at most {most:,}"
        raise run_file.problem(key, f"{message}; number categories from 0, or store numbers as floats")
    return high + 1


def _check_numbers(
    store: Store, run_file: RunFile, pieces: Iterator[tuple[int, Tensor]], relation: Relation, key: str, name: str
) -> int:
    is_weight = key == "model.weights" and run_file.model.name == "gcn"
    for first, rows in pieces:
        wrong = ~rows.isfinite() | (rows < 0) if is_weight else ~rows.isfinite()
        if bool(wrong.any()):
            at = tuple(int(index) for index in torch.nonzero(wrong)[0])
            wanted = "a number of at least 0" if is_weight else "a finite number"
            edge = torch.tensor([first + at[0]])
            if EDGE_ID in relation.fields:  # the edge's number in the user's order
                (edge,) = store.features.gather([Wanted(relation.key, EDGE_ID, edge)])
            message = f"{name!r} of edge {int(edge)} of {relation.key} is {float(rows[at])}; give every edge {wanted}"
            raise run_file.problem(key, message)
    return 0


def loader_options(model: GNN, store: Store, task: Task, *, are_whole: bool) -> dict[str, Any]:
    """Return the options of a loader for the model: the fields that it and the task read, and what layer one takes.

    With `are_whole`, the loader is for whole steps, which aggregate nothing beforehand.
    """
    floats = [DTYPES[t.fields["x"].dtype].is_floating_point for t in store.schema.node_types if "x" in t.fields]
    reduce = model.first_reduce if all(floats) and not are_whole and not store.learned else None
    fields: dict[Any, Sequence[str]] = dict(model.fields)
    if isinstance(task, NodeTask):
        name = task.node_type or store.schema.node_types[0].name
        fields[name] = [*fields.get(name, ()), *task.labels]
    return {"aggregate": reduce, "degrees": model.needs_degrees, "fields": fields}
