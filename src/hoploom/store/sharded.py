"""Several parts as one store: route ids to their part, ask, stitch the answers in order.

Costs one pass over the ids to route and one over the answers to stitch; a single part pays neither.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops import Empty, Frontier, Picks
from hoploom.schema import DTYPES, Owner, Schema
from hoploom.store.base import NO_IDS, Draw, Shard, Triple, Wanted, read_wanted
from hoploom.store.format import PartRange

Answer = TypeVar("Answer")
Begin: TypeAlias = Callable[[], Callable[[], Answer]]


class Sharded:
    """A GraphStore and FeatureStore over parts, wherever each of them lives."""

    def __init__(self, schema: Schema, shards: Sequence[Shard], ranges: Sequence[PartRange]) -> None:
        self.schema = schema
        self.shards = tuple(shards)
        self._cuts: dict[Owner, Tensor] = {}  # where the second part begins, the third and so on
        for index, node_type in enumerate(schema.node_types):
            self._cuts[node_type.name] = torch.tensor([held.first_nodes[index] for held in ranges[1:]]).long()
        for index, relation in enumerate(schema.relations):
            self._cuts[relation.key] = torch.tensor([held.first_edges[index] for held in ranges[1:]]).long()

    def over(self, shards: Sequence[Shard]) -> "Sharded":
        """Other shards, cut at the same places."""
        other = copy.copy(self)
        other.shards = tuple(shards)
        return other

    def route(self, owner: Owner, ids: Tensor, places: Tensor | None = None) -> list[Tensor]:
        """Per part: the positions in `ids`, or those among `places`, that it owns."""
        return ops.route(ids, self._cuts[owner], places)

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """One hop: one request to every shard, for all relations."""
        places = [
            None if frontier is None else self.route(node_type.name, frontier.nodes)
            for node_type, frontier in zip(self.schema.node_types, frontiers, strict=True)
        ]
        begins: dict[int, Begin[list[Picks | None]]] = {}
        for index, shard in enumerate(self.shards):
            own = [select_frontier(f, None if p is None else p[index]) for f, p in zip(frontiers, places, strict=True)]
            if any(frontier is not None for frontier in own):
                begins[index] = partial(shard.begin_sample, own, draw)
        answers = self._ask(begins)
        out: list[Picks | None] = []
        for relation, destination in enumerate(self.schema.destinations):
            frontier, owned = frontiers[destination], places[destination]
            picks = [answers[index][relation] if index in answers else None for index in range(len(self.shards))]
            if frontier is None or not owned:
                out.append(None)
            else:
                out.append(stitch_picks(picks, owned, frontier, counts_only=draw.counts_only))
        return out

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        """Rows: one request to every shard, for all fields."""
        wanted = read_wanted(self.schema, wanted)
        outs = [empty_rows(self.schema, owner, name, ids.numel(), empty) for owner, name, ids in wanted]
        self.gather_at(wanted, [None] * len(wanted), outs)
        return outs

    def gather_at(self, wanted: Sequence[Wanted], places: Sequence[Tensor | None], outs: Sequence[Tensor]) -> None:
        """The same, straight to where they belong: outs[i], for all of wanted[i].ids or those at places[i]."""
        self.gather_owned(wanted, self._owned(wanted, places), outs)

    def gather_owned(self, wanted: Sequence[Wanted], owned: Sequence[Sequence[Tensor]], outs: Sequence[Tensor]) -> None:
        """The same, where it is known which places of wanted[i].ids each part is asked for: owned[i]."""
        begins: dict[int, Begin[None]] = {}
        for index, shard in enumerate(self.shards):
            own = [of_parts[index] for of_parts in owned]
            if any(place.numel() for place in own):
                begins[index] = partial(shard.begin_gather, wanted, own, outs)
        self._ask(begins)

    def _ask(self, begins: Mapping[int, Begin[Answer]]) -> dict[int, Answer]:
        """The answers of these shards: remote ones have their requests first, and work while disks and memory do.

        Every call begun is finished, whatever another one raises, so that no answer is left unread.
        """
        answers: dict[int, Answer] = {}
        under_way: list[tuple[int, Callable[[], Answer]]] = []
        try:
            for index in begins if len(begins) == 1 else sorted(begins, key=self._nearness):
                under_way.append((index, begins[index]()))
            while under_way:  # from the last one begun to the first
                index, answer = under_way.pop()
                answers[index] = answer()
        finally:
            if under_way:
                with ExitStack() as left:
                    for _, answer in under_way:
                        left.callback(answer)
        return answers

    def _nearness(self, index: int) -> tuple[bool, bool]:
        """Peers come before disks, and disks before memory."""
        shard = self.shards[index]
        return not shard.is_remote, shard.is_here

    def _owned(self, wanted: Sequence[Wanted], places: Sequence[Tensor | None]) -> list[list[Tensor]]:
        """Per want and part: the places that it owns, found once for all fields of the same ids."""
        found: dict[tuple[Owner, int, int], list[Tensor]] = {}
        owned = []
        for (owner, _, ids), place in zip(wanted, places, strict=True):
            key = owner, id(ids), id(place)
            if key not in found:
                found[key] = self.route(owner, ids, place)
            owned.append(found[key])
        return owned


def select_frontier(frontier: Frontier | None, places: Tensor | None) -> Frontier | None:
    """A part's share of a frontier; None if it has none."""
    if frontier is None or places is None or places.numel() == 0:
        return None
    if _are_all(places, frontier):
        return frontier
    return Frontier(*(None if column is None else ops.select(column, places) for column in frontier))  # type: ignore[arg-type]


def stitch_picks(
    parts: Sequence[Picks | None], places: Sequence[Tensor], frontier: Frontier, *, counts_only: bool = False
) -> Picks | None:
    """The parts' picks in the frontier's order."""
    answered = [(place, picks) for picks, place in zip(parts, places, strict=True) if picks is not None]
    if not answered:
        return None
    if _are_all(answered[0][0], frontier):
        return answered[0][1]
    if not counts_only:
        return ops.stitch(answered, frontier.nodes.numel())
    counts = torch.zeros_like(frontier.nodes)
    for place, picks in answered:
        ops.scatter_rows(picks.counts, place, counts)
    return Picks(counts, NO_IDS, NO_IDS)


def _are_all(places: Tensor, frontier: Frontier) -> bool:
    """Whether places are all those of a frontier, in order."""
    return places.numel() == frontier.nodes.numel() and ops.is_counting(places)


def empty_rows(schema: Schema, owner: Owner, name: str, count: int, empty: Empty = ops.empty) -> Tensor:
    """Memory for rows of a field."""
    described = schema.node_type(owner) if isinstance(owner, str) else schema.relation(owner)
    of_field = described.fields[name]
    return empty((count, *of_field.shape), DTYPES[of_field.dtype])
