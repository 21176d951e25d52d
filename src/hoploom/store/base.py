"""The two seams: where topology and features live is a detail behind them. Shards are their pieces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hoploom import keys
from hoploom.ops import Frontier, Picks, Rule
from hoploom.schema import Owner, Schema


class Draw(NamedTuple):
    """How one hop is drawn, for all relations at once."""

    key: int
    hop: int
    fanouts: Sequence[int]  # per relation
    replace: bool = False
    last: bool = False
    labor: bool = False
    weighted: bool = False

    def rule(self, relation: int) -> Rule:
        """The part of it that concerns one relation."""
        word = keys.stream(self.hop, relation)
        return Rule(self.key, word, self.fanouts[relation], self.replace, self.last, self.labor, self.weighted)


class Wanted(NamedTuple):
    """Rows of one field: of a node type by node id, of a relation by edge position."""

    owner: Owner
    field: str
    ids: Tensor  # [n] int64


class GraphStore(Protocol):
    """Topology. Frontiers are listed by node type, picks by relation."""

    @property
    def schema(self) -> Schema: ...

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """Pick in-edges; None for a relation whose destination type has no frontier."""


class FeatureStore(Protocol):
    """Rows of named fields."""

    @property
    def schema(self) -> Schema: ...

    def gather(self, wanted: Sequence[Wanted], *, pinned: bool = False) -> list[Tensor]:
        """The rows asked for, in order, in fresh (recycled) memory."""


class Shard(Protocol):
    """Both seams over one range of nodes, here or elsewhere.

    To begin is to send what is asked, where it goes anywhere; the call returned finishes it and must be made, once.
    So all peers can be asked before the first answer is read, without threads.
    """

    @property
    def is_here(self) -> bool:
        """Whether this process answers by itself; asking a shard that is elsewhere costs a round trip."""

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """Begin one hop of this range's nodes: as GraphStore.sample."""

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Begin to write rows where they belong: outs[i][places[i]] = the rows of wanted[i].ids[places[i]].

        places[i] are [n] int64; outs[i] has the field's dtype and a row for every one of wanted[i].ids.
        """

    def split(self, node_type: str, name: str) -> Tensor:
        """The members of a split in this range, [n] int64; none where the type has no such split."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What a store has to do with other processes and devices: this one, nothing. The others are made by
    hoploom.connect and Store.place."""

    homes: tuple[tuple[int, ...], ...] = ()  # the parts of every rank, where a context has found out
    placed: Any = None  # what a GPU's kernels read: hoploom.gpu.place.placed_store.PlacedStore

    @property
    def makes_batches(self) -> bool:
        """Whether servers make the batches: this process needs no graph then."""
        return False

    def producer(self, maker: Any, device: torch.device | None, look_ahead: int | None, deadline: float) -> Any:
        """Who makes a loader's batches (hoploom.load.loader.Producer), if that is not for the loader to choose."""
        return None

    def traffic(self) -> dict[str, int]:
        """What was asked of other processes so far."""
        return {}

    def close(self, *, wait: bool) -> None:
        """Leave them. `wait=False` is for leaving after an error: other ranks are not waited for."""


NOWHERE = Deployment()
