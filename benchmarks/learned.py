"""What do learned rows cost, beside fixed features of the same width and beside torch's sparse embeddings?

A step is 1024 seeds with fanouts 10 and 5 and two layers of SAGE, 128 wide. Two ranks update rows by the rule of sparse
Adam, ours and torch's under DDP. Shallow: DistMult over 100 numbers a node, each link against 1,000 joint negatives, in
ours, in plain torch, and in PyG's loader and model of knowledge graphs, which draw one negative a link. Rows that
exceed memory: the same in a process that may hold a fourth of its rows and their state, which are in a folder.
The ratio is the other side's time over ours.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import report
import torch
import torch.nn.functional as F  # noqa: N812
from measure import Side, Spread, spread_of, take_turns
from memory_group import limited
from report import Report, Row, Target
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.kge import DistMult as KgeDistMult
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom.nn import DistMult, GraphSAGE
from hoploom.nn.embedding import Embedding
from hoploom.ranks.context import Context
from hoploom.ranks.spawn import spawn
from hoploom.train.link_prediction import LinkPrediction

DIM, SEEDS, CLASSES = 128, 1024, 16
WARM, STEPS, REPETITIONS = 5, 20, 5
KINDS, SHALLOW_DIM, LINKS, NEGATIVES = 50, 100, 8192, 1000
SIDE, SPARE = "LEARNED_SIDE", 256 << 20  # the variable with the nodes of such a process; bytes beside what it has
MAPPED = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*hoploom-rows")


def random_graph(num_nodes: int) -> Data:
    draw = torch.Generator().manual_seed(0)
    data = Data(edge_index=torch.randint(num_nodes, (2, 10 * num_nodes), generator=draw), num_nodes=num_nodes)
    data.y = torch.randint(CLASSES, (num_nodes,), generator=draw)
    return data


def train_loader(store: hoploom.Store, batch_size: int = SEEDS) -> hoploom.NeighborLoader:
    seeds = torch.arange(store.num_nodes)[: 100 * SEEDS]
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "mode": "blocks", "num_workers": 2}
    return hoploom.NeighborLoader(store, [10, 5], input_nodes=seeds, **options)


def seconds_per_step(
    loader: Any, model: nn.Module, rows_of: Callable[[Any], None], update: Callable[[], None]
) -> float:
    """The median of some steps, the batch's loading included."""
    optimizer, times = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.003), []
    with closing(iter(loader)) as batches:
        for _ in range(WARM + STEPS):
            began = time.perf_counter()
            batch = next(batches)
            rows_of(batch)
            optimizer.zero_grad()
            F.cross_entropy(model(batch)[: batch.batch_size], batch.y[: batch.batch_size]).backward()
            optimizer.step()
            update()
            times.append(time.perf_counter() - began)
    return spread_of(times[WARM:]).median


def nothing(*_: object) -> None:
    pass


def beside_features(tiny: bool) -> Row:
    """The two stores have the same graph; features have the values that learned rows begin with."""
    data = random_graph(50_000 if tiny else 5_000_000)
    learned = Embedding(hoploom.from_pyg(data), dim=DIM)
    data.x = learned.rows.clone()
    fixed = hoploom.from_pyg(data)
    model = GraphSAGE(DIM, DIM, 2, CLASSES)
    sides: dict[str, Side] = {
        "learned": lambda _: seconds_per_step(train_loader(learned.store), model, nothing, learned.step),
        "fixed": lambda _: seconds_per_step(train_loader(fixed), model, nothing, nothing),
    }
    found = take_turns(sides, repetitions=1 if tiny else REPETITIONS, warmups=1)
    ours, fixed_rows = found["learned"].scaled(1e3), found["fixed"].scaled(1e3)
    question = "a step with learned rows, 5 M nodes, rowwise Adagrad"
    ratio = fixed_rows.median / ours.median
    return Row(question, "ms/step", ours, "fixed features", fixed_rows, ratio, Target("ratio", ">=", 0.67))


# --- two ranks --------------------------------------------------------------------------------


def our_rank(context: Context, folder: str, num_nodes: int) -> None:
    learned = Embedding(hoploom.from_pyg(random_graph(num_nodes)), dim=DIM, optimizer="lazy_adam", context=context)
    loader = train_loader(learned.store, SEEDS // context.world_size)
    seconds = seconds_per_step(loader, context.wrap(GraphSAGE(DIM, DIM, 2, CLASSES)), nothing, learned.step)
    share = (learned.rows.nbytes + learned.state.nbytes) / context.world_size
    torch.save((seconds, resident_rows() / share), f"{folder}/ours-{context.rank}")


class WithRows(nn.Module):
    """A model with torch's embedding, as DDP users write it."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.rows, self.model = nn.Embedding(num_nodes, DIM, sparse=True), GraphSAGE(DIM, DIM, 2, CLASSES)

    def forward(self, batch: Data) -> Tensor:
        batch.x = self.rows(batch.n_id)
        return self.model(batch)  # type: ignore[no-any-return]


def torch_rank(context: Context, folder: str, num_nodes: int) -> None:
    model = WithRows(num_nodes)
    sparse = torch.optim.SparseAdam([model.rows.weight], 0.05)
    wrapped = nn.parallel.DistributedDataParallel(model)
    loader = train_loader(hoploom.from_pyg(random_graph(num_nodes)), SEEDS // context.world_size)

    def update() -> None:
        sparse.step()
        sparse.zero_grad()

    dense = nn.ModuleList([model.model])
    dense.forward = wrapped.forward  # the optimizer of the weights has no sparse gradients
    torch.save((seconds_per_step(loader, dense, nothing, update), 0.0), f"{folder}/torch-{context.rank}")


def resident_rows() -> int:
    """Bytes of the learned rows that this process answers for: pages that two processes map count half for each."""
    found, is_of_rows = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        is_of_rows = bool(MAPPED.match(line)) if re.match(r"^[0-9a-f]+-", line) else is_of_rows
        if is_of_rows and line.startswith("Pss:"):
            found += int(line.split()[1]) * 1024
    return found


def beside_torch(tiny: bool) -> list[Row]:
    num_nodes, shares = 50_000 if tiny else 2_000_000, []

    def side(name: str, worker: Callable[..., None]) -> Side:
        def measured(_: int) -> float:
            with tempfile.TemporaryDirectory() as folder:
                spawn(worker, 2, [folder, num_nodes], device="cpu")
                seconds, share = torch.load(f"{folder}/{name}-0")
                shares.append(share)
                return float(seconds)

        return measured

    sides = {"ours": side("ours", our_rank), "torch": side("torch", torch_rank)}
    found = take_turns(sides, repetitions=1 if tiny else 3, warmups=0)
    ours, theirs = found["ours"].scaled(1e3), found["torch"].scaled(1e3)
    question, ratio = "a step of two ranks, 2 M nodes, Adam", theirs.median / ours.median
    beside = "nn.Embedding(sparse=True), SparseAdam, DDP"
    memory = spread_of(share for share in shares if share)
    return [
        Row(question, "ms/step", ours, beside, theirs, ratio, Target("ratio", ">=", 5)),
        Row("memory of a rank, of its share of rows and state", "x", memory, "", None, None, Target("ours", "<", 1.1)),
    ]


# --- shallow ----------------------------------------------------------------------------------


class Shallow(nn.Module):
    """A decoder over learned rows, without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = DistMult(SHALLOW_DIM, KINDS)

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        return batch.x_dict  # type: ignore[no-any-return]


def random_links(num_nodes: int) -> tuple[Tensor, Tensor, int]:
    draw, num_links = torch.Generator().manual_seed(0), 10 * num_nodes
    return torch.randint(num_nodes, (2, num_links), generator=draw), torch.randint(KINDS, (num_links,)), num_nodes


def our_links(links: Tensor, kinds: Tensor, num_nodes: int, folder: str | None = None) -> Side:
    data = HeteroData()
    data["entity"].num_nodes = num_nodes
    data["entity", "to", "entity"].edge_index = links
    learned = Embedding(hoploom.from_pyg(data), "entity", dim=SHALLOW_DIM, optimizer="adagrad", folder=folder)
    negatives = NegativeSampling("triplet", amount=NEGATIVES)
    given: dict[str, Any] = {"neg_sampling": negatives, "candidates": "joint", "exclude": "none", "edge_label": kinds}
    loader = hoploom.LinkNeighborLoader(
        learned.store, [], ("entity", "to", "entity"), batch_size=LINKS, shuffle=True, num_workers=2, **given
    )
    model, task = Shallow(), LinkPrediction(loss="softmax", num_relations=KINDS)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        task.batch_losses(model, batch).mean().backward()
        optimizer.step()
        learned.step()

    return lambda _: links_per_second(iter(loader), step)


def torch_links(links: Tensor, kinds: Tensor, num_nodes: int, *, sparse: bool) -> Side:
    rows, of_kinds = nn.Embedding(num_nodes, SHALLOW_DIM, sparse=sparse), nn.Embedding(KINDS, SHALLOW_DIM)
    optimizer = torch.optim.Adagrad([*rows.parameters(), *of_kinds.parameters()], 0.05)

    def step(some: Tensor) -> None:
        (sources, true), kind = links[:, some], kinds[some]
        drawn = torch.randint(num_nodes, (NEGATIVES,))
        query = rows(sources) * of_kinds(kind)
        scores = torch.cat([(query * rows(true)).sum(1, keepdim=True), query @ rows(drawn).t()], dim=1)
        optimizer.zero_grad()
        F.cross_entropy(scores, torch.zeros(len(some), dtype=torch.int64)).backward()
        optimizer.step()

    return lambda _: links_per_second(iter(torch.randperm(links.shape[1]).split(LINKS)), step)


def pyg_links(links: Tensor, kinds: Tensor, num_nodes: int) -> Side:
    model = KgeDistMult(num_nodes, KINDS, SHALLOW_DIM, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.05)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()

    loader = model.loader(links[0], kinds, links[1], batch_size=LINKS, shuffle=True)
    return lambda _: links_per_second(iter(loader), step)


def links_per_second(batches: Any, step: Callable[[Any], None]) -> float:
    for batch in itertools.islice(batches, 2):
        step(batch)
    began, count = time.perf_counter(), 8
    for batch in itertools.islice(batches, count):
        step(batch)
    return count * LINKS / (time.perf_counter() - began)


def shallow(tiny: bool) -> list[Row]:
    given = random_links(20_000 if tiny else 2_000_000)
    sides = {
        "ours": our_links(*given),
        "plain torch, sparse": torch_links(*given, sparse=True),
        "plain torch, dense": torch_links(*given, sparse=False),
        "PyG's loader and model, one negative": pyg_links(*given),
    }
    found: dict[str, Spread] = take_turns(sides, repetitions=1 if tiny else 3, warmups=1)
    ours, question = found.pop("ours"), "shallow DistMult, 2 M nodes, 20 M links"
    return [
        Row(question, "links/s", ours, name, theirs, ours.median / theirs.median, Target("ratio", ">=", 5))
        for name, theirs in found.items()
    ]


def larger_than_memory(tiny: bool) -> Row:
    num_nodes = 20_000 if tiny else 2_000_000

    def side(*, limited_to_a_fourth: bool) -> Side:
        def measured(_: int) -> float:
            with limited(None) as group, tempfile.TemporaryDirectory() as folder:
                words = [sys.executable, __file__, *([folder, *map(str, group.folders)] * limited_to_a_fourth)]
                done = subprocess.run(
                    group.command(words), env=os.environ | {SIDE: str(num_nodes)}, stdout=subprocess.PIPE, check=True
                )
            return float(done.stdout)

        return measured

    sides = {"ours": side(limited_to_a_fourth=True), "memory": side(limited_to_a_fourth=False)}
    found = take_turns(sides, repetitions=1 if tiny else 3, warmups=0)
    ours, memory = found["ours"], found["memory"]
    question, ratio = "shallow DistMult, rows four times the memory", ours.median / memory.median
    return Row(question, "links/s", ours, "in memory", memory, ratio, Target("ratio", ">=", 1 / 3))


def links_in_this_process(num_nodes: int, folder: str | None = None, group: str | None = None) -> None:
    """Print the links per second; within this group, of which only a fourth of the rows may be in memory."""
    measured = our_links(*random_links(num_nodes), folder)
    if group is not None:
        measured(0)  # all memory but the rows is taken now
        os.sync()
        anonymous = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
        assert anonymous is not None
        limit = int(anonymous[1]) * 1024 + num_nodes * SHALLOW_DIM * 8 // 4 + SPARE
        names = [Path(group) / name for name in ("memory.limit_in_bytes", "memory.max")]
        next(name for name in names if name.exists()).write_text(str(limit))
    measured(0)
    print(measured(0))


def measure(tiny: bool) -> Report:
    return Report([beside_features(tiny), *beside_torch(tiny), *shallow(tiny), larger_than_memory(tiny)], [], [])


if __name__ == "__main__":
    if SIDE in os.environ:
        links_in_this_process(int(os.environ[SIDE]), *sys.argv[1:])
    else:
        report.main(measure)
