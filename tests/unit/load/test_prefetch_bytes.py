"""prefetch_bytes=: what is under way stays within so many bytes, whoever makes the batches."""

from typing import Any

import pytest
import torch
from support.graphs import ring

import hoploom
from hoploom import ConfigError, NeighborLoader


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
