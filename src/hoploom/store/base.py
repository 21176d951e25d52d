"""The two seams: where topology and features live is a detail behind them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
