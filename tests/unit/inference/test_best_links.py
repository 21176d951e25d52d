"""The table of the best destinations: the user's ids, ranks and scores, equal for any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import random_graph
from support.infer_workers import forward, in_threads, model_of
from support.memory_group import memory_group
from support.stores import left_in
from torch import Tensor

import hoploom
from hoploom import ConfigError, DataError, PeerError, Store
from hoploom.inference.best_links import write_best
from hoploom.inference.infer import folder_of, ids_of_user
from hoploom.nn import Bilinear, Decoder, RotatE
from hoploom.nn.row_tables import parquet_file

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


@pytest.mark.parametrize(("world_size", "decoder"), [(1, None), (2, None), (4, None), (12, None), (2, Bilinear(4))])
def test_each_source_has_its_best_destinations_but_for_those_that_it_has(
    tmp_path: Path, world_size: int, decoder: Decoder | None
) -> None:
    store = shop()
    rows = with_outputs(tmp_path, store)
    raised = in_threads(world_size, lambda context: write_best(store, tmp_path, LIKES, K, context, decoder))
    assert raised == [None] * world_size
    assert left_in(tmp_path) == ["best-3", "item", "user"]
    assert len(left_in(tmp_path / "best-3")) == world_size
    found = parquet.read_table(tmp_path / "best-3").to_pylist()
    scores = rows["user"] @ rows["item"].t()
    if decoder is not None:
        scores = decoder(rows["user"][:, None], rows["item"]).detach()
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
    assert in_threads(1, lambda context: write_best(store, tmp_path, LIKES, K, context)) == [None]
    found = parquet.read_table(tmp_path / "best-3").to_pylist()
    assert found == [{"id": 3, "rank": 1, "destination": ITEMS - 1, "score": 2.0}]


def test_what_fails_on_one_rank_fails_on_all_and_leaves_no_folder(tmp_path: Path) -> None:
    """Every rank scores the last item; the last user is in the share of one rank, whose error the other one raises."""
    store = shop()
    for damaged in ("item", "user"):
        rows = with_outputs(tmp_path, store)
        rows[damaged][-1] = torch.nan
        with parquet_file(tmp_path / damaged / "part-00000.parquet", table := whole(store, damaged, rows)) as write:
            write(table)
        (tmp_path / damaged / "part-00001.parquet").unlink()
        raised = in_threads(2, lambda context: write_best(store, tmp_path, LIKES, K, context))
        assert all(isinstance(error, DataError | PeerError) and "not finite" in str(error) for error in raised)
        assert left_in(tmp_path) == ["item", "user"]


def whole(store: Store, name: str, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"id": ids_of_user(store, name, torch.arange(len(rows[name]))), "output": rows[name]}


@pytest.mark.parametrize("with_decoder", [False, True])
def test_a_model_is_searched_by_its_outputs_of_all_nodes(with_decoder: bool) -> None:
    """The best of the rows that the model returns for the whole graph."""
    graph = random_graph(60, 400, 1)
    store = hoploom.from_pyg(graph)
    model = model_of(store)
    if with_decoder:
        model.decoder = Bilinear(4)
    rows = forward(model, graph)
    scores = rows @ model.decoder.relations.weight.view(4, 4) @ rows.t() if with_decoder else rows @ rows.t()
    found = hoploom.best(model, store, [3, 50, 7], k=4, exclude=None)
    wanted = scores[[3, 50, 7]].topk(4)
    assert torch.equal(found.ids, wanted.indices)
    torch.testing.assert_close(found.scores, wanted.values.detach())


def test_a_model_with_a_score_of_its_own_is_refused() -> None:
    store = hoploom.from_pyg(random_graph(60, 400, 1))
    model: Any = model_of(store)
    model.score = lambda z, ends: z
    with pytest.raises(ConfigError, match="the model has a method `score`, which nothing would call"):
        hoploom.best(model, store, k=4)


@pytest.mark.parametrize(
    ("change", "decoder", "message"),
    [
        ({"k": 0}, None, "k is 0"),
        ({"k": 61}, None, "k is 61, and there are 60 nodes"),
        ({"of": "typo"}, None, "typo"),
        ({"exclude": "typo"}, None, "exclude is 'typo'"),
        ({"exclude": [("a", "b", "c")]}, None, "b"),
        ({}, Bilinear(4, 5), r"Bilinear has 5 relations; .* choose one, such as decoder=model.decoder.only\(3\)"),
        ({}, torch.nn.Linear(4, 4), "the model has a `decoder` of type Linear"),
        ({"approximate": True}, RotatE(4), "RotatE is none; leave it out"),
        ({"typo": 1}, None, "unexpected keyword argument 'typo'"),
    ],
)  # fmt: skip
def test_a_mistake_is_raised_before_any_output_is_computed(change: Any, decoder: Any, message: str) -> None:
    store = hoploom.from_pyg(random_graph(60, 400, 1))
    model: Any = model_of(store)
    model.decoder = decoder
    model.forward = None  # an output would be another error
    with pytest.raises((ConfigError, TypeError), match=message):
        hoploom.best(model, store, **{"k": 4, **change})


MB = 1 << 20
SCRIPT = """
import sys
from pathlib import Path
import torch
import hoploom, pyarrow.parquet
from hoploom.inference.best_links import write_best
from hoploom.inference.infer import infer
from support.infer_workers import in_threads

torch.set_num_threads(2)
store = hoploom.open(sys.argv[2])
hoploom.best({name: torch.ones(store.schema.node_type(name).num_nodes, 1) for name in ("user", "item")}, store,
    ("user", [0]), of="item", k=2)  # imports, and starts threads
enter()
print(in_threads(1, lambda context: write_best(store, Path(sys.argv[1]), ("user", "likes", "item"), 2, context)))
"""


@pytest.mark.parametrize(("num_users", "num_items"), [(600, 700_000), (700_000, 40)], ids=["items", "users"])
def test_outputs_need_not_fit_in_memory(num_users: int, num_items: int, tmp_path: Path) -> None:
    """They are 300 MB and more; a block of scores is 64 MB at most, and the results of some users 20 MB."""
    generator, outputs = torch.Generator().manual_seed(1), tmp_path / "outputs"
    sizes = {"user": num_users, "item": num_items}
    likes = torch.stack([torch.randint(n, (10_000,), generator=generator) for n in sizes.values()])
    hoploom.from_tensors({name: {"one": torch.ones(n)} for name, n in sizes.items()}, {LIKES: likes}).save(
        tmp_path / "shop.store"
    )
    for name, count in sizes.items():
        columns = {"id": torch.arange(count), "output": torch.randn(count, 128, generator=generator)}
        with parquet_file(outputs / folder_of(name) / "part-00000.parquet", columns) as write:
            write(columns)
    assert sum(path.stat().st_size for path in outputs.rglob("*.parquet")) > 300 * MB
    with memory_group(192 * MB) as group:
        done = group.run(SCRIPT, [str(outputs), str(tmp_path / "shop.store")])
        assert group.num_killed == 0
        assert group.peak <= 192 * MB
    assert done.stdout == "[None]\n", done.stderr
    assert parquet.ParquetFile(outputs / "best-2" / "part-00000.parquet").metadata.num_rows == 2 * num_users
