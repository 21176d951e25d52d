"""The table of the best destinations: the user's ids, ranks and scores, equal for any number of ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hoploom
from hoploom import Store
from hoploom.inference.best_links import read_outputs, write_best
from hoploom.inference.files import parquet_file
from hoploom.inference.infer import folder_of, ids_of_user

parquet = pytest.importorskip("pyarrow.parquet")
LIKES = ("user", "likes", "item")
USERS, ITEMS, K = 11, 7, 3


def shop() -> Store:
    """Text ids of users, whole numbers of items; user u likes items u and u + 1."""
    names = torch.tensor([list(f"u{user:02d}".encode()) for user in range(USERS)], dtype=torch.uint8)
    likes = torch.stack(
        [torch.arange(2 * USERS) // 2, (torch.arange(2 * USERS) // 2 + torch.arange(2 * USERS) % 2) % ITEMS]
    )
    nodes = {"user": {"original_id": names}, "item": {"original_id": torch.arange(ITEMS) * 10 + 5}}
    return hoploom.from_tensors(nodes, {LIKES: likes})


def with_outputs(folder: Path, store: Store) -> dict[str, Tensor]:
    """The outputs of both types, in two files each and in no order."""
    generator, rows = torch.Generator().manual_seed(4), dict[str, Tensor]()
    for name, count in (("user", USERS), ("item", ITEMS)):
        rows[name] = torch.randn(count, 4, generator=generator)
        for number, nodes in enumerate(torch.randperm(count, generator=generator).chunk(2)):
            columns = {"id": ids_of_user(store, name, nodes), "output": rows[name][nodes]}
            with parquet_file(folder / folder_of(name) / f"part-{number:05d}.parquet", columns) as write:
                write(columns)
    return rows


def rank(number: int, world_size: int) -> Any:
    return SimpleNamespace(rank=number, world_size=world_size, barrier=lambda: None)


def test_outputs_are_read_in_the_order_of_the_store(tmp_path: Path) -> None:
    store = shop()
    rows = with_outputs(tmp_path, store)
    assert all(torch.equal(read_outputs(tmp_path, store, name), rows[name]) for name in rows)


@pytest.mark.parametrize("world_size", [1, 2, 4, 12])
def test_each_source_has_its_best_destinations_but_for_those_that_it_has(tmp_path: Path, world_size: int) -> None:
    store = shop()
    rows = with_outputs(tmp_path, store)
    folders = {write_best(store, tmp_path, LIKES, K, rank(number, world_size)) for number in range(world_size)}
    assert len(list(*[folder.iterdir() for folder in folders])) == world_size
    found = parquet.read_table(*folders).to_pylist()
    scores = rows["user"] @ rows["item"].t()
    expected = []
    for user in range(USERS):
        others = [item for item in range(ITEMS) if item not in (user % ITEMS, (user + 1) % ITEMS)]
        best = sorted(others, key=lambda item: -float(scores[user, item]))[:K]
        expected += [(f"u{user:02d}", place + 1, 10 * item + 5) for place, item in enumerate(best)]
    assert [(row["id"], row["rank"], row["destination"]) for row in found] == expected
    assert all(abs(row["score"] - float(scores[int(row["id"][1:]), row["destination"] // 10])) < 1e-5 for row in found)


def test_a_source_that_has_nearly_all_has_fewer(tmp_path: Path) -> None:
    nodes = {"user": {"original_id": torch.tensor([3])}, "item": {"original_id": torch.arange(ITEMS)}}
    store = hoploom.from_tensors(nodes, {LIKES: torch.stack([torch.zeros(ITEMS - 1).long(), torch.arange(ITEMS - 1)])})
    for name, count in (("user", 1), ("item", ITEMS)):
        columns = {"id": ids_of_user(store, name, torch.arange(count)), "output": torch.ones(count, 2)}
        with parquet_file(tmp_path / folder_of(name) / "part-00000.parquet", columns) as write:
            write(columns)
    found = parquet.read_table(write_best(store, tmp_path, LIKES, K, rank(0, 1))).to_pylist()
    assert found == [{"id": 3, "rank": 1, "destination": ITEMS - 1, "score": 2.0}]
