"""Learned rows are those of torch's sparse embeddings, in every batch as they are now, and what goes wrong."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import library
from support.learned_workers import SEEDS, USERS, alone, items, shop
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom.errors import ConfigError, HoploomError, StoreError, TrainError
from hoploom.nn import embedding as embedding_module
from hoploom.nn.embedding import Embedding
from hoploom.train.checkpoint import Checkpoint, learned_parts

OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "lazy_adam": torch.optim.SparseAdam,
}


def users(**options: Any) -> Embedding:
    return Embedding(shop(), "user", **({"dim": 8, "lr": 0.1} | options))


def loss_of(rows: Tensor) -> Tensor:
    return (rows.sin() * rows.mean()).sum()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_follow_torchs_sparse_optimizers(optimizer: str) -> None:
    """Adam's with all rows in every step, because torch counts steps of all rows together."""
    learned = users(optimizer=optimizer)
    own = nn.Embedding(USERS, 8, sparse=True, _weight=learned.rows.clone())
    steps, draw = OPTIMIZERS[optimizer](own.parameters(), lr=0.1), torch.Generator().manual_seed(0)
    for _ in range(10):
        ids = torch.randint(0, USERS, (90,), generator=draw)  # some twice
        ids = torch.cat([ids, torch.arange(USERS)]) if optimizer == "lazy_adam" else ids
        loss_of(learned(ids.view(-1, 1))).backward()
        learned.step()
        steps.zero_grad()
        loss_of(own(ids.view(-1, 1))).backward()
        steps.step()
    assert torch.allclose(learned.rows, own.weight, atol=1e-6)


def test_the_rowwise_rule_divides_by_the_root_of_all_mean_squares() -> None:
    learned = users(optimizer="rowwise_adagrad")
    row, state = learned.rows[7].clone(), 0.0
    for number in range(1, 4):
        gradient = torch.linspace(-1, 1, 8) * number
        (learned(torch.tensor([7])) * gradient).sum().backward()
        learned.step()
        state += float((gradient**2).mean())
        row -= 0.1 * gradient / (state**0.5 + 1e-8)
        assert torch.allclose(learned.rows[7], row, atol=1e-6)


def test_adams_correction_is_of_each_row() -> None:
    """A row that gets its first gradient late moves as far as one that got it at once."""
    learned, before = users(optimizer="lazy_adam"), users().rows
    for ids in ([1], [1], [1], [2]):
        learned(torch.tensor(ids)).sum().backward()
        learned.step()
    assert torch.allclose(before[2] - learned.rows[2], torch.full((8,), 0.1), atol=1e-5)


def test_rows_without_a_gradient_stay() -> None:
    learned, before = users(), users().rows
    learned.step()
    learned(torch.empty(0, dtype=torch.int64)).sum().backward()
    learned.step()
    assert torch.equal(learned.rows, before)
    learned(torch.tensor([3, 9, 3])).sum().backward()
    learned.zero_grad()
    learned.step()
    assert torch.equal(learned.rows, before)
    learned(torch.tensor([3, 9, 3])).sum().backward()
    learned.step()
    assert torch.nonzero((learned.rows != before).any(dim=1)).view(-1).tolist() == [3, 9]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "rowwise_adagrad"])
def test_a_gradient_that_is_not_finite_changes_no_row_of_its_own(optimizer: str, dtype: str, bad: float) -> None:
    learned, other = (users(optimizer=optimizer, dtype=dtype) for _ in range(2))
    before, state = learned.rows.clone(), learned.state.clone()
    (learned(torch.tensor([3, 9, 3])) * torch.tensor([[1.0], [1.0], [bad]])).sum().backward()
    with pytest.raises(
        TrainError, match=r"row 3 of 'user' or its state would not be finite after step 1; it stays .*\(lr=0.1\)"
    ):
        learned.step()
    other(torch.tensor([9])).sum().backward()
    other.step()
    assert torch.equal(learned.rows[3], before[3])
    assert torch.equal(learned.state[3], state[3])
    assert torch.equal(learned.rows[9], other.rows[9])
    learned.step()  # the gradient is gone


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "rowwise_adagrad"])
def test_a_gradient_whose_square_is_not_finite_does_not_stop_its_row(optimizer: str) -> None:
    """The row and its state stay, and go on with the next gradient as if this one had not been."""
    learned, other = (users(optimizer=optimizer) for _ in range(2))
    for each in (learned, other):
        each(torch.tensor([3])).sum().backward()
        each.step()
        if each is learned and optimizer != "sgd":  # keeps no squares
            (each(torch.tensor([3])) * 1e25).sum().backward()
            with pytest.raises(TrainError, match="row 3 of 'user' or its state would not be finite after step 2"):
                each.step()
        each(torch.tensor([3])).sum().backward()
        each.step()
    assert torch.equal(learned.rows, other.rows)
    assert torch.equal(learned.state, other.state)


def test_gradients_add_up_until_a_step() -> None:
    """Of several look-ups, and of several backward passes."""
    once, parts = users(optimizer="sgd"), users(optimizer="sgd")
    (once(torch.tensor([1, 2, 1])) * 3).sum().backward()
    once.step()
    parts(torch.tensor([1, 2])).mul(3).sum().backward()
    parts(torch.tensor([1])).mul(3).sum().backward()
    parts.step()
    assert torch.equal(once.rows, parts.rows)
    with torch.no_grad():
        assert not once(torch.tensor([1])).requires_grad


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("mode", ["subgraph", "blocks", "disjoint", "links", "called"])
def test_batches_have_the_rows_as_they_are_now(mode: str, num_parts: int) -> None:
    """Batches that threads have prepared ahead have the rows that steps in between have changed."""
    learned = Embedding(shop(num_parts), "user", dim=8, lr=0.5)
    options: dict[str, Any] = {"batch_size": SEEDS, "num_workers": 2, "prefetch_factor": 4, "shuffle": True}
    if mode == "links":
        options |= {"edge_label_index": ("user", "buys", "item"), "neg_sampling": "binary", "batch_size": 500}
        loader: Any = hoploom.LinkNeighborLoader(learned.store, [3, 3], **options)
    else:
        options |= {"mode": "blocks"} if mode == "blocks" else {"disjoint": mode == "disjoint"}
        loader = hoploom.NeighborLoader(learned.store, [4, 3], input_nodes="item", **options)
    batches = [loader([5, 6])] if mode == "called" else loader
    changed = 0
    for batch in batches:
        rows, now = batch["user"].x, learned.rows[batch["user"].n_id]
        assert torch.equal(rows, now)
        changed += int((now != users().rows[batch["user"].n_id]).any())
        loss_of(rows).backward()
        learned.step()
    assert changed == len(batches) - 1


def test_a_graph_of_one_type_has_learned_rows_too() -> None:
    data = Data(edge_index=torch.randint(0, 30, (2, 90)), num_nodes=30)
    learned = Embedding(hoploom.from_pyg(data), dim=5)
    batch = next(iter(hoploom.NeighborLoader(learned.store, [3], batch_size=4)))
    assert torch.equal(batch.x, learned.rows[batch.n_id])
    batch.x.sum().backward()
    learned.step()
    assert not torch.equal(batch.x, learned.rows[batch.n_id])


def test_several_types_learn_beside_each_other() -> None:
    first = users()
    second = Embedding(first.store, "item", dim=3, join="cat")
    batch = next(iter(items(second, alone())))
    assert torch.equal(batch["user"].x, first.rows[batch["user"].n_id])
    assert batch["item"].x.shape[1] == 4 + 3
    batch["item"].x.sum().backward()
    for learned in second.store.learned:
        learned.step()  # type: ignore[attr-defined]
    assert torch.equal(first.rows, users().rows)


@pytest.mark.parametrize("join", ["cat", "add"])
def test_rows_join_features(join: Any) -> None:
    learned, x = Embedding(shop(), "item", dim=4, join=join), shop()["item"].x[:]
    expected = torch.cat([x, learned.rows], dim=1) if join == "cat" else x + learned.rows
    batch = next(iter(items(learned, alone())))
    assert torch.equal(batch["item"].x, expected[batch["item"].n_id])
    assert learned.store.schema.node_type("item").fields["x"].shape == (expected.shape[1],)
    assert torch.equal(learned.store["item"].x[:], expected)


def test_a_store_reads_learned_rows_as_any_field() -> None:
    learned = users(dtype="bfloat16")
    (rows, y) = learned.store.features.gather([("user", "x", [4, 2]), ("item", "y", [1])])
    assert torch.equal(rows, learned.rows[[4, 2]].float())
    assert torch.equal(y, shop()["item"].y[1:2])


def test_initial_rows_belong_to_the_users_own_ids() -> None:
    """A grown graph keeps the rows of its old nodes, wherever they are now."""

    def store_of(ids: Any) -> hoploom.Store:
        data = HeteroData()
        data["user"].num_nodes = len(ids)
        data["user"].original_id = torch.tensor(ids, dtype=torch.uint8 if isinstance(ids[0], list) else torch.int64)
        data["user", "knows", "user"].edge_index = torch.tensor([[0], [1]])
        return hoploom.from_pyg(data)

    texts = [[97, 0], [98, 0]], [[98, 0, 0], [97, 98, 99], [97, 0, 0]]
    for old, new in (([30, 10, 20], [20, 77, 10, 30]), texts):
        few, more = (Embedding(store_of(ids), "user", dim=6) for ids in (old, new))
        of_text = isinstance(old[0], list)
        known = [bytes(each).rstrip(b"\0") if of_text else each for each in new]
        for row, each in zip(few.rows, old, strict=True):
            at = known.index(bytes(each).rstrip(b"\0") if of_text else each)
            assert torch.equal(row, more.rows[at])
        assert len(set(more.rows[:, 0].tolist())) == len(new)
    one, other = users(), users(seed=1)
    assert torch.equal(one.rows, users().rows)
    assert not torch.equal(one.rows, other.rows)


@pytest.mark.parametrize(("init", "deviation"), [("uniform", (3 * 64) ** -0.5), ("normal", 1.0)])
def test_initial_rows_have_the_spread_they_say(init: Any, deviation: float) -> None:
    rows = users(dim=64, init=init).rows
    assert abs(float(rows.mean())) < 0.02
    assert float(rows.std()) == pytest.approx(deviation, rel=0.02)
    assert init == "normal" or float(rows.abs().max()) <= 1 / 8


def test_rows_take_the_bytes_they_say() -> None:
    sizes = {"rowwise_adagrad": (516, 260), "sgd": (512, 256), "adagrad": (1024, 768), "lazy_adam": (1540, 1284)}
    for optimizer, expected in sizes.items():
        for dtype, of_row in zip(("float32", "bfloat16"), expected, strict=True):
            learned = users(dim=128, optimizer=optimizer, dtype=dtype)
            assert (learned.rows.nbytes + learned.state.nbytes) / USERS == of_row


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "lazy_adam", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_a_folder_are_those_in_memory(optimizer: Any, dtype: Any, tmp_path: Path) -> None:
    """A row of seven bfloat16 takes no whole number of floats."""
    on_disk, here = (users(dim=7, optimizer=optimizer, dtype=dtype, folder=folder) for folder in (tmp_path, None))
    assert list(tmp_path.iterdir()) == []  # the file has no name
    for _ in range(3):
        for learned in (on_disk, here):
            loss_of(learned(torch.tensor([0, 5, 5, USERS - 1]))).backward()
            learned.step()
    ids = torch.arange(USERS)
    assert torch.equal(on_disk(ids), here(ids))
    assert torch.equal(on_disk.rows, here.rows)
    assert torch.equal(on_disk.state, here.state)
    assert not torch.equal(here.rows, users(dim=7, dtype=dtype).rows)


def test_a_disk_that_loses_rows_is_an_error_that_names_one(tmp_path: Path) -> None:
    learned = users(folder=tmp_path)
    rows = learned(torch.tensor([3]))
    os.truncate(f"/proc/self/fd/{learned._file}", 0)
    with pytest.raises(hoploom.StoreError, match=r"row 7 in the file of learned rows: .*; check the disk"):
        learned(torch.tensor([7]))
    rows.sum().backward()
    with pytest.raises(hoploom.StoreError, match="row 3 in the file of learned rows"):
        learned.step()


@pytest.mark.parametrize("ids", [None, [5, 3, 9], [[97, 0], [98, 0], [99, 99]]], ids=["none", "numbers", "text"])
def test_rows_are_exported_and_started_from(ids: Any, tmp_path: Path) -> None:
    """By the user's ids: the second graph has one node that the first one lacks, and lacks one that it has."""

    def store_of(ids: Any, count: int) -> hoploom.Store:
        data = HeteroData()
        data["user"].num_nodes = count
        if ids is not None:
            data["user"].original_id = torch.tensor(ids, dtype=torch.uint8 if isinstance(ids[0], list) else torch.int64)
        data["user", "knows", "user"].edge_index = torch.tensor([[0], [1]])
        return hoploom.from_pyg(data)

    first = Embedding(store_of(ids, 3), "user", dim=4)
    first.export(tmp_path / "rows.parquet")
    others = None if ids is None else [ids[2], ids[0], [100, 0] if isinstance(ids[0], list) else 77]
    second = Embedding(
        store_of(others, 4 if ids is None else 3), "user", dim=4, seed=1, warm_start=tmp_path / "rows.parquet"
    )
    fresh = Embedding(store_of(others, 4 if ids is None else 3), "user", dim=4, seed=1)
    known = first.rows if ids is None else first.rows[[2, 0]]
    assert torch.equal(second.rows[: len(known)], known)
    assert torch.equal(second.rows[len(known) :], fresh.rows[len(known) :])
    for given, message in (
        ({"dim": 5}, "the row of id .* in .* has not dim=5 numbers"),
        ({"warm_start": tmp_path / "no"}, "no cannot be read: .*give a file that export"),
    ):
        with pytest.raises(ConfigError, match=message):
            Embedding(store_of(ids, 3), "user", **({"dim": 4, "warm_start": tmp_path / "rows.parquet"} | given))


TABLES: list[tuple[Any, Any, str]] = [
    ([5, 9], [[1.0] * 6, [1.0] * 2], "the row of id 5 in .* has not dim=4 numbers; give a file that export"),
    ([5, 9], [[1.0] * 4, [1.0]], "the row of id 9 in .* has not dim=4 numbers"),
    ([5, 9], [[1.0] * 4, None], "the row of id 9 in .* has not dim=4 numbers"),
    ([5, 9], [[1.0] * 4, [1.0, None, 1.0, 1.0]], "the row of id 9 in .* has a number that is not finite"),
    ([5, 9], [[1.0] * 4, [float("inf")] * 4], "the row of id 9 in .* has a number that is not finite"),
    ([5, 5], [[1.0] * 4, [2.0] * 4], "the row of id 5 in .* is there twice"),
    ([5, 9], [1.0, 2.0], "column 'row' of .* has double; give lists of floats"),
    ([5, 9], [["a"] * 4, ["b"] * 4], "column 'row' of .* has list<.*string>; give lists of floats"),
    (["a", "b"], [[1.0] * 4] * 2, "warm_start of 'user' are"),
    ([5000, -1], [[1.0] * 4] * 2, "none of the 2 ids in .* is of a 'user' of the store; give a file that export"),
    ([5, 9], [[1.0] * 4, [1e300] * 4], "the row of id 9 in .* has a number that is not finite as float32"),
]


@pytest.mark.parametrize(("ids", "rows", "said"), TABLES, ids=[said for _, _, said in TABLES])
def test_a_table_that_no_export_wrote_is_one_error(ids: Any, rows: Any, said: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"id": ids, "row": rows}), tmp_path / "rows")
    with pytest.raises(ConfigError, match=said):
        users(dim=4, warm_start=tmp_path / "rows")


def test_rows_that_are_too_large_for_bfloat16_are_not_started_from(tmp_path: Path) -> None:
    large = users(dim=4)
    large.rows[9] = 3.4e38
    large.export(tmp_path / "rows")
    assert torch.equal(users(dim=4, seed=1, warm_start=tmp_path / "rows").rows, large.rows)
    with pytest.raises(ConfigError, match=r"the row of id 9 in .* has a number that is not finite as bfloat16"):
        users(dim=4, dtype="bfloat16", warm_start=tmp_path / "rows")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"dim": 0}, "dim is 0; give the width of a row"),
    ({"dim": 10**20}, "dim is 100000000000000000000; give the width of a row, below"),
    ({"node_type": ["user"]}, r"node_type is \['user'\]; name one of"),
    ({"lr": 0}, "lr is 0, so the rows would never change"),
    ({"lr": -1}, "lr is -1"),
    ({"optimizer": "adam"}, "optimizer is 'adam'; choose one of .*'lazy_adam'"),
    ({"dtype": "float16"}, "dtype is 'float16'; choose one of"),
    ({"init": "zeros"}, "init is 'zeros'; choose one of"),
    (
        {"store": HeteroData()},
        r"learned rows are of a store, and this is a HeteroData; give .*hoploom.from_pyg\(graph\)",
    ),
    ({"context": 3}, r"context is 3; give what hoploom.init\(\) returned, or leave it out"),
    ({"folder": 5}, "folder is 5; give the path of a folder, or leave it out"),
    ({"warm_start": 5}, "warm_start is 5; give the path of a file, or leave it out"),
    ({"node_type": "uzer"}, "unknown node type 'uzer'; the graph has"),
    ({"node_type": None}, "the graph has several node types; name one of"),
    ({"node_type": "item"}, r"'item' has features already \(float32 \[4\]\); say how learned rows join them"),
    ({"node_type": "item", "join": "add"}, r"features \[4\] of 'item' cannot be joined to rows of 8 by 'add'"),
    ({"store": "learned"}, "'user' has learned rows already; give the store that they were made from"),
    ({"join": "cat"}, "join is 'cat', but 'user' has no features; leave it out"),
    ({"folder": "/no/such/folder"}, "/no/such/folder/hoploom-rows-.* cannot be written"),
    ({"folder": __file__}, "test_embedding.py/hoploom-rows-.* cannot be written: Not a directory; give another folder"),
    ({"folder": f"{__file__}/below"}, "cannot be written: Not a directory; give another folder"),
    ({"folder": "a" * 300}, "cannot be written: File name too long; give another folder"),
    ({"folder": ""}, "folder is ''; give the path of a folder, or leave it out"),
    ({"dim": 10**9}, "the learned rows of 'user' take 1.61 TB, .* are left; give a smaller dim"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_wrong_arguments_are_one_error(given: dict[str, Any], message: str) -> None:
    options = {"node_type": "user", "dim": 8} | given
    store = options.pop("store", shop())
    store = users().store if store == "learned" else store
    with pytest.raises(HoploomError, match=message):
        Embedding(store, options.pop("node_type"), **options)


def test_ids_are_checked_and_rows_may_be_changed_in_place() -> None:
    learned = users()
    for ids in (torch.tensor([0.5]), torch.tensor([True]), torch.tensor([USERS]), torch.tensor([-1])):
        with pytest.raises(ConfigError, match="ids of 'user'"):
            learned(ids)
    for wrong in ("a", None, [[1], [2, 3]], ["a"]):
        with pytest.raises(ConfigError, match=r"ids of 'user' are .*; give a tensor or a list of integers"):
            learned(wrong)  # type: ignore[arg-type]
    assert torch.equal(learned([4, 7]), learned.rows[[4, 7]])
    rows = learned(torch.tensor([[4, 7]]))
    assert rows.shape == (1, 2, 8)
    nn.functional.relu(learned(torch.tensor([4, 7])), inplace=True).sum().backward()


def test_a_gradient_goes_to_the_rows_that_were_looked_up() -> None:
    """Also if the tensor of their ids has others when backward runs."""
    learned, before = users(optimizer="sgd", lr=1.0), users().rows
    ids = torch.tensor([1, 2])
    rows = learned(ids)
    ids.fill_(9)
    rows.sum().backward()
    learned.step()
    assert torch.nonzero((learned.rows != before).any(dim=1)).view(-1).tolist() == [1, 2]


def test_gradients_of_gradients_reach_the_rows() -> None:
    learned, plain = users(optimizer="sgd"), users(optimizer="sgd")
    rows = learned(torch.tensor([1]))
    (gradient,) = torch.autograd.grad((rows**3).sum(), rows, create_graph=True)
    gradient.sum().backward()  # 6 times the row
    (plain(torch.tensor([1])).square() * 3).sum().backward()
    learned.step(), plain.step()
    assert torch.equal(learned.rows, plain.rows)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), None, -1.0])
def test_a_scale_that_is_no_factor_is_named(scale: Any) -> None:
    learned = users()
    learned(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"scale is .*; give a factor of the gradients, such as 1 / scaler.get_scale"):
        learned.step(scale)
    learned.step()
    assert not torch.equal(learned.rows, users().rows)  # the gradient was kept


@pytest.mark.parametrize("placed", [False, True])
def test_rows_are_float32_whatever_torchs_default_is(placed: bool, tmp_path: Path) -> None:
    store = hoploom.place(shop(), features="cpu") if placed else shop()
    torch.set_default_dtype(torch.float64)
    try:
        learned = Embedding(store, "user", dim=8, lr=0.1)
        learned.step()
        rows = learned(torch.tensor([3, 9]))
        rows.sum().backward()
        learned.step()
        learned.export(tmp_path / "rows")
        again = Embedding(store, "user", dim=8, warm_start=tmp_path / "rows")
    finally:
        torch.set_default_dtype(torch.float32)
    expected = users()
    expected(torch.tensor([3, 9])).sum().backward()
    expected.step()
    assert (rows.dtype, learned.state.dtype) == (torch.float32, torch.float32)
    assert torch.equal(learned.rows, expected.rows)
    assert torch.equal(again.rows, expected.rows)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "lazy_adam", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_type_without_nodes_has_no_rows(optimizer: Any, dtype: Any, in_folder: bool, tmp_path: Path) -> None:
    data = HeteroData()
    data["user"].num_nodes = 0
    data["item"].x = torch.zeros(3, 2)
    data["user", "buys", "item"].edge_index = torch.zeros(2, 0, dtype=torch.int64)
    folder = tmp_path if in_folder else None
    learned = Embedding(hoploom.from_pyg(data), "user", dim=4, optimizer=optimizer, dtype=dtype, folder=folder)
    rows = learned(torch.empty(0, dtype=torch.int64))
    assert rows.shape == (0, 4)
    rows.sum().backward()
    learned.step()
    learned.export(tmp_path / "rows")
    Checkpoint(tmp_path, alone()).save("last", learned_parts(learned.store))
    Checkpoint(tmp_path, alone()).restore("last", learned_parts(learned.store))
    assert learned.num_steps == 1


def test_an_export_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file before stays; and a folder that cannot be made is one error."""
    parquet, learned, path = pytest.importorskip("pyarrow.parquet"), users(), tmp_path / "rows.parquet"
    learned.export(path)
    learned.rows += 1

    def full(*given: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(parquet.ParquetWriter, "write_table", full)
        with pytest.raises(StoreError, match=r"cannot be written to .*rows.parquet: No space left on device; give"):
            learned.export(path)
        monkeypatch.setattr(embedding_module, "AT_ONCE", 10)
        reads, read = list[int](), Embedding._read_together
        patch.setattr(Embedding, "_read_together", lambda self, ids: reads.append(len(ids)) or read(self, ids))  # type: ignore
        with pytest.raises(StoreError, match="No space left on device"):
            learned.export(path)
        assert reads == [10]  # no other host waits for the rest
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(users(seed=1, warm_start=path).rows, users().rows)
    with pytest.raises(StoreError, match=r"learned rows cannot be written to .*/rows.parquet/no: .*give another path"):
        learned.export(path / "no")
    learned.export(tmp_path / "new" / "rows.parquet")


def test_fixed_rows_say_so() -> None:
    fixed = users(optimizer=None)
    assert repr(fixed) == "Embedding(user: 403 of 8 float32, fixed)"
    assert fixed.kept_state()["optimizer"] is None
    fixed.load_kept_state(users().kept_state())
    with pytest.raises(ConfigError, match="optimizer was None, and is sgd here"):
        users(optimizer="sgd").load_kept_state(fixed.kept_state())


def test_rows_are_not_lost_in_a_state_without_them() -> None:
    for call in (users().state_dict, lambda: users().load_state_dict(users().kept_state())):
        with pytest.raises(
            ConfigError, match=r"rows of 'user' do not fit in a state_dict; save it as a part of a Check"
        ):
            call()


def test_a_state_that_is_none_is_one_error() -> None:
    with pytest.raises(ConfigError, match="num_nodes was None, and is 403 here; take the graph"):
        users().load_kept_state({})
    for steps in ("7", None, -1, 1.5):
        with pytest.raises(ConfigError, match=r"num_steps is .*; take another checkpoint"):
            users().load_kept_state(users().kept_state() | {"num_steps": steps})


def test_a_store_with_learned_rows_is_not_saved_or_partitioned(tmp_path: Path) -> None:
    store = users().store
    for doing, work in (("save", store.save), ("partition", lambda path: hoploom.partition(store, path, 2))):
        said = (
            rf"{doing} does not take learned rows, here of \['user'\]; export\(\) them, and build or from_pyg with them"
        )
        with pytest.raises(ConfigError, match=said):
            work(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


FIELDS: list[tuple[Any, str | None, list[str], list[str]]] = [
    (["x"], None, ["x"], ["x"]),
    (["y"], None, [], ["y"]),
    ({"user": ["x"]}, None, ["x"], []),
    ({"item": ["x", "y"]}, "cat", [], ["x", "y"]),
    ({"item": ["y"]}, "cat", [], ["y"]),
    (["x"], "add", ["x"], ["x"]),
    ([], "add", [], []),
]


@pytest.mark.parametrize("mode", ["subgraph", "blocks"])
@pytest.mark.parametrize(("fields", "join", "of_user", "of_item"), FIELDS, ids=lambda given: str(given))
def test_fields_may_name_learned_rows(
    fields: Any, join: Any, of_user: list[str], of_item: list[str], mode: Any
) -> None:
    """Of a type without features, or joined to features; batches of fields without x have none."""
    first = users()
    store = first.store if join is None else Embedding(first.store, "item", dim=4, join=join).store
    batch = next(iter(hoploom.NeighborLoader(store, [4, 3], "item", batch_size=5, fields=fields, mode=mode)))
    for name, expected in (("user", of_user), ("item", of_item)):
        assert [field for field in ("x", "y") if field in batch[name]] == expected
    if "x" in of_item:
        assert batch["item"].x.shape[1] == (8 if join == "cat" else 4)
    with pytest.raises(ConfigError, match="fields names 'z'"):
        hoploom.NeighborLoader(store, [4, 3], "item", fields=["z"])


def test_rows_are_freed_with_their_embedding() -> None:
    """At once: no cycle of references waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        learned = users()
        second = Embedding(learned.store, "item", dim=4, join="cat")
        batch = next(iter(items(second, alone(), num_workers=0)))
        (batch["user"].x.sum() + batch["item"].x.sum()).backward()
        learned.step(), second.step()
        alive = [weakref.ref(each) for each in (learned, second, learned.store.schema)]
        del learned, second, batch
        assert [each() for each in alive] == [None, None, None]
    finally:
        gc.enable()


def test_gradients_that_no_step_uses_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many bytes: a row of eight has 32, and two of them fit."""
    monkeypatch.setattr(embedding_module, "MOST_WAITING", 64)
    learned, ids = users(), torch.tensor([1])
    for _ in range(2):
        learned(ids).sum().backward()
        learned(ids).sum().backward()
        learned.step()
    for _ in range(2):
        learned(ids).sum().backward()
    with pytest.raises(
        ConfigError, match=r"of 3 look-ups of 'user' take more than 64.0 B; call step\(\) .* or lower train.accumulate"
    ):
        learned(ids).sum().backward()
    learned.zero_grad()
    learned(ids).sum().backward()


def test_rows_that_exceed_the_stores_memory_need_a_folder(tmp_path: Path) -> None:
    shop().save(tmp_path / "shop.store")
    store = hoploom.open(tmp_path / "shop.store", memory="100KB")
    with pytest.raises(ConfigError, match=r"take 208 kB, more than the store's memory of 100 kB; .*folder="):
        Embedding(store, "user", dim=128)
    learned = Embedding(store, "user", dim=128, folder=tmp_path)
    batch = next(iter(items(learned, alone())))
    assert torch.equal(batch["user"].x, learned.rows[batch["user"].n_id])


def test_a_library_without_features_learns_all_its_types() -> None:
    store = hoploom.from_pyg(library())
    missing = [of.name for of in store.schema.node_types if "x" not in of.fields]
    for name in missing:
        store = Embedding(store, name, dim=2).store
    assert [learned.node_type for learned in store.learned] == missing
