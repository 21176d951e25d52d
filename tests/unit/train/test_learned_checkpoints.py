"""Checkpoints of learned rows: resumed to the last bit after a kill, by other numbers of ranks, and what goes wrong."""

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import in_parts
from support.learned_workers import USERS, alone, differs, embedding_of, fitted, learner_of, restored_within, shop
from torch import Tensor
from torch_geometric.data import HeteroData

from hoploom import Store, StoreError, from_pyg, partition
from hoploom import open as open_store
from hoploom.errors import ConfigError, TrainError
from hoploom.nn.embedding import Embedding
from hoploom.ranks.spawn import spawn
from hoploom.train import checkpoint as checkpoints
from hoploom.train.checkpoint import Checkpoint, learned_parts, read_state, write_state
from hoploom.train.loop import fit
from hoploom.train.step import Training

pytestmark = pytest.mark.usefixtures("no_sync")
QUIET: dict[str, Any] = {"progress": False, "checkpoint_minutes": 0}


def found_in(folder: Path) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.load(folder / "found.pt")
    return found


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def rows_files(folder: Path) -> list[str]:
    """The files of learned rows and their state, without the tags in their names; complete or not."""
    found = [path.name for kind in ("rows", "state") for path in folder.glob(f"*.{kind}*")]
    return sorted(re.sub(r"\.[0-9a-f]{8}-[0-9a-f]{8}-", ".", name) for name in found)


def files_of(name: str, world_size: int) -> list[str]:
    return [f"{name}.{rank}.{kind}" for rank in range(world_size) for kind in ("rows", "state")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Tensor, ...]]:
    """Return the results of so many ranks that never stop."""
    known: dict[int, tuple[Tensor, ...]] = {}

    def of(world_size: int) -> tuple[Tensor, ...]:
        if world_size not in known:
            folder = tmp_path_factory.mktemp("whole")
            spawn(fitted, world_size, [str(folder)], device="cpu", timeout=60)
            known[world_size] = found_in(folder)
        return known[world_size]

    return of


KILLS = [("step", 4), ("step", 8), (".rows", 1), (".rows", 2), (".safetensors", 2)]
WORLDS = [(1, 1), (2, 2), (2, 1), (2, 3)]


@pytest.mark.slow  # six processes import torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("saved", "resumed"), WORLDS)
@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0]} {kill[1]}")
def test_a_killed_run_resumes_to_the_rows_of_one_that_never_stopped(
    kill: tuple[str, int], saved: int, resumed: int, tmp_path: Path, whole: Any
) -> None:
    """Killed within an epoch of five steps; or between the files of a checkpoint, and the one before is still good."""
    if kill != KILLS[0] and resumed != saved:
        pytest.skip("where the run was killed makes no difference to the ranks that resume it")
    with pytest.raises(TrainError, match="was killed by SIGKILL"):
        spawn(fitted, saved, [str(tmp_path), kill], device="cpu", timeout=60)
    is_first = kill == (".rows", 1)
    assert (tmp_path / "last.safetensors").exists() != is_first
    spawn(fitted, resumed, [str(tmp_path)], device="cpu", timeout=60)
    assert rows_files(tmp_path) == files_of("last", resumed)  # none of the killed run's
    assert list(tmp_path.glob(".*")) == []
    ours, theirs = found_in(tmp_path), whole(saved)
    if resumed == saved:
        assert_same(ours, theirs)
    else:
        assert all(differs(mine, other) < 1e-6 for mine, other in zip(ours[:2], theirs[:2], strict=True))
        assert all(differs(mine, other) < 1e-4 for mine, other in zip(ours, theirs, strict=True))  # Adam: last bits


def test_a_stopped_run_resumes_to_the_rows_of_one_that_never_stopped(tmp_path: Path) -> None:
    """Also the count of steps, which rounds bfloat16."""
    learned = {"optimizer": "lazy_adam", "dtype": "bfloat16"}
    never_stopped, stopped, resumed = (learner_of(alone(), **learned) for _ in range(3))
    fit(never_stopped, Training(2, **QUIET), alone())
    fit(stopped, Training(2, max_steps=3, **QUIET), alone(), checkpoint=Checkpoint(tmp_path, alone()))
    Checkpoint(tmp_path, alone()).restore("last", resumed.parts())
    fit(resumed, Training(2, **QUIET), alone())
    ours, theirs = embedding_of(resumed), embedding_of(never_stopped)
    assert_same((ours.rows, ours.state), (theirs.rows, theirs.state))
    assert ours.num_steps == theirs.num_steps == 10


def test_no_checkpoint_has_rows_that_are_not_finite(tmp_path: Path) -> None:
    """The loss is finite in every step, and so are the weights; the rows' gradients are NaN from the third step on."""
    learner, checkpoint, steps = learner_of(alone()), Checkpoint(tmp_path, alone()), count(1)

    def poison(_: Any, given: Any) -> None:
        if next(steps) > 2:
            of_users = given[0]["user"]
            of_users.x = of_users.x + (0 * of_users.x.detach() + 0 * of_users.x).sqrt()  # its derivative is 0 * inf

    learner.model.register_forward_pre_hook(poison)
    said = r"row \d+ of .* its state would not be finite after step 3; .*; the last good .*of epoch 1, step 2"
    with pytest.raises(TrainError, match=said):
        fit(learner, Training(2, checkpoint_every=1, **QUIET), alone(), checkpoint=checkpoint)
    restored = learner_of(alone())
    checkpoint.restore("last", restored.parts())
    assert embedding_of(restored).num_steps == 2
    for rows in (embedding_of(restored).rows, embedding_of(learner).rows, *learner.model.parameters()):
        assert rows.isfinite().all()


def saved(folder: Path, **options: Any) -> Path:
    """Save the learned rows of the users, alone."""
    embedding = Embedding(shop(), "user", **({"dim": 8} | options))
    Checkpoint(folder, alone()).save("last", learned_parts(embedding.store))
    return folder / "last.safetensors"


def restore(folder: Path, **options: Any) -> Embedding:
    embedding = Embedding(options.pop("store", shop()), "user", **({"dim": 8} | options))
    Checkpoint(folder, alone()).restore("last", learned_parts(embedding.store))
    return embedding


def fewer_users() -> Any:
    data = HeteroData()
    data["user"].num_nodes = 7
    data["user", "knows", "user"].edge_index = torch.tensor([[0], [1]])
    return from_pyg(data)


WAY_OUT = "take the graph that it was saved with, or export() the rows there and give the file as warm_start"
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"dim": 16}, "dim was 8, and is 16 here; make the Embedding as it was"),
    ({"optimizer": "adagrad"}, "optimizer was rowwise_adagrad, and is adagrad here; make the Embedding as it was"),
    ({"dtype": "bfloat16"}, "dtype was float32, and is bfloat16 here; make the Embedding as it was"),
    ({"store": fewer_users}, f"num_nodes was {USERS}, and is 7 here; {WAY_OUT}"),
]


@pytest.mark.parametrize(("given", "said"), OTHERS, ids=[said for _, said in OTHERS])
def test_a_checkpoint_of_other_rows_names_both(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    path, options = saved(tmp_path), {name: of() if name == "store" else of for name, of in given.items()}
    with pytest.raises(ConfigError) as raised:
        restore(tmp_path, **options)
    assert str(raised.value) == f"{path} does not fit this run's rows of user: {said}"


def with_ids(ids: Any) -> Store:
    data = HeteroData()
    data["user"].num_nodes = len(ids)
    data["user"].original_id = torch.tensor(ids, dtype=torch.uint8 if isinstance(ids[0], list) else torch.int64)
    data["user", "knows", "user"].edge_index = torch.tensor([[0], [1]])
    return from_pyg(data)


ORDERS: list[tuple[Any, Any]] = [
    ([0, 1, 2], [0, 2, 1]),
    ([5, 7, -3], [5, 7, 9]),
    ([0, 1, 2], [2, 1, 0]),
    ([[97, 0], [98, 98], [99, 0]], [[98, 98], [97, 0], [99, 0]]),
]


@pytest.mark.parametrize("optimizer", ["sgd", None])
@pytest.mark.parametrize(("before", "now"), ORDERS, ids=str)
def test_a_checkpoint_of_nodes_in_another_order_is_refused(
    before: Any, now: Any, optimizer: Any, tmp_path: Path
) -> None:
    first = Embedding(with_ids(before), "user", dim=8, optimizer="sgd")
    Checkpoint(tmp_path, alone()).save("last", learned_parts(first.store))
    for ids in (before, [[*each, 0] for each in before] if isinstance(before[0], list) else before):
        assert torch.equal(restore(tmp_path, store=with_ids(ids), optimizer=optimizer).rows, first.rows)
    with pytest.raises(ConfigError) as raised:
        restore(tmp_path, store=with_ids(now), optimizer=optimizer)
    assert f"rows of user: its nodes are others, or in another order, as after partitioning; {WAY_OUT}" in str(
        raised.value
    )


def test_rows_go_on_in_a_partitioned_graph_by_an_export(tmp_path: Path) -> None:
    """Partitioning renumbers nodes: a checkpoint's rows would be those of other nodes."""
    shop().save(tmp_path / "shop.store")
    partition(tmp_path / "shop.store", tmp_path / "parts.store", 2)
    parts = open_store(tmp_path / "parts.store")
    originals = parts["user"].original_id[:].long()
    assert not torch.equal(originals, torch.arange(USERS))
    saved(tmp_path, seed=4)
    with pytest.raises(ConfigError, match=r"in another order, as after partitioning; .* give the file as warm_start"):
        restore(tmp_path, store=parts)
    before = Embedding(shop(), "user", dim=8, seed=4)
    before.export(tmp_path / "rows.parquet")
    assert torch.equal(
        Embedding(parts, "user", dim=8, warm_start=tmp_path / "rows.parquet").rows, before.rows[originals]
    )


@pytest.mark.parametrize("kind", ["rows", "state"])
@pytest.mark.parametrize("how", ["missing", "cut short", "a bit", "empty", "of other nodes"])
def test_rows_that_cannot_be_read_are_one_error_with_a_way_out(how: str, kind: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (path,) = tmp_path.glob(f"*.{kind}")
    raw = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "of other nodes":
        write_state(path, {kind: torch.zeros(7, 8 if kind == "rows" else 1)})
    else:
        raw[-3] ^= 8
        path.write_bytes({"cut short": raw[:-9], "a bit": raw, "empty": b""}[how])
    learned = Embedding(shop(), "user", dim=8, seed=1)
    before = {each: values.clone() for each, values in learned.own_rows().items()}
    with pytest.raises(StoreError) as raised:
        Checkpoint(tmp_path, alone()).restore("last", learned_parts(learned.store))
    assert torch.equal(learned.own_rows()[kind], before[kind])  # none of the damaged ones
    assert str(path) in str(raised.value)
    assert re.search("(take another checkpoint|copy it again)", str(raised.value))
    assert "\n" not in str(raised.value)


SAVES = ["last", ("last", "best")]


@pytest.mark.parametrize("name", SAVES, ids=["last", "best, then last"])
@pytest.mark.parametrize("number", range(1, 7), ids=lambda number: f"file {number}")
def test_a_failed_save_leaves_the_files_of_the_one_before(
    number: int, name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file in turn is not written: rows, state and weights. Each checkpoint that is there has its rows."""
    embedding, checkpoint, model = (
        Embedding(shop(), "user", dim=8),
        Checkpoint(tmp_path, alone()),
        torch.nn.Linear(2, 2),
    )
    parts, numbers, write = {"model": model} | learned_parts(embedding.store), count(1), checkpoints.write_whole

    def full(path: Path, pieces: Any) -> None:
        if next(numbers) == number:
            raise StoreError("the disk is full")
        write(path, pieces)

    names, kept = ("last",) if name == "last" else name, dict[str, Tensor]()
    checkpoint.save(name, parts)
    kept = dict.fromkeys(names, embedding.rows.clone())
    embedding.rows += 1
    monkeypatch.setattr(checkpoints, "write_whole", full)
    if number > 3 * len(names):
        pytest.skip("a save of one checkpoint writes three files")
    with pytest.raises(StoreError, match="the disk is full"):
        checkpoint.save(name, parts)
    if number == 6:  # the second name is complete before the first one fails
        kept["best"] = embedding.rows.clone()
    assert rows_files(tmp_path) == sorted(file for each in names for file in files_of(each, 1))
    assert list(tmp_path.glob(".*")) == []
    for each in names:
        checkpoint.restore(each, parts)
        assert torch.equal(embedding.rows, kept[each])


def test_a_failed_first_save_leaves_nothing(tmp_path: Path) -> None:
    embedding = Embedding(shop(), "user", dim=8)
    with pytest.raises(ConfigError, match="can be saved"):
        Checkpoint(tmp_path, alone()).save("last", learned_parts(embedding.store), wrong=object())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_rows", [1, 7, USERS - 1, USERS])
def test_rows_are_restored_in_pieces(num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, seed=4)
    monkeypatch.setattr(checkpoints, "PIECE", 4 * 8 * num_rows)
    assert torch.equal(restore(tmp_path).rows, Embedding(shop(), "user", dim=8, seed=4).rows)


@pytest.mark.slow  # a process imports torch
def test_restoring_takes_little_memory_beside_the_rows(tmp_path: Path) -> None:
    spawn(restored_within, 1, [str(tmp_path)], device="cpu", timeout=60)


def test_best_and_last_keep_their_own_rows(tmp_path: Path) -> None:
    """Each save removes the rows that its checkpoint had before, and no others."""
    accuracies = iter((0.5, 0.9, 0.2, 0.1))
    learner, checkpoint, seen = learner_of(alone()), Checkpoint(tmp_path, alone()), list[Tensor]()

    def validate() -> dict[str, float]:
        seen.append(embedding_of(learner).rows.clone())
        return {"accuracy": next(accuracies)}

    fit(learner, Training(4, checkpoint_every=3, **QUIET), alone(), validate=validate, checkpoint=checkpoint)
    assert rows_files(tmp_path) == [*files_of("best", 1), *files_of("last", 1)]
    for name, epoch in (("best", 1), ("last", 3)):
        restored = learner_of(alone())
        checkpoint.restore(name, restored.parts())
        assert torch.equal(embedding_of(restored).rows, seen[epoch])
    for path in tmp_path.glob("last.*"):
        path.unlink()
    assert checkpoint.restore("best", learner_of(alone()).parts()) is not None


def test_rows_restore_into_another_cut_of_the_graph(tmp_path: Path) -> None:
    """Also of a store in parts; and a checkpoint without learned rows says so."""
    path = saved(tmp_path, seed=4)
    assert torch.equal(restore(tmp_path, store=in_parts(shop(), 3)).rows, Embedding(shop(), "user", dim=8, seed=4).rows)
    assert read_state(path)["parts"]["rows of user"]["dim"] == 8
    Checkpoint(tmp_path, alone()).save("last", {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"holds no 'rows of user', only \['model'\]; leave it out, or start anew"):
        restore(tmp_path)
    assert rows_files(tmp_path) == []


def test_learned_rows_are_left_out_on_demand_only(tmp_path: Path) -> None:
    learned, model, checkpoint = Embedding(shop(), "user", dim=8), torch.nn.Linear(2, 2), Checkpoint(tmp_path, alone())
    checkpoint.save("last", {"model": model} | learned_parts(learned.store))
    with pytest.raises(
        ConfigError, match=r"holds learned rows as 'rows of user', .* with an Embedding as .* give None"
    ):
        checkpoint.restore("last", {"model": model})
    assert checkpoint.restore("last", {"model": model, "rows of user": None}) == {}
