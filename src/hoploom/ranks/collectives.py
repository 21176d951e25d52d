"""What ranks exchange besides tensors: values as JSON, and whether all of them got through a block."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hoploom.errors import PeerError


class Ranks(Protocol):
    """This rank among the others: a `Context`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather(self, tensor: Tensor, /) -> list[Tensor]:
        """Every rank's tensor, of one shape and dtype."""
        ...


def gather_json(ranks: Ranks, value: Any) -> list[Any]:
    """Every rank's value, anything that JSON can hold, in the order of ranks. All ranks call."""
    content = json.dumps(value).encode()
    size = max(int(size) for size in ranks.gather(torch.tensor(len(content))))
    padded = torch.tensor(list(content.ljust(size)), dtype=torch.uint8)
    return [json.loads(bytes(entry.tolist())) for entry in ranks.gather(padded)]


@contextmanager
def all_or_none(ranks: Ranks, doing: str, *, stops: bool = False) -> Iterator[None]:
    """A block that is left when all ranks have finished it, and where an error of one is an error of all.

    >>> with all_or_none(context, "writing the checkpoint"):
    ...     write(path)

    Ctrl-C and SystemExit do not wait for the other ranks, who learn of it as of a rank that is lost; unless the block
    `stops` everywhere as soon as one rank fails, so that nobody waits long.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        if not stops and not isinstance(error, Exception):
            raise
        failure = error
    try:
        failed = _failures(ranks, failure)
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback leads here: together they would hold what is mapped until a collection
    if failed:
        rank = min(failed)
        raise PeerError(f"rank {rank} failed {doing}: {failed[rank]}")


def _failures(ranks: Ranks, own: BaseException | None) -> dict[int, str]:
    """The errors of all ranks that have one. A rank with an error of its own goes on where others are lost."""
    if ranks.world_size == 1:
        return {}
    try:
        errors = gather_json(ranks, None if own is None else str(own) or type(own).__name__)
    except PeerError:
        if own is None:
            raise
        return {}
    return {rank: text for rank, text in enumerate(errors) if text is not None}
