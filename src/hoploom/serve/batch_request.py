"""What a loader asks of a server that makes its batches, as plain JSON and a few tensors.

A batch's own seeds, its place in the epoch's randomness and the loader's options are all that any server needs to
make it. Functions do not travel: a transform runs where the loader is, frontier hooks are refused.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom.ops import Reduce
from hoploom.sample.options import Sampling
from hoploom.schema import DTYPE_NAMES, Owner


@dataclass(frozen=True)
class Negatives:
    """Which negatives go with links. Weights, one number per node, are named by their hash."""

    mode: str  # binary or triplet
    amount: float
    strict: bool = False
    src_weight: str | None = None
    dst_weight: str | None = None

    @property
    def weights(self) -> list[str]:
        return [name for name in (self.src_weight, self.dst_weight) if name is not None]


@dataclass(frozen=True)
class Description:
    """What all batches of a loader have in common."""

    owner: Owner  # the seeds' node type, or the links' relation
    sampling: Sampling
    aggregate: Reduce | None = None
    degrees: bool = False
    negatives: Negatives | None = None

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)


class BatchRequest(NamedTuple):
    """One batch: everything that decides it, besides the store."""

    description: Description
    seeds: Mapping[str, Tensor]  # "nodes", or "sources" and "destinations"; beside them "times" and "labels", if any
    first: int  # the place of the first seed in its step
    key: int
    weights: Mapping[str, Tensor] = {}  # of negatives, by hash

    def header(self, attached: list[str]) -> dict[str, Any]:
        """The request but its tensors: the seeds, and the weights attached."""
        names = {"seeds": list(self.seeds), "weights": attached}
        return {"description": self.description.plain, **names, "first": self.first, "key": self.key}

    def tensors(self, attached: list[str]) -> list[Tensor]:
        return [*self.seeds.values(), *(self.weights[name] for name in attached)]


def weight_hash(weight: Tensor) -> str:
    """The name of weights: a digest of what they are."""
    digest = hashlib.sha256(f"{DTYPE_NAMES[weight.dtype]} {tuple(weight.shape)} ".encode())
    digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
