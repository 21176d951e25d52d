"""prefetch_bytes=: what is under way stays within so many bytes, whoever makes the batches."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.batch_servers import without_graph
from support.batches import assert_same_batches
from support.graphs import ring
from support.shards import spread

import hoploom
from hoploom import ConfigError, NeighborLoader, Store
from hoploom.load.assemble import num_bytes
from hoploom.load.pipeline import ByteLimit

WHERE: dict[str, Callable[[Store], Any]] = {
    "threads": lambda store: store,
    "remote rows, look-ahead": lambda store: spread(store, 3, here=[0]),
    "served": lambda store: without_graph(store)[0],
}


@pytest.mark.parametrize("where", WHERE)
def test_batches_under_way_stay_within_the_bytes(where: str) -> None:
    store = hoploom.from_pyg(ring(64))  # where every batch is as large as any other
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "disjoint": True, "num_workers": 4}
    ahead = {"look_ahead": 2} if "look" in where else {}
    plain = list(NeighborLoader(store, [2, 2], **options))
    (size,) = set(map(num_bytes, plain))
    most = 3 * size
    judged: list[tuple[int, bool]] = []  # bytes that would be under way, and whether they may
    fits = ByteLimit.fits

    def watched(limit: ByteLimit, made: Any, num_under_way: int, num_more: int) -> bool:
        allowed = fits(limit, made, num_under_way, num_more)
        judged.append((sum(made) + (num_under_way - len(made)) * limit.largest, allowed))
        return allowed

    with patch.object(ByteLimit, "fits", watched):
        loader = NeighborLoader(WHERE[where](store), [2, 2], prefetch_bytes=most, **options, **ahead)
        assert_same_batches(plain, loader)
    assert any(not allowed for _, allowed in judged)
    assert max(taken for taken, _ in judged) <= most


@pytest.mark.parametrize(("given", "message"), [(0, "prefetch_bytes is 0"), ("lots", "prefetch_bytes is 'lots'")])
def test_a_size_that_is_none_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NeighborLoader(ring(12), [3], torch.arange(9), prefetch_bytes=given)


def test_batches_of_the_device_have_another_bound(device: torch.device) -> None:
    with (
        hoploom.place(hoploom.from_pyg(ring(12)), topology=str(device), features=str(device)) as placed,
        pytest.raises(ConfigError, match="prefetch_bytes is set, but batches are made on the device"),
    ):
        list(NeighborLoader(placed, [2], torch.arange(4), prefetch_bytes="1GB"))
