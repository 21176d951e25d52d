"""Checkpoints of learned rows: resumed to the last bit after a kill, by other numbers of ranks, and what goes wrong."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import in_parts
from support.learned_workers import USERS, alone, differs, embedding_of, fitted, learner_of, shop
from torch import Tensor

from hoploom import StoreError, from_pyg
from hoploom.errors import ConfigError, TrainError
from hoploom.nn.embedding import Embedding
from hoploom.ranks.spawn import spawn
from hoploom.train.checkpoint import Checkpoint, learned_parts, read_state
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
    """The files of learned rows, without the words in their names; complete or not."""
    return sorted(re.sub(r"\.[0-9a-f]{8}-[0-9a-f]{8}-", ".", path.name) for path in folder.glob("*.rows*"))


def files_of(name: str, world_size: int) -> list[str]:
    return [f"{name}.{rank}.rows" for rank in range(world_size)]


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
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["user"].num_nodes = 7
    data["user", "knows", "user"].edge_index = torch.tensor([[0], [1]])
    return from_pyg(data)


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"dim": 16}, "dim was 8, and is 16 here"),
    ({"optimizer": "adagrad"}, "optimizer was rowwise_adagrad, and is adagrad here"),
    ({"dtype": "bfloat16"}, "dtype was float32, and is bfloat16 here"),
    ({"store": fewer_users}, f"num_nodes was {USERS}, and is 7 here"),
]


@pytest.mark.parametrize(("given", "said"), OTHERS, ids=[said for _, said in OTHERS])
def test_a_checkpoint_of_other_rows_names_both(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    path, options = saved(tmp_path), {name: of() if name == "store" else of for name, of in given.items()}
    with pytest.raises(ConfigError) as raised:
        restore(tmp_path, **options)
    assert str(raised.value) == f"{path} does not fit this run's rows of user: {said}; make the Embedding as it was"


@pytest.mark.parametrize("how", ["missing", "cut short", "a bit", "empty"])
def test_rows_that_cannot_be_read_are_one_error_with_a_way_out(how: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (path,) = tmp_path.glob("*.rows")
    raw = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        raw[-3] ^= 8
        path.write_bytes({"cut short": raw[:-9], "a bit": raw, "empty": b""}[how])
    with pytest.raises(StoreError) as raised:
        restore(tmp_path)
    assert str(path) in str(raised.value)
    assert re.search("(take another checkpoint|copy it again)", str(raised.value))
    assert "\n" not in str(raised.value)


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
