"""Batches that servers make: no bit tells, what is refused, and how little is held while they are made."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.batch_servers import makers_of, sent, without_graph
from support.batches import assert_same
from support.cases import NOT_SENT, Case, every_case, store_of
from support.graphs import library, random_graph, ring
from support.refusals import WAY_OUT
from support.shards import elsewhere_of, spread
from support.wires import over_the_wire
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import ConfigError, HoploomError, PeerError
from hoploom.serve import batch_messages as codec
from hoploom.serve.batch_messages import MAX_SEEDS, decode_batch, encode_batch, read_description
from hoploom.serve.batch_service import PICK_BYTES, BatchService
from hoploom.serve.memory_budget import BusyError
from hoploom.serve.wire import Message
from hoploom.store import Store


def _asked(**changes: Any) -> tuple[BatchService, dict[str, Any], list[torch.Tensor]]:
    """A server of the library, and a request for links that it answers, if nothing is changed."""
    store = hoploom.from_pyg(library(), weight_attr="weight")
    trainer, servers = without_graph(store)
    links = (("author", "writes", "paper"), torch.tensor([[0, 1], [2, 3]]))
    list(hoploom.LinkNeighborLoader(trainer, [3, 2], links, neg_sampling="binary", batch_size=2))
    header = servers.requests[0]
    for path, value in changes.items():
        holder: Any = header
        *outer, last = path.split(".")
        for name in outer:
            holder = holder[name]
        holder[last] = value
    return servers.makers[0], header, [torch.tensor([0, 1]), torch.tensor([2, 3])]


FIVE = [[1] * 5]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no description": ({"description": None}, "description"),
    "an unknown key": ({"description.more": 1}, "more"),
    "no relation": ({"description.owner": ["author", "eats", "wood"]}, "wood"),
    "an owner of numbers": ({"description.owner": [1, 2, 3]}, "owner"),
    "negatives of nodes": ({"description.owner": "paper"}, "negatives"),
    "too many hops": ({"description.sampling.fanouts": FIVE * 65}, "64"),
    "a relation too few": ({"description.sampling.fanouts": [[1, 2]]}, "5"),
    "a fanout of -2": ({"description.sampling.fanouts": [[1, 1, 1, 1, -2]]}, "-2"),
    "a fanout of 10^12": ({"description.sampling.fanouts": [[1, 1, 1, 1, 10**12]]}, "2147483648"),
    "a fanout of true": ({"description.sampling.fanouts": [[1, 1, 1, 1, True]]}, "fanout"),
    "layers of four types": ({"description.sampling.num_samples": [[1, 1, 1, 1]]}, "num_samples"),
    "65 layers": ({"description.sampling.num_samples": [[1, 1, 1]] * 65}, "64"),
    "nodes to draw below zero": ({"description.sampling.num_samples": [[1, -1, 1]]}, "num_samples of 'paper'"),
    "times that are not there": ({"description.sampling.temporal": "last"}, "time_attr"),
    "an unknown mode": ({"description.sampling.mode": "trees"}, "trees"),
    "an unknown aggregate": ({"description.aggregate": "median"}, "median"),
    "rows that are not there": ({"description.aggregate": "mean"}, "venue"),
    "degrees of many relations": ({"description.degrees": True}, "degrees"),
    "an unknown kind of negatives": ({"description.negatives.mode": "quadruplet"}, "quadruplet"),
    "no negatives at all": ({"description.negatives.amount": 0}, "amount"),
    "10^9 negatives": ({"description.negatives.amount": 10**9}, "amount"),
    "10^6 negatives for two": ({"description.negatives.amount": 2 * 10**6}, str(MAX_SEEDS)),
    "half a triplet": ({"description.negatives.mode": "triplet", "description.negatives.amount": 1.5}, "1.5"),
    "a weight by name": ({"description.negatives.src_weight": "hot"}, "src_weight"),
    "an unknown kind of candidates": ({"description.negatives.candidates": "odd"}, "candidates"),
    "pairs of joint candidates": ({"description.negatives.candidates": "joint"}, "for triplets"),
    "no list of candidates": ({"description.negatives.candidates": "listed"}, "and a tensor of them"),
    "strict negatives of no relation": (
        {"description.negatives.strict": True, "description.owner": ["author", "cites", "author"]},
        "which the graph does not have",
    ),
    "known links beside ends": ({"seeds": ["sources", "known"]}, "'destinations'"),
    "too few of all candidates": ({"description.negatives.candidates": "all"}, "9, all other nodes"),
    "seeds by no name": ({"seeds": None}, "seeds"),
    "seeds of another kind": ({"seeds": ["nodes", "destinations"]}, "sources"),
    "seeds named twice": ({"seeds": ["sources", "sources"]}, "once"),
    "more names than tensors": ({"seeds": ["sources", "destinations", "labels"]}, "tensors"),
    "a place of 2^60": ({"first": 1 << 60}, "first"),
    "no key": ({"key": None}, "key"),
    "a key of 65 bits": ({"key": 1 << 64}, "key"),
}


@pytest.mark.parametrize(("changes", "said"), BAD.values(), ids=BAD.keys())
def test_a_bad_request_is_refused(changes: dict[str, Any], said: str) -> None:
    makers, header, tensors = _asked(**changes)
    with pytest.raises(ConfigError) as caught:
        makers.answer(Message(header, tensors))
    assert said in str(caught.value)
    assert WAY_OUT.search(str(caught.value)), caught.value
    assert makers.budget.taken == 0


BAD_SEEDS: dict[str, tuple[list[torch.Tensor], str]] = {
    "an author too far": ([torch.tensor([0, 7]), torch.tensor([2, 3])], "7"),
    "a paper below zero": ([torch.tensor([0, 1]), torch.tensor([2, -3])], "-3"),
    "fractions": ([torch.tensor([0.5, 1]), torch.tensor([2, 3])], "float32"),
    "a table": ([torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 3])], "(2, 2)"),
    "a number": ([torch.tensor(1), torch.tensor([2, 3])], "()"),
    "one end more": ([torch.tensor([0, 1]), torch.tensor([2, 3, 4])], "(3,)"),
    "one tensor": ([torch.tensor([0, 1])], "1 tensors"),
    "too many": ([torch.zeros(MAX_SEEDS, dtype=torch.int64)] * 2, str(MAX_SEEDS)),
}


@pytest.mark.parametrize(("tensors", "said"), BAD_SEEDS.values(), ids=BAD_SEEDS.keys())
def test_bad_seeds_are_refused(tensors: list[torch.Tensor], said: str) -> None:
    makers, header, _ = _asked()
    with pytest.raises(ConfigError) as caught:
        makers.answer(Message(header, tensors))
    assert said in str(caught.value)


def test_listed_candidates_may_have_any_integer_dtype() -> None:
    makers, header, ends = _asked(**{"seeds": ["sources", "destinations", "candidates"]})
    header["description"]["negatives"] |= {"mode": "triplet", "candidates": "listed"}
    wide, narrow = (
        decode_batch(makers.answer(Message(header, [*ends, torch.tensor([[4], [5]], dtype=dtype)])))
        for dtype in (torch.int64, torch.int16)
    )
    assert_same(narrow, wide)


def test_weights_of_negatives_are_not_sent_and_the_error_says_what_else_to_do() -> None:
    trainer, _ = without_graph(hoploom.from_pyg(library()))
    weighted = NegativeSampling("triplet", 2, dst_weight=torch.ones(10))
    with pytest.raises(ConfigError, match=r"task\.candidates = 'uniform'"):
        hoploom.LinkNeighborLoader(trainer, [2], ("author", "writes", "paper"), neg_sampling=weighted)


def _request(store: Store, **options: Any) -> Callable[[BatchService], Message]:
    """A request for a batch of all nodes, to be put to any server."""
    trainer, servers = without_graph(store)
    given: dict[str, Any] = {"batch_size": store.schema.node_types[0].num_nodes, **options}
    next(iter(hoploom.NeighborLoader(trainer, given.pop("num_neighbors", [3]), **given)))
    nodes = torch.arange(store.schema.node_types[0].num_nodes)
    return lambda makers: makers.answer(Message(servers.requests[0], [nodes]))


def _size(answer: Message) -> int:
    return sum(tensor.nbytes for tensor in answer.tensors if isinstance(tensor, torch.Tensor))


def test_a_slow_consumer_holds_no_more_than_the_memory() -> None:
    store = hoploom.from_pyg(random_graph(600, 5000, seed=1))
    ask, roomy = _request(store), makers_of(store)
    size = _size(ask(roomy))
    assert roomy.budget.taken == size
    making = 40 * 600 * 3 + 600 * 60  # what making one takes for a while: its picks, and rows of 5 floats and so on
    makers, made = makers_of(store, memory=3 * size + making, threads=8, wait=0.02), []
    for _ in range(12):
        with suppress(BusyError):
            made.append(ask(makers))
    assert 1 <= len(made) < 12
    assert makers.budget.taken == len(made) * size <= makers.budget.size
    for answer in made:
        sent(answer)
        sent(answer)  # twice is once
    assert makers.budget.taken == 0
    assert "error" not in ask(makers).header


def test_a_batch_waits_for_room_and_is_made_when_another_is_sent() -> None:
    store = hoploom.from_pyg(random_graph(600, 5000, seed=1))
    ask = _request(store)
    first = ask(makers := makers_of(store, memory=1 << 20, wait=30.0))
    makers.budget.take(makers.budget.size - makers.budget.taken)
    found: list[Message] = []
    waiting = threading.Thread(target=lambda: found.append(ask(makers)))
    waiting.start()
    sent(first)
    makers.budget.give(makers.budget.taken)
    waiting.join(30)
    assert [_size(answer) for answer in found] == [_size(first)]


def test_no_more_batches_are_made_at_once_than_there_are_threads() -> None:
    store = hoploom.from_pyg(random_graph(60, 500, seed=1))
    ask, makers = _request(store), makers_of(store, threads=1, wait=0.02)
    makers._threads.acquire()
    with pytest.raises(BusyError, match="all threads are making batches"):
        ask(makers)
    makers._threads.release()
    assert "error" not in ask(makers).header


@pytest.mark.parametrize("options", [{"num_neighbors": [-1, -1]}, {"num_neighbors": [10**6], "replace": True}])
def test_a_batch_that_can_never_fit_is_refused_before_it_is_made(options: dict[str, Any]) -> None:
    store = hoploom.from_pyg(random_graph(600, 50_000, seed=1))
    ask = _request(store, num_neighbors=[1])
    trainer, servers = without_graph(store, makers_of(store, memory=50_000 * PICK_BYTES // 2))
    loader = hoploom.NeighborLoader(trainer, options.pop("num_neighbors"), batch_size=600, **options)
    with pytest.raises(ConfigError, match="--memory"):
        next(iter(loader))
    assert servers.makers[0].budget.taken == 0
    assert "error" not in ask(servers.makers[0]).header


def test_a_batch_that_fails_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = hoploom.from_pyg(random_graph(60, 500, seed=1))
    ask, makers = _request(store), makers_of(store)

    def fail(*_: Any, **__: Any) -> Any:
        raise HoploomError("on purpose")

    monkeypatch.setattr(type(makers._metered._features), "gather", fail)
    with pytest.raises(HoploomError, match="on purpose"):
        ask(makers)
    assert makers.budget.taken == 0
    assert makers._threads.acquire(timeout=0)


@every_case
@pytest.mark.parametrize("narrowed", [1, 1 << 12])
def test_a_batch_arrives_as_it_was_sent(case: Case, narrowed: int) -> None:
    for batch in case.make(case.store):
        arrived = decode_batch(over_the_wire(encode_batch(batch, narrowed)))
        assert type(arrived) is type(batch)
        assert_same(arrived, batch)


@pytest.mark.parametrize("extreme", [0, 2**31 - 1, 2**31, -1, 2**63 - 1, -(2**63)])
def test_integers_arrive_whole_whatever_they_are(extreme: int) -> None:
    values = torch.arange(2 * codec.NARROW_FROM).view(2, -1)
    values[1, 7] = extreme
    data = HeteroData()
    data["paper"].y = values
    message = encode_batch(data)
    arrived = decode_batch(over_the_wire(message))["paper"].y
    assert arrived.dtype == torch.int64
    assert torch.equal(arrived, values)
    assert message.tensors[0].dtype == (torch.int32 if 0 <= extreme < 2**31 else torch.int64)  # type: ignore[union-attr]


def test_a_batch_that_is_none_is_the_peers_fault() -> None:
    good = encode_batch(next(iter(hoploom.NeighborLoader(ring(8), [2], batch_size=4))))
    for header, tensors in (
        ({}, good.tensors),
        (good.header | {"fields": [[None, [["x", {"tensor": 99, "wide": False}]]]]}, good.tensors),
        (good.header, ()),
    ):
        with pytest.raises(PeerError, match="same Hoploom"):
            decode_batch(Message(header, tensors))


def test_a_trainer_without_graph_asks_for_batches_alone_and_their_memory_is_given_back() -> None:
    store = store_of(False, {})
    trainer, servers = without_graph(store, *(makers_of(kind) for kind in (store, spread(store, 3, {0}))))
    loader = hoploom.NeighborLoader(trainer, [3, 2], batch_size=7)
    asked = sum(shard.samples + len(shard.gathers) for shard in elsewhere_of(trainer))
    assert len(list(loader)) == len(loader) == len(servers.answers)
    assert set(servers.answers) == {"ok"}
    assert asked == sum(shard.samples + len(shard.gathers) for shard in elsewhere_of(trainer))
    assert all(makers.budget.taken == 0 for makers in servers.makers)
    assert_same(hoploom.NeighborLoader(store, [3, 2])([5, 3]), hoploom.NeighborLoader(trainer, [3, 2])([5, 3]))


def test_two_requests_for_each_server_are_under_way() -> None:
    store = hoploom.from_pyg(ring(40))
    trainer, _ = without_graph(store, *(makers_of(store) for _ in range(3)))
    assert hoploom.NeighborLoader(trainer, [2]).num_workers == 6
    assert hoploom.NeighborLoader(trainer, [2], num_workers=9).num_workers == 9
    assert hoploom.NeighborLoader(store, [2]).num_workers == 0


@every_case
def test_a_description_is_read_as_it_was_written(case: Case) -> None:
    trainer, servers = without_graph(case.store)
    if case.name in NOT_SENT:
        pytest.skip("it is refused")
    loader = case.make(trainer)
    next(iter(loader))
    asking: Any = loader._producer
    assert read_description(servers.requests[0]["description"], case.store.schema) == asking.description
