"""How batches are sampled: the options, checked against a schema before any loop starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hoploom.config.values import as_fanouts
from hoploom.errors import ConfigError
from hoploom.schema import RelationName, Schema

Subgraph = Literal["directional", "bidirectional", "induced"]
Temporal = Literal["uniform", "last"]
Mode = Literal["subgraph", "blocks"]
NumNeighbors = Sequence[int] | Mapping[RelationName, Sequence[int]]


@dataclass(frozen=True)
class Sampling:
    """Everything that decides a batch besides the store, the seeds and the key."""

    fanouts: tuple[tuple[int, ...], ...]  # [hop][relation]; -1: all
    replace: bool = False
    weighted: bool = False
    labor: bool = False
    disjoint: bool = False
    temporal: Temporal | None = None
    subgraph: Subgraph = "directional"
    mode: Mode = "subgraph"

    @property
    def num_hops(self) -> int:
        return len(self.fanouts)


def resolve_fanouts(schema: Schema, num_neighbors: NumNeighbors) -> tuple[tuple[int, ...], ...]:
    """One fanout per hop and relation.

    >>> resolve_fanouts(schema, [15, 10, 5])
    """
    if isinstance(num_neighbors, Mapping):
        per_relation = _hops_by_relation(schema, num_neighbors)
    else:
        per_relation = [as_fanouts(num_neighbors)] * len(schema.relations)
    num_hops = len(per_relation[0]) if per_relation else 0
    if num_hops == 0:
        raise ConfigError("fanouts are empty; give one per layer, e.g. [15, 10, 5]")
    return tuple(tuple(hops[hop] for hops in per_relation) for hop in range(num_hops))


def _hops_by_relation(schema: Schema, num_neighbors: Mapping[RelationName, Sequence[int]]) -> list[tuple[int, ...]]:
    unknown = [key for key in num_neighbors if key not in schema.relation_index]
    if unknown:
        raise ConfigError(f"fanouts name {unknown[0]!r}; the relations are {list(schema.relation_index)}")
    if not num_neighbors:
        return []
    by_relation = {key: as_fanouts(hops) for key, hops in num_neighbors.items()}
    lengths = {len(hops) for hops in by_relation.values()}
    if len(lengths) > 1:
        raise ConfigError(f"fanouts have {sorted(lengths)} entries; give every relation the same number of hops")
    missing = [key for key in schema.relation_index if key not in by_relation]
    if missing:
        raise ConfigError(f"fanouts leave out {missing[0]!r}; give it a list too, [0, ...] to skip it")
    return [by_relation[key] for key in schema.relation_index]


def make_sampling(
    schema: Schema,
    num_neighbors: NumNeighbors,
    *,
    replace: bool = False,
    labor: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    time_attr: str | None = None,
    weight_attr: str | None = None,
    subgraph_type: str = "directional",
    mode: str = "subgraph",
) -> Sampling:
    """Check the options of a loader against each other and against the graph."""
    subgraph = _choice("subgraph_type", subgraph_type, Subgraph.__args__)  # type: ignore[attr-defined]
    _choice("mode", mode, Mode.__args__)  # type: ignore[attr-defined]
    temporal = _choice("temporal_strategy", temporal_strategy, Temporal.__args__)  # type: ignore[attr-defined]
    _check_attr("weight_attr", weight_attr, schema.weight)
    _check_attr("time_attr", time_attr, schema.time)
    sampling = Sampling(
        resolve_fanouts(schema, num_neighbors),
        replace=replace,
        weighted=weight_attr is not None,
        labor=labor,
        disjoint=disjoint or time_attr is not None,
        temporal=temporal if time_attr is not None else None,  # type: ignore[arg-type]
        subgraph=subgraph,  # type: ignore[arg-type]
        mode=mode,  # type: ignore[arg-type]
    )
    _check_combination(sampling)
    return sampling


def _choice(name: str, value: object, allowed: Sequence[str]) -> str:
    value = getattr(value, "value", value)  # PyG's enums hold their word in .value
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose one of {list(allowed)}")
    return str(value)


def _check_attr(name: str, wanted: str | None, prepared: str | None) -> None:
    if wanted is not None and wanted != prepared:
        raise ConfigError(f"{name} is {wanted!r}, the store was built with {prepared!r}; build it with {wanted!r}")


def _check_combination(sampling: Sampling) -> None:
    if sampling.subgraph == "induced" and sampling.disjoint:
        raise ConfigError("subgraph_type='induced' cannot be disjoint or temporal; drop one of the two")
    if sampling.subgraph != "directional" and sampling.mode == "blocks":
        raise ConfigError(f"mode='blocks' has no subgraph_type={sampling.subgraph!r}; leave it out")
    if sampling.weighted and sampling.temporal == "last":
        raise ConfigError("temporal_strategy='last' draws nothing, weight_attr has no effect; drop one of the two")
    if sampling.labor and (sampling.replace or sampling.weighted or sampling.disjoint):
        raise ConfigError("labor=True cannot be combined with replace, weights, disjoint or time; drop one of them")
