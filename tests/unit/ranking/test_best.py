"""The best destinations of each source: those of a loop in plain Python, whatever the blocks are."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom import ConfigError, DataError, HoploomError, Store
from hoploom.nn import DistMult, RotatE
from hoploom.nn.decoders import OfRelations
from hoploom.ranking.highest import Best

USERS, ITEMS = 23, 57
RATES, SEES = ("user", "rates", "item"), ("user", "sees", "item")


def shop() -> HeteroData:
    generator, data = torch.Generator().manual_seed(1), HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = USERS, ITEMS
    for key, count in ((RATES, 200), (SEES, 90)):
        users, items = (torch.randint(most, (count,), generator=generator) for most in (USERS, ITEMS))
        data[key].edge_index = torch.stack([users, items])
    data["item", "rev_rates", "user"].edge_index = data[RATES].edge_index.flip(0)
    return data


@pytest.fixture(scope="module")
def store() -> Store:
    return hoploom.from_pyg(shop())


@pytest.fixture(scope="module")
def rows() -> dict[str, Tensor]:
    """Small whole numbers, so that many scores are equal, and every sum is exact."""
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randint(-2, 3, (count, 4), generator=generator).float() for name, count in sizes().items()}


def sizes() -> dict[str, int]:
    return {"user": USERS, "item": ITEMS}


def expected(rows: dict[str, Tensor], sources: list[int], k: int, excluded: list[Any]) -> list[list[tuple[int, float]]]:
    """A loop: sort all destinations that are not left out by falling score, then by id."""
    edges = {tuple(edge) for key in excluded for edge in shop()[key].edge_index.t().tolist()}
    found = []
    for source in sources:
        scored = [(-float(rows["user"][source] @ rows["item"][item]), item) for item in range(ITEMS)]
        left = sorted(entry for entry in scored if (source, entry[1]) not in edges)[:k]
        found.append([(item, -score) for score, item in left] + [(-1, -math.inf)] * (k - len(left)))
    return found


def pairs(found: Best) -> list[list[tuple[int, float]]]:
    return [list(zip(*lists, strict=True)) for lists in zip(found.ids.tolist(), found.scores.tolist(), strict=True)]


@pytest.mark.parametrize("blocks", [(1024, 16384), (5, 13), (1, 1)])
@pytest.mark.parametrize("k", [1, 10, ITEMS])
@pytest.mark.parametrize(("exclude", "excluded"), [("known", [RATES, SEES]), (None, []), ([SEES], [SEES])])
def test_the_best_are_those_of_a_loop(
    blocks: tuple[int, int], k: int, exclude: Any, excluded: list[Any], store: Store, rows: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, size in zip(("SOURCES", "DESTINATIONS"), blocks, strict=True):
        monkeypatch.setattr(f"hoploom.ranking.highest.{name}", size)
    monkeypatch.setattr("hoploom.ranking.highest.NODES", 7)
    sources = random.Random(3).choices(range(USERS), k=12)  # some twice
    found = hoploom.best(rows, store, ("user", torch.tensor(sources)), of="item", k=k, exclude=exclude)
    assert pairs(found) == expected(rows, sources, k, excluded)


def test_all_users_are_the_default_and_half_precision_is_widened(store: Store, rows: dict[str, Tensor]) -> None:
    half = {"user": rows["user"].half().requires_grad_(), "item": rows["item"].half().numpy()}  # as models give them
    found = hoploom.best(half, store, ("user", None), of="item", k=3)
    assert pairs(found) == expected(rows, list(range(USERS)), 3, [RATES, SEES])
    assert (found.ids.dtype, found.scores.dtype) == (torch.int64, torch.float32)


def test_no_source_gets_no_list(store: Store, rows: dict[str, Tensor]) -> None:
    for none in ([], torch.empty(0, dtype=torch.int32)):
        assert hoploom.best(rows, store, ("user", none), of="item", k=3).ids.shape == (0, 3)  # type: ignore[arg-type]


def test_a_graph_of_one_type_needs_no_names() -> None:
    """The neighbours that a node points to are left out, and the node itself."""
    data = Data(edge_index=torch.tensor([[0, 0, 2], [1, 2, 0]]), num_nodes=4)
    rows = torch.tensor([[1.0], [4.0], [3.0], [2.0]])
    found = hoploom.best(rows, hoploom.from_pyg(data), [0, 3], k=2)
    assert found.ids.tolist() == [[3, -1], [1, 2]]
    assert hoploom.best(rows.numpy(), hoploom.from_pyg(data), k=4).ids[0].tolist() == [3, -1, -1, -1]


def test_a_store_in_parts_leaves_out_the_same(store: Store, rows: dict[str, Tensor], tmp_path: Path) -> None:
    """Parts have node ids of their own, and say which were the store's."""
    store.save(tmp_path / "store")
    hoploom.partition(tmp_path / "store", tmp_path / "parts", 3, method="hash")
    with hoploom.open(tmp_path / "parts") as parts:
        old = {name: parts.features.gather([(name, "original_id", torch.arange(n))])[0] for name, n in sizes().items()}
        found = hoploom.best({name: rows[name][old[name]] for name in rows}, parts, ("user", None), of="item", k=5)
    whole = expected(rows, old["user"].tolist(), 5, [RATES, SEES])
    assert found.scores.tolist() == [[score for _, score in lists] for lists in whole]
    edges = {tuple(edge) for key in (RATES, SEES) for edge in shop()[key].edge_index.t().tolist()}
    items = [[int(old["item"][item]) for item in lists] for lists in found.ids]
    assert not edges.intersection(
        (user, item) for user, own in zip(old["user"].tolist(), items, strict=True) for item in own
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": ITEMS + 1}, "k is 58, and there are 57 nodes of 'item'"),
        ({"of": "shop"}, "shop"),
        ({"of": None}, "of must name a node type, because the graph has several"),
        ({"sources": torch.tensor([1])}, r"sources is tensor\(\[1\]\); name the node type too"),
        ({"sources": ("user", torch.tensor([USERS]))}, "sources holds id 23, out of range"),
        ({"sources": ("user", torch.tensor([-1]))}, "sources holds id -1, out of range"),
        ({"sources": ("user", torch.tensor([0.5]))}, "give a list of integer ids"),
        ({"sources": ("item", None), "rows": {"item": torch.ones(ITEMS, 4)}}, "there is no relation from 'item'"),
        ({"exclude": "rated"}, "exclude is 'rated'; give 'known'"),
        ({"exclude": [("item", "rev_rates", "user")]}, "is no relation from 'user' to 'item'"),
        ({"rows": {"user": torch.ones(USERS, 4)}}, "there are no rows of 'item'"),
        ({"rows": {"user": torch.ones(USERS, 4), "item": torch.ones(ITEMS, 5)}}, "a score needs as many"),
        ({"rows": {"user": torch.ones(USERS, 4), "item": torch.ones(5, 4)}}, "one row for each of its 57 nodes"),
        ({"rows": {"user": torch.ones(USERS, 4), "item": torch.full((ITEMS, 4), torch.nan)}}, "are not finite"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error(change: dict[str, Any], message: str, store: Store, rows: dict[str, Tensor]) -> None:
    given = {"rows": rows, "sources": ("user", None), "of": "item", "k": 10} | change
    with pytest.raises(HoploomError, match=message) as error:
        hoploom.best(given.pop("rows"), store, given.pop("sources"), **given)
    assert isinstance(error.value, ConfigError | DataError)


def test_a_source_is_not_among_its_own_best_in_a_graph_of_one_type() -> None:
    rows = torch.nn.functional.normalize(torch.randn(30, 8), dim=1)
    store = hoploom.from_tensors({"x": rows}, torch.stack([torch.arange(30), (torch.arange(30) + 1) % 30]))
    found = hoploom.best(rows, store, k=5).ids
    assert not (found == torch.arange(30)[:, None]).any()
    assert not (found == (torch.arange(30)[:, None] + 1) % 30).any()
    assert torch.equal(hoploom.best(rows, store, k=5, exclude=None).ids[:, 0], torch.arange(30))


@pytest.mark.parametrize("make", [lambda: DistMult(4, 3), lambda: RotatE(4, 3)])
def test_a_decoder_scores_with_one_of_its_relations(
    make: Callable[[], OfRelations], store: Store, rows: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hoploom.ranking.highest.DESTINATIONS", 13)
    torch.manual_seed(0)
    decoder = make()
    found = hoploom.best(rows, store, ("user", None), of="item", k=5, exclude=None, decoder=decoder.only(2))
    every = decoder(rows["user"][:, None], rows["item"], torch.full((USERS,), 2))
    torch.testing.assert_close(found.scores, every.topk(5).values)
    torch.testing.assert_close(every.gather(1, found.ids), found.scores)
    with pytest.raises(ConfigError, match=r"has 3 relations; .*, or choose one"):
        hoploom.best(rows, store, ("user", None), of="item", decoder=decoder)


def test_an_approximate_search_leaves_out_known_links_and_tells_its_recall() -> None:
    pytest.importorskip("faiss")
    generator, data = torch.Generator().manual_seed(4), HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 300, 9000
    edges = torch.stack([torch.arange(300).repeat_interleave(30), torch.randint(9000, (9000,), generator=generator)])
    data[RATES].edge_index = edges
    store = hoploom.from_pyg(data)
    rows = {name: torch.randn(data[name].num_nodes, 16, generator=generator) for name in ("user", "item")}
    found = hoploom.best(rows, store, "user", of="item", k=10, approximate=True)
    exact = hoploom.best(rows, store, "user", of="item", k=10)
    judged = torch.arange(0, 300, 2)  # at most 256 sources
    share = sum(len(set(found.ids[u].tolist()) & set(exact.ids[u].tolist())) for u in judged.tolist()) / 1500
    assert found.recall == pytest.approx(share)
    assert 0.3 < share < 1.0 == exact.recall
    assert not set(zip(*edges.tolist(), strict=True)) & {
        (user, item) for user, items in enumerate(found.ids.tolist()) for item in items
    }
    scores = (rows["user"][:, None] * rows["item"][found.ids]).sum(-1)
    assert torch.allclose(found.scores, scores, atol=1e-4)
    assert (found.scores.diff(dim=1) <= 0).all()
    some = ("user", torch.arange(4))  # for all of them, faiss takes a quarter of a minute
    few = hoploom.best(rows, store, some, of="item", k=9000, exclude=None, approximate=True)
    assert (few.ids[:, -1] == -1).all()  # it has not looked at all items
    assert (few.scores[:, -1] == -math.inf).all()
    with pytest.raises(ConfigError, match="RotatE is none; leave it out"):
        hoploom.best(rows, store, "user", of="item", decoder=RotatE(16), approximate=True)
