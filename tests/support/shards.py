"""Parts that pretend to be elsewhere, and remember what they were asked."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from torch import Tensor

from hoploom.ops import Frontier, Picks
from hoploom.schema import TypeKey
from hoploom.store import Draw, Part, Sharded, Store, Wanted
from hoploom.store.base import RowLookup, Tier, range_of
from support.graphs import cut

Answer = TypeVar("Answer")
Asked = dict[tuple[TypeKey, str], list[int]]  # the ids asked for, by owner and field


@dataclass
class Elsewhere:
    """A shard that answers as its part does; `log` is shared, so that the order of all calls can be seen."""

    part: Part
    number: int = 0
    log: list[str] = field(default_factory=list)
    gathers: list[Asked] = field(default_factory=list)
    samples: int = 0
    error: Exception | None = None  # what finishing raises
    tier: ClassVar[Tier] = Tier.REMOTE

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        return False

    def look_up(self, owner: TypeKey, ids: Tensor, positions: Tensor) -> RowLookup:
        return RowLookup(owner, ids, (positions[:0],), (), positions)

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        assert any(frontier is not None for frontier in frontiers)
        self.samples += 1
        self.log.append(f"begin {self.number}")
        return lambda: self._finished(self.part.begin_sample(frontiers, draw))

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        assert any(place.numel() for place in places)
        pairs = zip(wanted, places, strict=True)
        self.gathers.append({(w.owner, w.field): w.ids[place].tolist() for w, place in pairs if place.numel()})
        self.log.append(f"begin {self.number}")
        return lambda: self._finished(self.part.begin_gather(wanted, places, outs))

    def split(self, node_type: str, name: str) -> Tensor:
        return self.part.split(node_type, name)

    def _finished(self, answer: Callable[[], Answer]) -> Answer:
        self.log.append(f"finish {self.number}")
        if self.error is not None:
            raise self.error
        return answer()

    def rows_of(self, owner: TypeKey, name: str) -> list[int]:
        return [one for asked in self.gathers for one in asked.get((owner, name), [])]


def spread(store: Store, num_parts: int, here: Collection[int], *, whole_topology: bool = False) -> Store:
    """A store of one part as several, of which all but some pretend to be elsewhere."""
    schema, parts = store.schema, cut(store, num_parts)
    ranges = tuple(map(range_of, parts))
    log: list[str] = []
    shards = tuple(part if number in here else Elsewhere(part, number, log) for number, part in enumerate(parts))
    features = Sharded(schema, shards, ranges)
    graph = features.over(parts) if whole_topology else features
    own = tuple(part for number, part in enumerate(parts) if number in here)
    topology = tuple(parts) if whole_topology else own
    return Store(schema, graph, features, own, ranges=ranges, shards=shards, topology=topology)


def elsewhere_of(store: Store) -> list[Elsewhere]:
    return [shard for shard in store.shards if isinstance(shard, Elsewhere)]
