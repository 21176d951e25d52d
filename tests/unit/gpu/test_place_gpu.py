"""Placements on a real GPU: memory is measured, host memory pinned and read by kernels."""

import gc

import pytest
import torch
from support import place_workers
from support.graphs import random_graph

import hoploom
from hoploom import ConfigError
from hoploom.gpu import host_memory as hostmemory
from hoploom.gpu import place_plan
from hoploom.gpu.host_memory import HostMemory
from hoploom.ops import Picks, Rule

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_sync")]


def test_auto_goes_by_what_is_free() -> None:
    """Of a device with room for everything, everything is taken; with little left, the host keeps it."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert 0 < place_plan.free_memory(device) <= torch.cuda.mem_get_info(device)[1]
    store = hoploom.from_tensors({"x": torch.randn(10_000, 64)}, torch.randint(10_000, (2, 50_000)))
    with hoploom.place(store, "auto", "auto") as placed:
        assert {placement.where for placement in place_workers.placed_of(placed).report} == {str(device)}
        place_workers.assert_all_rows(placed)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device=device)  # 1 GiB is left, 2 stay free
    try:
        with hoploom.place(store, "auto", "auto") as placed:
            assert {placement.where for placement in place_workers.placed_of(placed).report} == {"host"}
            place_workers.assert_all_rows(placed)
    finally:
        del taken
        torch.cuda.empty_cache()


def test_kernels_sample_from_pinned_host_memory() -> None:
    from hoploom.ops.kernels.launch import DeviceFrontier, DevicePicks, DeviceSpan
    from hoploom.ops.kernels.sample import sample

    store = hoploom.from_pyg(random_graph(100, 900, 1))
    with hoploom.place(store, "host", "host") as placed:
        (lists,) = place_workers.placed_of(placed).lists
        assert lists.indices.device.type == "cpu"
        assert lists.indices.is_pinned()
        device = place_workers.placed_of(placed).device
        nodes = torch.arange(100, device=device)
        nought, end, key = (torch.tensor(value, device=device) for value in (0, 100, 5))
        room = DevicePicks(
            *(torch.empty(900, dtype=torch.int64, device=device) for _ in range(3)),
            DeviceSpan(nought, nought.clone(), 900),
        )
        faults = torch.zeros(1, dtype=torch.int64, device=device)
        sample(lists, DeviceFrontier(nodes, DeviceSpan(nought, end, 100)), Rule(key, 0, -1), room, faults)
        picks = _all_of(store)
        assert (room.span.end.item(), faults.item()) == (900, 0)
        assert torch.equal(room.sources.cpu(), picks.sources)
        place_workers.assert_all_rows(placed)


def _all_of(store: hoploom.Store) -> Picks:
    from hoploom.ops import Frontier
    from hoploom.store import Draw

    (picks,) = store.graph.sample([Frontier(torch.arange(100))], Draw(5, 0, [-1]))
    assert picks is not None
    return picks


@pytest.mark.parametrize("is_closed", [True, False])
def test_memory_is_unpinned_when_the_store_is_closed_or_dropped(is_closed: bool) -> None:
    store = hoploom.from_pyg(random_graph(100, 900, 1))
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(3):  # the same pages cannot be registered twice; later maps at their address can
        placed = hoploom.place(store, "host", "host")
        place_workers.assert_all_rows(placed)
        if is_closed:
            (lists,) = place_workers.placed_of(placed).lists
            placed.close()
            assert not lists.indices.is_pinned()
        del placed
        gc.collect()
    assert int(torch.ones(10, device=device).sum()) == 10


def test_a_refusal_to_pin_does_not_fail_the_next_kernel() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with place_workers.own_folder() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(hostmemory, "FOLDER", folder)
        with HostMemory("a", 1 << 20, lambda raw: raw.fill_(7)) as memory:
            memory.register(device)
            with pytest.raises(ConfigError, match=r"cannot be pinned for cuda:\d \(CUDA error 712\)"):
                memory.register(device)
            assert int(torch.ones(10, device=device).sum()) == 10
            assert memory.bytes.is_pinned()
