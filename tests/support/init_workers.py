"""Two processes that meet in every way that `init` knows: OWN_RANK=RANK python init_workers.py PORT PORT PORT."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data

import hoploom
from hoploom import ConfigError
from hoploom.ranks.context import Context

CORES = len(os.sched_getaffinity(0))


def main(rank: int, *ports: int) -> None:
    again(rank, ports[0])
    half_a_set(rank, ports[1])
    adopted(rank, ports[2])


def check_two(context: Context, rank: int) -> None:
    assert (context.rank, context.world_size, context.local_rank) == (rank, 2, rank)
    assert context.sum(rank + 1) == 3
    assert torch.get_num_threads() == max(1, CORES // 2)


@contextmanager
def started(rank: int, port: int) -> Iterator[None]:
    """RANK without LOCAL_RANK: the ranks of a host are counted."""
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch:
        for name, text in names.items():
            patch.setenv(name, text)
        yield


def again(rank: int, port: int) -> None:
    """Contexts in turn at one port, which a model, a loader or a thread of the last one must not keep."""
    seeds = torch.arange(100)
    data = Data(x=torch.ones(100, 2), edge_index=torch.stack([seeds, (seeds + 1) % 100]))
    for _ in range(2):
        with started(rank, port), hoploom.init(timeout=30) as context:
            model = context.wrap(torch.nn.Linear(2, 1))
            for batch in hoploom.NeighborLoader(data, [1], batch_size=25):
                context.mean_loss(model(batch.x).flatten()[: batch.batch_size]).backward()
            del model


def half_a_set(rank: int, port: int) -> None:
    with started(rank, port), hoploom.init(device="cpu", timeout=30) as context:
        check_two(context, rank)
        assert "GLOO_SOCKET_IFNAME" in os.environ
        with pytest.raises(ConfigError, match=r"torch\.distributed is in use already, with .*backend='nccl'"):
            hoploom.init(backend="nccl")
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # a later context may be one of several hosts


def adopted(rank: int, port: int) -> None:
    """The user's own group: used, never closed, and not crossed by what a context does."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # as PyG's examples set it
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for _ in range(2):
        with hoploom.init(timeout=30) as context:
            check_two(context, rank)
            assert (context.rank_info.address, context.rank_info.port) == ("127.0.0.1", port)
            pending = dist.all_reduce(torch.tensor(float(rank)), async_op=True)
            context.barrier()
            pending.wait()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    assert total == 3
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["OWN_RANK"]), *map(int, sys.argv[1:]))
