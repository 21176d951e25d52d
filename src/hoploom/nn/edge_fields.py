"""The edge fields that a model reads: features, side by side, and weights. Categories become learned rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from hoploom.errors import ConfigError
from hoploom.nn.layers import ReadEdges
from hoploom.nn.relational import module_name
from hoploom.ops import InEdges
from hoploom.ops.deadline import on_host
from hoploom.schema import Field, Relation, holds_text

CATEGORY_WIDTH = 16  # of the learned row of a category
MOST_CATEGORIES = 1 << 20


class EdgeReader(nn.Module):
    """The fields of one relation that a model reads, and what makes them the features of its layers.

    Numbers are taken as they are, in any dtype. An integer field with one value per edge holds categories.
    """

    def __init__(self, relation: Relation, read: ReadEdges, categories: Mapping[str, int]) -> None:
        super().__init__()
        fields = {name: relation.fields[name] for name in read.names if name in relation.fields}
        for index, name in enumerate(read.names):
            if name in fields:
                _check(relation, name, fields[name], categories, is_weight=index == len(read.features))
        self.key = relation.key
        self.read = ReadEdges(
            [n for n in read.features if n in fields], read.weights if read.weights in fields else None
        )
        self._widths = {name: prod(fields[name].shape) for name in self.read.features}
        counts = {name: categories[name] for name in self.read.features if are_categories(fields[name])}
        self.rows = nn.ModuleDict({module_name(name): nn.Embedding(n, CATEGORY_WIDTH) for name, n in counts.items()})

    @property
    def width(self) -> int | None:
        """The width of the features that layers get; None without features."""
        taken = [CATEGORY_WIDTH if module_name(name) in self.rows else own for name, own in self._widths.items()]
        return sum(taken) if taken else None

    def forward(self, edges: InEdges, dtype: torch.dtype) -> InEdges:
        """Return the edges with the features that layers get, from the fields' values; raise if a field is missing."""
        given = None if edges.features is None else edges.features.shape[1]
        wanted = sum(self._widths.values()) if self._widths else None
        if given != wanted or (edges.weights is None and self.read.weights is not None):
            raise ConfigError(
                f"the model reads {self.read.names} of the edges {self.key}, features of width {wanted}, and the batch "
                f"has width {given}; give the loader fields=model.fields and the labels, and make both from one store"
            )
        if edges.features is None or (edges.features.dtype == dtype and not self.rows):
            return edges
        columns = torch.split(edges.features, list(self._widths.values()), dim=1)
        made = [self._encoded(name, own).to(dtype) for name, own in zip(self._widths, columns, strict=True)]
        return replace(edges, features=torch.cat(made, dim=1) if len(made) > 1 else made[0])

    def _encoded(self, name: str, column: Tensor) -> Tensor:
        if module_name(name) not in self.rows:
            return column
        table: nn.Module = self.rows[module_name(name)]
        numbers, most = column.view(-1).to(torch.int64), int(table.num_embeddings) - 1  # type: ignore[arg-type]
        is_read = numbers.device.type == "cpu" or not self.training
        if is_read and not on_host(((numbers >= 0) & (numbers <= most)).all(), f"sampled {name!r} of edges"):
            way_out = "the model knows no others: change these, or train again"
            raise ConfigError(f"{name!r} of the edges {self.key} has a category outside 0 to {most}; {way_out}")
        return table(numbers)  # type: ignore[no-any-return]


def are_categories(field: Field) -> bool:
    """Return whether the values of an edge field are categories: integers, one per edge."""
    return not field.shape and "int" in field.dtype


def _check(relation: Relation, name: str, field: Field, categories: Mapping[str, int], *, is_weight: bool) -> None:
    """Raise ConfigError if a model cannot read the field."""
    what = f"the edge field {name!r} of {relation.key}"
    if is_weight:
        if field.shape or field.dtype == "bool":
            raise ConfigError(f"{what} is {field.dtype} {list(field.shape)}; weights are one number per edge")
    elif 0 in field.shape:
        raise ConfigError(f"{what} has no columns; leave it out")
    elif holds_text(field):
        raise ConfigError(f"{what} is text, which no model reads; build the store with numbers instead")
    elif are_categories(field) and not 0 < categories.get(name, 0) <= MOST_CATEGORIES:
        raise ConfigError(
            f"{what} holds integers, which are categories, here {categories.get(name, 0):,}; give their number, "
            f"categories={{{name!r}: n}}, at most {MOST_CATEGORIES:,}, or store numbers as floats"
        )


def edge_fields(
    relations: Sequence[Relation], read: ReadEdges, categories: Mapping[str, int]
) -> dict[tuple[str, str, str], EdgeReader]:
    """Return, for each relation that has some of the fields that a model reads, its part of them."""
    there = {name for relation in relations for name in relation.fields}
    for name in read.names:
        if name not in there:
            raise ConfigError(f"no edges that the model reads have a field {name!r}; the fields are {sorted(there)}")
    made = {relation.key: EdgeReader(relation, read, categories) for relation in relations}
    return {key: own for key, own in made.items() if own.read.names}
