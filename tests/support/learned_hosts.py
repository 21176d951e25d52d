"""Ranks that believe to be on several hosts: python -m support.learned_hosts WORKER ARGUMENTS, as torchrun starts them.

Learned rows that one host's ranks share are then those of its own ranks alone.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import hoploom
from hoploom import ConfigError
from hoploom.nn import GNN, Shape
from hoploom.nn.embedding import Embedding
from hoploom.ranks.context import Context, unwrap
from hoploom.train.loop import evaluate, fit
from hoploom.train.step import Training
from support import learned_workers
from support.learned_workers import USERS, alone, embedding_of, learner_of, rows_of_all, shop
from support.ports import free_ports
from support.rank_processes import run_ranks

TIMEOUT = 60.0


def on_hosts(num_ranks: Sequence[int], worker: str, *arguments: Any) -> list[tuple[int, str]]:
    """Return exit code and stderr of each rank; there are num_ranks[h] of them on host h."""
    world, (port,) = sum(num_ranks), free_ports(1)
    common = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    places = [(host, local, count) for host, count in enumerate(num_ranks) for local in range(count)]
    variables = [
        common | {"RANK": rank, "GROUP_RANK": host, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count}
        for rank, (host, local, count) in enumerate(places)
    ]
    words = ["-m", "support.learned_hosts", worker, json.dumps(arguments)]
    return run_ranks(words, [{name: str(value) for name, value in each.items()} for each in variables])


def every_way(context: Context, folder: str) -> None:
    """Train, evaluate, export and infer; some steps of the validation are not on all ranks. Rank 0 saves results."""
    torch.set_num_threads(1)
    learner = learner_of(context)
    store, model = learner.loader.store, learner.model
    val = hoploom.NeighborLoader(store, [4, 3], input_nodes="item", batch_size=100)  # 3 steps
    few = hoploom.NeighborLoader(store, [4, 3], input_nodes=("item", torch.arange(9)), batch_size=100)
    scores = list[dict[str, float]]()

    def validate() -> dict[str, float]:
        scores.extend(evaluate(model, loader, learner.task, context) for loader in (val, few))
        return scores[-2]

    outcome = fit(learner, Training(2, progress=False), context, validate=validate)
    embedding_of(learner).export(f"{folder}/rows-{context.world_size}.parquet")
    out = hoploom.infer(unwrap(model), store, f"{folder}/out-{context.world_size}", context)
    rows = rows_of_all(embedding_of(learner), context)
    if context.is_main:
        named = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.parquet"))}
        torch.save((outcome.history, scores, rows, named), f"{folder}/found.pt")


def wide(context: Context) -> None:
    """Look up rows of 20 kB on two ranks: in all of them, in none on one rank, and in an order of its own."""
    learned, first = (Embedding(shop(), "user", dim=5000, context=each) for each in (context, alone()))
    for ids in (torch.arange(USERS), torch.arange(0), torch.tensor([[USERS - 1, 0]])):
        rows = learned(ids if context.is_main else torch.tensor([200, 201, 202]))
        assert torch.equal(rows, first(ids) if context.is_main else first.rows[200:203])
    assert 0.9 < touched() / (first.rows.nbytes / 2) < 1.1
    with pytest.raises(ConfigError, match=r"'user' are on several hosts; call the Embedding itself .* or export"):
        print(learned.store["user"].x[:3])


def one_rank_infers(context: Context) -> None:
    """Ask one rank of two hosts for the best of a user, and for the outputs of all."""
    store = Embedding(shop(), "user", dim=4, context=context).store
    model = GNN("rsage", store.schema, Shape(8, 1, 4), out_types=["user", "item"])
    said = r"learned rows of 'user' are on several hosts; call infer on all ranks, and write_best; or export the rows"
    with pytest.raises(ConfigError, match=said):
        print(hoploom.best(model, store, ("user", torch.tensor([1, USERS - 1])), of="item", k=3))
    with TemporaryDirectory() as folder, pytest.raises(ConfigError, match=said):
        hoploom.infer(model, store, f"{folder}/out", alone())


def touched() -> int:
    """Bytes of learned rows that this process has touched."""
    found, is_of_rows = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        is_of_rows = "hoploom-rows" in line if re.match(r"^[0-9a-f]+-", line) else is_of_rows
        found += int(line.split()[1]) * 1024 if is_of_rows and line.startswith("Rss:") else 0
    return found


if __name__ == "__main__":
    with hoploom.init(device="cpu", timeout=TIMEOUT) as context:
        worker = globals().get(sys.argv[1]) or getattr(learned_workers, sys.argv[1])
        worker(context, *json.loads(sys.argv[2]))
