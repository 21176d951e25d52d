"""A graph whose users have no features, and training steps with learned rows, alone or by several ranks."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

import hoploom
from hoploom import ConfigError, PeerError, TrainError, ops
from hoploom.nn import GNN, Shape
from hoploom.nn.embedding import Embedding
from hoploom.ranks.context import DEADLINE, Context
from hoploom.ranks.differentiable import rows_of_all_ranks
from hoploom.ranks.environment import RankInfo
from hoploom.train.checkpoint import Checkpoint, learned_parts
from hoploom.train.loop import fit
from hoploom.train.step import Learner, Training
from hoploom.train.tasks import NodeClassification
from support.graphs import in_parts

USERS, ITEMS = 403, 250
SEEDS = 60  # of a step, over all ranks
STEPS = 7  # of five a pass


@cache
def shop(num_parts: int = 1) -> hoploom.Store:
    """Users without features buy items with features, which have labels."""
    draw = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["user"].num_nodes = USERS
    data["item"].x = torch.randn(ITEMS, 4, generator=draw)
    data["item"].y = torch.randint(0, 3, (ITEMS,), generator=draw)
    bought = torch.stack([torch.randint(0, count, (3000,), generator=draw) for count in (USERS, ITEMS)])
    data["user", "buys", "item"].edge_index = bought
    data["item", "rev_buys", "user"].edge_index = bought.flip(0)
    store = hoploom.from_pyg(data)
    return store if num_parts == 1 else in_parts(store, num_parts)


def alone() -> Context:
    return Context(RankInfo(), torch.device("cpu"), "gloo", DEADLINE)


def items(
    embedding: Embedding, context: Context, fanouts: Sequence[int] = (4, 3), **options: Any
) -> hoploom.NeighborLoader:
    """Return a loader of all items, whose steps have the same seeds for any number of ranks."""
    given = {"batch_size": SEEDS // context.world_size, "shuffle": True, "mode": "blocks", "num_workers": 1} | options
    return hoploom.NeighborLoader(embedding.store, list(fanouts), input_nodes="item", **given)


def trained(
    context: Context,
    *,
    num_parts: int = 1,
    num_workers: int = 1,
    threads: int = 1,
    late: bool = False,
    placed: bool = False,
    **options: Any,
) -> Embedding:
    """Take some steps of two epochs, with `threads` threads for updates. `late`: the last rank updates late.

    `placed`: the features are in the memory that Triton's interpreter takes for a device's.
    """
    store = hoploom.place(shop(num_parts), features="cpu") if placed else shop(num_parts)
    embedding = Embedding(store, "user", context=context, **({"dim": 8, "lr": 0.1} | options))
    assert embedding._is_on_device == (placed and context.world_size == 1)
    torch.manual_seed(1)
    model = context.wrap(GNN("rsage", embedding.store.schema, Shape(8, 2, 3), out_types=["item"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, taken = items(embedding, context, num_workers=num_workers, prefetch_factor=4 if num_workers else None), 0
    while taken < STEPS:
        for step, batch in enumerate(loader):
            losses = torch.nn.functional.cross_entropy(
                model(batch)["item"], batch["item"].y[: batch["item"].batch_size], reduction="none"
            )
            optimizer.zero_grad()
            context.mean_loss(losses, loader.num_seeds(step)).backward()
            optimizer.step()
            with updating(threads, late=late and context.rank == context.world_size - 1):
                embedding.step()
            taken += 1
            if taken == STEPS:
                break
    return embedding


@contextmanager
def updating(threads: int, *, late: bool) -> Iterator[None]:
    """Update rows with so many threads; or late, so that other ranks would read them before, if they could."""
    update, before = ops.update_rows, torch.get_num_threads()

    def slowly(*given: Any) -> int:
        for _ in range(30):
            torch.randn(500, 500).matrix_power(3)
        return update(*given)

    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(ops, "update_rows", slowly)
        torch.set_num_threads(threads)  # not for the model: torch's own sums depend on it
        yield
        torch.set_num_threads(before)


def save_rows(context: Context, folder: str, cases: list[dict[str, Any]]) -> None:
    """Write the rows that each case ends with, and their state."""
    for number, case in enumerate(cases):
        embedding = trained(context, **case)
        found = rows_of_all(embedding, context)
        if context.is_main:
            torch.save(found, f"{folder}/{number}-of-{context.world_size}.pt")


def rows_of_all(embedding: Embedding, context: Context) -> tuple[Tensor, ...]:
    """Return the rows of all ranks, and their state, on rank 0."""
    return tuple(rows_of_all_ranks(own, context) for own in embedding.own_rows().values())


def killed(context: Context) -> None:
    """Train; the last rank is killed in its third step."""
    taken, step = count(1), Embedding.step

    def fatal(embedding: Embedding, scale: float = 1.0) -> None:
        if next(taken) == 3 and context.rank == context.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(embedding, scale)

    Embedding.step = fatal  # type: ignore[method-assign]
    trained(context)


def few_gradients(context: Context) -> None:
    """Rows of an odd width, in steps in which a rank gets no gradient, or one."""
    learned = Embedding(shop(), "user", dim=5, optimizer="sgd", lr=1.0, context=context)
    expected = learned(torch.arange(USERS)).detach()
    for ids in ([], [0], [USERS - 1]):
        learned(torch.tensor(ids, dtype=torch.int64)).sum().backward()
        learned.step()
        expected[ids] -= 1
    assert torch.equal(learned(torch.arange(USERS)), expected)


def a_gradient_that_is_not_finite(context: Context) -> None:
    """One rank's, of a row that the other one owns: both raise, and neither is lost."""
    learned = Embedding(shop(), "user", dim=8, context=context)
    (learned(torch.tensor([0])) * (float("nan") if context.rank else 1)).sum().backward()
    with pytest.raises(TrainError, match="row 0 of 'user' or its state would not be finite after step 1"):
        learned.step()
    learned(torch.tensor([0])).sum().backward()
    learned.step()
    assert learned.rows.isfinite().all()


def differing_settings(context: Context) -> None:
    with pytest.raises(ConfigError, match=r"'dim': \d.*another with .*'dim': \d.*give all the same"):
        Embedding(shop(), "user", dim=4 + context.rank, context=context)


def differing_paths(context: Context) -> None:
    """A file to start from that one rank was not given, and a folder."""
    for name in ("warm_start", "folder"):
        given: dict[str, Any] = {name: "/no/such/place" if context.is_main else None}
        with pytest.raises(ConfigError, match=rf"'{name}': .*another with .*'{name}': .*give all the same"):
            Embedding(shop(), "user", dim=4, context=context, **given)


def too_little_memory_on_a_rank(context: Context, folder: str) -> None:
    """Both ranks know at once what only one of them lacks."""
    store = hoploom.open(f"{folder}/shop.store", memory="1GB" if context.rank else "100KB")
    said = "take 208 kB, more than the store's memory of 100 kB"
    with pytest.raises(ConfigError if context.is_main else PeerError, match=said) as raised:
        Embedding(store, "user", dim=128, context=context)
    assert context.is_main or "rank 0 failed making learned rows" in str(raised.value)


def differs(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm() / left.double().norm())


def learner_of(context: Context, *, batch: int = SEEDS, fanouts: Sequence[int] = (4, 3), **options: Any) -> Learner:
    """A learner of the items' labels, whose users have learned rows."""
    embedding = Embedding(shop(), "user", context=context, **({"dim": 8, "lr": 0.1} | options))
    torch.manual_seed(1)
    model = context.wrap(GNN("rsage", embedding.store.schema, Shape(8, 2, 3), out_types=["item"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = items(embedding, context, fanouts, batch_size=batch // context.world_size)
    return Learner(model, optimizer, NodeClassification(3), loader)


def embedding_of(learner: Learner) -> Embedding:
    (embedding,) = learner.loader.store.learned
    assert isinstance(embedding, Embedding)
    return embedding


def fitted(context: Context, folder: str, kill: tuple[str, int] | None = None, epochs: int = 2) -> None:
    """Go on from the checkpoint in a folder, if there is one, and save where training ends.

    `kill`: the last rank is killed in this "step" of its own; or rank 0, before this file of this kind (".rows",
    ".safetensors") gets its name.
    """
    torch.set_num_threads(1)
    learner, checkpoint = learner_of(context), Checkpoint(folder, context)
    checkpoint.restore("last", learner.parts())
    if kill is not None:
        _set_trap(context, learner, *kill)
    training = Training(epochs, progress=False, checkpoint_every=2, checkpoint_minutes=0)
    fit(learner, training, context, checkpoint=checkpoint)
    rows = rows_of_all(embedding_of(learner), context)
    if context.is_main:
        weights = [parameter.detach() for parameter in learner.model.parameters()]
        torch.save((*rows, *weights), f"{folder}/found.pt")


def _set_trap(context: Context, learner: Learner, where: str, number: int) -> None:
    numbers, replace = count(1), os.replace

    def at_a_step(*_: Any) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def at_a_file(old: Path, new: Path) -> None:
        if Path(new).suffix == where:
            at_a_step()
        replace(old, new)

    if where == "step" and context.rank == context.world_size - 1:
        learner.model.register_forward_pre_hook(at_a_step)
    if where != "step" and context.is_main:
        os.replace = at_a_file  # type: ignore[assignment]


def restored_within(context: Context, folder: str) -> None:
    """Save and restore rows of 205 MB; restoring takes at most half of that besides."""
    data = HeteroData()
    data["user"].num_nodes = 400_000
    data["user", "knows", "user"].edge_index = torch.tensor([[0], [1]])
    embedding = Embedding(hoploom.from_pyg(data), "user", dim=128, optimizer="sgd", context=context)
    checkpoint, peaks = Checkpoint(folder, context), list[int]()
    checkpoint.save("last", learned_parts(embedding.store))
    for work in (lambda: None, lambda: checkpoint.restore("last", learned_parts(embedding.store))):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        work()
        peaks.append(int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]))
    assert peaks[1] - peaks[0] < embedding.rows.nbytes / 2 / 1024
