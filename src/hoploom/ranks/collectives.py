"""Gather values as JSON over all ranks, and leave a block together: all ranks succeed, or all fail."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from hoploom.errors import PeerError


class Ranks(Protocol):
    """The part of a `Context` that gathers over all ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather(self, tensor: Tensor, /) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape and dtype."""
        ...


def gather_json(ranks: Ranks, value: Any) -> list[Any]:
    """Return the values of all ranks, anything that JSON can hold, in the order of ranks. All ranks call."""
    content = json.dumps(value).encode()
    size = max(int(size) for size in ranks.gather(torch.tensor(len(content))))
    padded = torch.tensor(list(content.ljust(size)), dtype=torch.uint8)
    return [json.loads(bytes(entry.tolist())) for entry in ranks.gather(padded)]


@contextmanager
def all_or_none(ranks: Ranks, doing: str, *, stops: bool = False) -> Iterator[None]:
    """A context manager that all ranks leave together: an error of one is an error of all.

    >>> with all_or_none(context, "writing the checkpoint"):
    ...     write(path)

    Ctrl-C and SystemExit do not wait for the other ranks, which then lose this one; unless the block `stops` everywhere
    as soon as one rank fails, so that no rank waits long.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        if not stops and not isinstance(error, Exception):
            raise
        failure = error
    texts: list[str | None] = []
    try:
        if ranks.world_size > 1:
            own = None if failure is None else str(failure) or type(failure).__name__
            with nullcontext() if failure is None else suppress(PeerError):  # an own error goes before lost ranks
                texts = gather_json(ranks, own)
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback leads here: together they would hold what is mapped until a collection
    rank = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if rank is not None:
        raise PeerError(f"rank {rank} failed {doing}: {texts[rank]}")
