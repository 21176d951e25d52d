"""What do links cost that are ranked, and that do not leak?

Loading with the links of a step left out, beside the same loading with them; ranks of links among candidates, beside a
sort of all their scores; the ten best of a million destinations, beside the matrix products alone.
The ratio is the baseline's time over ours: 0.87 is 1.15 times as long.
"""

import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice

import report
import torch
from measure import Side, take_turns
from report import Report, Row, Target
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn.pool import MIPSKNNIndex

import hoploom
from hoploom.ranking.rank_metrics import RankMetrics
from hoploom.sample.exclusions import Exclude

RATES, RATED = ("user", "rates", "item"), ("item", "rev_rates", "user")
BATCHES, WARM = 100, 10


def shop(users: int, items: int, edges: int) -> HeteroData:
    """Items are as popular as a cube of uniform numbers makes them."""
    generator, data = torch.Generator().manual_seed(0), HeteroData()
    data["user"].x, data["item"].x = torch.randn(users, 64), torch.randn(items, 64)
    ends = [
        torch.randint(users, (edges,), generator=generator),
        (torch.rand(edges, generator=generator) ** 3 * items).long(),
    ]
    data[RATES].edge_index, data[RATED].edge_index = torch.stack(ends), torch.stack(ends[::-1])
    return data


def loading(store: hoploom.Store, exclude: Exclude, num_batches: int) -> Side:
    loader = hoploom.LinkNeighborLoader(
        store, [10, 10], RATES, neg_sampling="binary", batch_size=512, shuffle=True, num_workers=2, exclude=exclude
    )

    def side(number: int) -> float:
        """Seconds per batch, after the first ones."""
        loader.set_epoch(number)
        batches = iter(loader)
        for _ in islice(batches, WARM):
            pass
        began = time.perf_counter()
        for _ in islice(batches, num_batches):
            pass
        seconds = (time.perf_counter() - began) / num_batches
        batches.close()  # type: ignore[attr-defined]
        return seconds

    return side


def timed(work: Callable[[], object]) -> Side:
    def side(number: int) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return side


def rank(scores: Tensor) -> None:
    metrics = RankMetrics(["mrr", "hits@10"])
    metrics.update(scores)
    metrics.compute()


def products(sources: Tensor, destinations: Tensor) -> None:
    """The scores alone, in blocks as large as those of `best`."""
    out = torch.empty(sources.shape[0], 16384)
    for block in torch.split(destinations, 16384):
        torch.mm(sources, block.t(), out=out[:, : block.shape[0]].view(sources.shape[0], block.shape[0]))


def row(question: str, unit: str, sides: dict[str, Side], baseline: str, most: float, repetitions: int = 5) -> Row:
    """Ours is the first side; it may take `most` times as long as the other."""
    ours, theirs = take_turns(sides, repetitions=repetitions, warmups=1).values()
    factor = 1e3 if unit == "ms" else 1.0
    ratio = theirs.median / ours.median
    return Row(
        question, unit, ours.scaled(factor), baseline, theirs.scaled(factor), ratio, Target("ratio", ">=", 1 / most)
    )


def of_loading(scale: int) -> Row:
    store = hoploom.from_pyg(shop(1_000_000 // scale, 500_000 // scale, 16_000_000 // scale))
    sides = {exclude: loading(store, exclude, max(5, BATCHES // scale)) for exclude in ("both", "none")}
    question = "a batch of 512 links and negatives, [10, 10], its links left out"
    return row(question, "ms", sides, "Hoploom, the links left in", 1.15, repetitions=7)


def of_metrics(scale: int) -> Row:
    scores = torch.randn(1_000_000 // scale, 101)
    sides = {"ranks": timed(lambda: rank(scores)), "sort": timed(lambda: torch.sort(scores, dim=1))}
    return row("MRR and hits of 1 M links, 100 candidates each", "s", sides, "torch.sort of the scores", 2.0)


def of_best(scale: int) -> list[Row]:
    items, generator = 1_000_000 // scale, torch.Generator().manual_seed(1)
    users, rows = torch.randn(1000, 128, generator=generator), torch.randn(items, 128, generator=generator)
    data = shop(1000, items, 20_000)
    store = hoploom.from_pyg(data)
    ours = timed(lambda: hoploom.best({"user": users, "item": rows}, store, "user", of="item", k=10))
    question, alone = (
        "10 best of 1 M items for 1000 users, 128 wide",
        {"products": timed(lambda: products(users, rows))},
    )
    found = [row(question, "s", {"best": ours} | alone, "the matrix products alone", 1.3)]
    if find_spec("faiss") is not None:
        index, known = MIPSKNNIndex(rows), data[RATES].edge_index
        theirs = {"index": timed(lambda: index.search(users, 10, exclude_links=known))}
        found.append(row(question, "s", {"best": ours} | theirs, "PyG's MIPSKNNIndex", 1.0))
    return found


def measure(tiny: bool) -> Report:
    scale = 1000 if tiny else 1
    rows = [of_loading(scale), of_metrics(scale), *of_best(scale)]
    absent = [] if find_spec("faiss") else ["faiss"]
    return Report(rows, [f"Hoploom {hoploom.__version__}, torch {torch.__version__}"], absent)


if __name__ == "__main__":
    report.main(measure)
