"""Edges that a loader has listed by destination are not sorted again on a device; edges that anyone has touched are."""

import copy
import gc
import io
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.batch_servers import without_graph
from support.cases import HETEROGENEOUS, HOMOGENEOUS, NOT_SENT, store_of
from support.graphs import random_graph
from support.models import books, heterogeneous, homogeneous
from support.waiting import NoWaiting
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import HeteroData

import hoploom
from hoploom import NeighborLoader, ops
from hoploom.batch import Block
from hoploom.load.assemble import Batch, moved_to, tensors_in
from hoploom.nn.layers import by_relation, by_type, views_of
from hoploom.ops import InEdges
from hoploom.ops import edges as edges_module
from hoploom.ops import edges as grouped
from hoploom.ops.edges import noted
from hoploom.schema import HOMOGENEOUS_RELATION, RelationName

pytestmark = pytest.mark.usefixtures("one_thread")
FANOUTS = [3, 2]


class Sorts(TorchDispatchMode):
    """How many entries each sort has had."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) == "aten.sort":
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))

    def taken(self) -> list[int]:
        """Those since it was asked last."""
        sizes, self.sizes = self.sizes, []
        return sizes


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on nothing is known of any edges."""
    return lambda: monkeypatch.setattr(edges_module, "noted", lambda edge_index: None)


def first_batch(data: Any, device: torch.device, **options: Any) -> Batch:
    store = hoploom.place(hoploom.from_pyg(data), topology=device, features=device)
    options = {"input_nodes": torch.arange(4), "batch_size": 4, **options}
    return next(iter(NeighborLoader(store, FANOUTS, **options)))


def numbers(device: torch.device, **options: Any) -> Batch:
    data = random_graph(30, 120, 1)
    data.x = torch.randn(30, 8)
    return first_batch(data, device, **options)


def prints() -> HeteroData:
    """Papers that cite papers and that venues print, and in which venue each is."""
    data = books()
    for name in ("writes", "reviews"):
        del data["author", name, "paper"]
    del data["author"]
    return data


@pytest.fixture(scope="module")
def batches(device: torch.device) -> dict[tuple[bool, str], Batch]:
    """Of a homogeneous and a heterogeneous graph, in every mode; not to be touched."""
    found = {(False, "subgraph"): numbers(device), (False, "blocks"): numbers(device, mode="blocks", degrees=True)}
    for mode in ("subgraph", "blocks"):
        found[True, mode] = first_batch(prints(), device, input_nodes="paper", batch_size=2, mode=mode)
    return found


def by_destination(index: Tensor, num_destinations: int) -> tuple[list[int], list[int]]:
    """Where each list begins, and the sources list by list, in plain Python."""
    lists: list[list[int]] = [[] for _ in range(num_destinations)]
    for source, destination in index.t().tolist():
        lists[destination].append(source)
    return [0, *accumulate(map(len, lists))], [source for own in lists for source in own]


def edges_of(batch: Batch) -> list[Tensor]:
    """All tensors of edges in a batch."""
    found = list(by_relation(batch, "edge_index").values())
    for block in batch.blocks if "blocks" in batch else ():
        found += tensors_in(block.edge_index)
    return found


BY_KIND = HOMOGENEOUS, HETEROGENEOUS
MERGED = ("bidirectional", "induced")  # modes
SAMPLED = [(False, "uniform"), (False, "replace"), (False, "blocks"), (False, "disjoint")]
SAMPLED += [(True, "links")]
PLACED = [("all", *case) for case in SAMPLED] + [("features", False, "uniform"), ("features", True, "blocks")]


@pytest.mark.parametrize(("placed", "is_hetero", "name"), PLACED)
def test_what_is_noted_of_a_batch_is_true(placed: str, is_hetero: bool, name: str, device: torch.device) -> None:
    make, attrs = (HETEROGENEOUS if is_hetero else HOMOGENEOUS)[name]
    store = hoploom.place(store_of(is_hetero, attrs), topology=device if placed == "all" else None, features=device)
    batch = next(iter(make(store)))
    for edge_index in edges_of(batch):
        known = noted(edge_index)
        assert known is not None
        destinations = edge_index[1].tolist()
        assert destinations == sorted(destinations)
        assert known == {count: sum(end < count for end in destinations) for count in known}
    assert "blocks" in batch or any(map(noted, edges_of(batch)))


@pytest.mark.parametrize("kind", MERGED)
def test_edges_that_were_merged_are_sorted(kind: str, device: torch.device) -> None:
    assert noted(numbers(device, subgraph_type=kind).edge_index) is None


def test_nothing_is_noted_of_a_batch_of_the_core() -> None:
    before = len(grouped._NOTES)
    batch = next(iter(NeighborLoader(random_graph(30, 120, 1), FANOUTS, batch_size=4)))
    assert noted(batch.edge_index) is None
    assert len(grouped._NOTES) == before


@pytest.mark.parametrize(("is_hetero", "name"), [(kind, name) for kind, of in enumerate(BY_KIND) for name in of])
def test_batches_of_the_host_take_their_notes_to_the_device(
    is_hetero: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is noted is true in every case. `meta` stands for the device: tensors there have no values."""
    make, attrs = BY_KIND[is_hetero][name]
    loader = make(store_of(is_hetero, attrs))
    monkeypatch.setattr(ops, "empty_pinned", ops.empty)
    maker = replace(loader.maker, assembler=replace(loader.maker.assembler, pinned=True))
    batch = maker.make(loader.rehearsal().step(0))
    found = edges_of(batch)
    destinations, known = [edge_index[1].tolist() for edge_index in found], [noted(edge_index) for edge_index in found]
    moved = moved_to(torch.device("meta"), batch)
    for ends, note, edge_index in zip(destinations, known, edges_of(moved), strict=True):
        assert edge_index.is_meta
        assert noted(edge_index) == note
        assert note is None or ends == sorted(ends)
        assert note is None or note == {count: sum(end < count for end in ends) for count in note}
    assert any(kind in name for kind in (*MERGED, "HGT")) == all(note is None for note in known)
    if name not in NOT_SENT:
        remote, _ = without_graph(store_of(is_hetero, attrs))
        served: Any = make(remote)._producer
        sent = replace(served, pinned=True).make(loader.rehearsal().step(0))
        assert [noted(edge_index) for edge_index in edges_of(sent)] == known


def trained(model: nn.Module, batch: Batch) -> tuple[list[Tensor], list[int], list[int]]:
    """What comes out and the parameters' gradients; and the sorts of the forward and of the backward pass."""
    model.zero_grad()
    with Sorts() as sorts:
        out, forward = model(batch), sorts.taken()
        rows = torch.cat([value.flatten() for value in (out.values() if isinstance(out, dict) else [out])])
        (rows * torch.arange(rows.numel(), device=rows.device).cos()).sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [value.detach().clone() for value in (rows, *grads)], forward, sorts.taken()


def heads_of(batch: Batch, layer: int) -> dict[RelationName, tuple[int, int]]:
    """A layer's own edges and destinations; layer 0 is the last."""
    if "blocks" in batch:
        block: Block = batch.blocks[-1 - layer]
        counts = block.num_destinations
        ends = block.edge_index if isinstance(block.edge_index, Mapping) else {HOMOGENEOUS_RELATION: block.edge_index}
        return {key: (one.shape[1], counts if isinstance(counts, int) else counts[key[2]]) for key, one in ends.items()}
    nodes, edges = by_type(batch, "num_sampled_nodes"), by_relation(batch, "num_sampled_edges")
    return {key: (sum(own[: layer + 1]), sum(nodes[key[2]][: layer + 1])) for key, own in edges.items()}


# What a kind's backward pass sorts: the last layer or both (inputs have no gradient), with loops or without.
KINDS = {"sage": (1, 0), "gin": (1, 0), "gcn": (2, 1), "gat": (2, 1), "rgcn": (1, 0), "rgat": (2, 0)}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(("subgraph", kind) for kind in KINDS),
        ("blocks", "sage"),
        *(pytest.param("blocks", kind, marks=pytest.mark.slow) for kind in KINDS if kind != "sage"),
    ],
)
def test_a_model_sorts_the_edges_of_each_layer_once_and_backward_alone(
    kind: str,
    mode: str,
    batches: dict[tuple[bool, str], Batch],
    device: torch.device,
    by_kernels: Callable[[], None],
    forgetful: Callable[[], None],
) -> None:
    is_hetero = kind.startswith("r")
    batch = batches[is_hetero, mode]
    model = (heterogeneous(kind, prints()) if is_hetero else homogeneous(kind)).to(device)
    by_kernels()
    found, forward, backward = trained(model, batch)
    num_layers, with_loops = KINDS[kind]
    own = [
        edges + with_loops * nodes
        for layer in range(num_layers)
        for key, (edges, nodes) in heads_of(batch, layer).items()
        if key in model.stage(1 - layer).relations
    ]
    assert forward == []
    assert Counter(size for size in backward if size) == Counter(size for size in own if size)
    forgetful()
    expected, forward, _ = trained(model, batch)
    assert any(forward)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_nobody_waits_for_the_device(one_batch: Batch, by_kernels: Callable[[], None]) -> None:
    by_kernels()
    with NoWaiting():  # type: ignore[no-untyped-call]
        for view in views_of(one_batch, 2):
            for edges in view.edges.values():
                assert edges.transposed.indptr.numel() == edges.num_sources + 1


def test_edges_may_change_between_forward_and_backward(
    one_batch: Batch, device: torch.device, by_kernels: Callable[[], None]
) -> None:
    batch, model = fresh(one_batch), homogeneous("sage").to(device)
    by_kernels()
    expected, _, _ = trained(model, batch)
    model.zero_grad()
    out = model(batch)
    batch.edge_index.fill_(0)
    (out.flatten() * torch.arange(out.numel(), device=device).cos()).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected[1:], strict=True))


def _replaced(change: Callable[[Tensor], Tensor]) -> Callable[[Batch], Batch]:
    def replace(batch: Batch) -> Batch:
        batch.edge_index = change(batch.edge_index)
        return batch

    return replace


def _in_place(change: Callable[[Tensor], Any]) -> Callable[[Batch], Batch]:
    def write(batch: Batch) -> Batch:
        change(batch.edge_index)
        return batch

    return write


def _pickled(batch: Batch) -> Batch:
    file = io.BytesIO()
    torch.save(batch.edge_index, file)
    batch.edge_index = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return batch


def _without_grad(index: Tensor) -> None:
    with torch.inference_mode():
        index[:, 0] = 1


def _moved(index: Tensor) -> None:
    index.data = index.flip(1)


def _cut(index: Tensor) -> None:
    index.data = index[:, 2:].clone()


TOUCHES: dict[str, Callable[[Batch], Batch]] = {
    "permuted": _replaced(lambda index: index.flip(1)),
    "dropped": _replaced(lambda index: index[:, ::2]),
    "a mask": _replaced(lambda index: index[:, index[0] % 2 == 0]),
    "both directions": _replaced(lambda index: torch.cat([index, index.flip(0)], 1)),
    "another type": _replaced(lambda index: index.to(torch.int32)),
    "a view": _replaced(lambda index: index[:, 1:]),
    "a copy": _replaced(Tensor.clone),
    "a deep copy": _replaced(copy.deepcopy),
    "a file": _pickled,
    "Data.clone": lambda batch: batch.clone(),
    "permuted in place": _in_place(lambda index: index.copy_(index.flip(1))),
    "one edge": _in_place(lambda index: index[1].__setitem__(0, 5)),
    "through a view": _in_place(lambda index: index.view(-1)[-3:].zero_()),
    "detached": _in_place(lambda index: index.detach().zero_()),
    "as out=": _in_place(lambda index: torch.add(index.flip(1), 0, out=index)),
    "in inference mode": _in_place(_without_grad),
    "other data": _in_place(_moved),
    "fewer data": _in_place(_cut),
}


@pytest.fixture
def one_batch(batches: dict[tuple[bool, str], Batch]) -> Batch:
    """Not to be touched itself."""
    return batches[False, "subgraph"]


def fresh(batch: Batch) -> Batch:
    """A copy of which the same is known."""
    known = noted(batch.edge_index)
    assert known is not None
    out = batch.clone()
    grouped.note_grouped(out.edge_index, known)
    return out


def lists_of(edges: InEdges) -> tuple[list[int], list[int]]:
    return edges.indptr.tolist(), edges.sources[: int(edges.indptr[-1])].tolist()


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_edges_that_were_touched_are_sorted(
    touch: Callable[[Batch], Batch], one_batch: Batch, by_kernels: Callable[[], None]
) -> None:
    batch = touch(fresh(one_batch))
    assert noted(batch.edge_index) is None
    num_nodes = one_batch.n_id.numel()
    by_kernels()
    with Sorts() as sorts:
        edges = InEdges.of(batch.edge_index, num_nodes, num_nodes)
    assert sorts.sizes == [batch.edge_index.shape[1]]
    assert lists_of(edges) == by_destination(batch.edge_index, num_nodes)
    few = sum(one_batch.num_sampled_nodes[:1])
    assert lists_of(edges.head(few, num_nodes - 1)) == by_destination(
        batch.edge_index[:, batch.edge_index[1] < few], few
    )


SAME: dict[str, Callable[[Batch], Any]] = {
    "copy.copy": copy.copy,
    "to where it is": lambda batch: batch.to(batch.edge_index.device),
    "other fields": lambda batch: batch.update({"x": batch.x + 1}),
    "other counts": lambda batch: batch.update({"num_sampled_nodes": [3, 9, 10], "num_sampled_edges": [1, 2]}),
}


@pytest.mark.parametrize("keep", SAME.values(), ids=SAME.keys())
def test_untouched_ones_are_not(keep: Callable[[Batch], Any], one_batch: Batch, by_kernels: Callable[[], None]) -> None:
    batch = fresh(one_batch)
    batch = keep(batch) or batch
    by_kernels()
    num_nodes = batch.n_id.numel()
    with Sorts() as sorts:
        edges = InEdges.of(batch.edge_index, num_nodes, num_nodes)
        for count in range(num_nodes + 1):  # whatever a batch says of its counts
            head = edges.head(count, num_nodes)
            assert lists_of(head) == by_destination(batch.edge_index[:, batch.edge_index[1] < count], count)
    assert sorts.sizes == []
    num_seeds, num_picks = one_batch.num_sampled_nodes[0], one_batch.num_sampled_edges[0]
    assert edges.head(num_seeds, num_nodes).num_edges == num_picks


def test_a_batch_made_in_inference_mode_is_sorted(device: torch.device, by_kernels: Callable[[], None]) -> None:
    with torch.inference_mode():
        batch = numbers(device)
        assert batch.edge_index.is_inference()
        by_kernels()
        edges = InEdges.of(batch.edge_index, batch.n_id.numel(), batch.n_id.numel())
    assert lists_of(edges) == by_destination(batch.edge_index, batch.n_id.numel())


def test_what_is_written_past_torch_is_an_error(by_kernels: Callable[[], None]) -> None:
    """On the CPU, as the same stops a GPU for good."""

    def written(destinations: list[int]) -> Tensor:
        edge_index = torch.tensor([[1, 2, 0, 1], [0, 0, 1, 2]])
        grouped.note_grouped(edge_index, {1: 2})
        edge_index.data[1] = torch.tensor(destinations)
        assert noted(edge_index) == {1: 2}
        return edge_index

    by_kernels()
    with pytest.raises(RuntimeError, match=r"through \.data"):
        InEdges.of(written([2, 1, 0, 0]), 3, 3)
    edges = InEdges.of(written([0, 0, 0, 1]), 3, 3)  # they ascend
    with pytest.raises(RuntimeError, match=r"through \.data"):
        edges.head(1, 3)


def test_what_is_noted_goes_with_the_edges(one_batch: Batch) -> None:
    gc.collect()
    before, batch = len(grouped._NOTES), fresh(one_batch)
    assert len(grouped._NOTES) == before + 1
    assert not list(tensors_in(list(grouped._NOTES.values())))  # which would keep memory
    del batch
    assert len(grouped._NOTES) == before
