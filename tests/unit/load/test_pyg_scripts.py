"""What PyG scripts pass and do: every row of the table in docs/coming-from-pyg.md."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.loader as pyg
from support.batches import Replayed, assert_same
from support.graphs import library, ring
from support.refusals import assert_refused
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, WeightedRandomSampler
from torch_geometric.data import Data, HeteroData

from hoploom import LinkNeighborLoader, NeighborLoader

PAGE = Path(__file__).parents[3] / "docs" / "coming-from-pyg.md"
PAIRS = torch.tensor([[0, 3], [4, 4]])


def nodes(**options: Any) -> NeighborLoader:
    return NeighborLoader(ring(12), [2], **{"batch_size": 6, **options})


def refused(*said: str, **options: Any) -> None:
    assert_refused(lambda: nodes(**options), *said)


def samplers() -> None:
    for sampler in (pyg.ImbalancedSampler(torch.arange(12) // 9), WeightedRandomSampler(torch.ones(12), 9), [0, 0]):
        assert sum(batch.batch_size for batch in nodes(sampler=sampler)) == len(sampler)


def batch_samplers() -> None:
    refused("batch_sampler=", "sampler=", "batch_size=", batch_sampler=BatchSampler(range(12), 4, False))
    refused("whole graphs", batch_sampler=pyg.DynamicBatchSampler([Data(num_nodes=1)], 9))


def no_layers() -> None:
    assert NeighborLoader(ring(12), [], batch_size=6)([3, 1]).n_id.tolist() == [3, 1]


def new_relations() -> None:
    for key in (("author", "likes", "paper"), ("author", "rev_writes", "paper"), ("author", "to", "paper")):
        (batch,) = LinkNeighborLoader(library(), [2], (key, PAIRS), batch_size=2)
        assert batch[key].edge_label_index.shape == (2, 2)


def numbered_triplets() -> None:
    numbers = torch.tensor([5, 7])
    loader = LinkNeighborLoader(ring(12), [2], PAIRS, edge_label=numbers, neg_sampling="triplet", batch_size=2)
    assert torch.equal(next(iter(loader)).edge_label, numbers)


def near_relations() -> None:
    for key in (("author", "write", "paper"), ("author", "Writes", "paper"), ("paper", "writes", "author")):
        said = (f"no relation {key}", "did you mean ('author', 'writes', 'paper')?")
        assert_refused(lambda key=key: LinkNeighborLoader(library(), [2], (key, PAIRS)), *said)
    data = library()
    data["author", "write", "paper"].edge_index = torch.empty(2, 0, dtype=torch.long)
    (batch,) = LinkNeighborLoader(data, [2], (("author", "write", "paper"), PAIRS), batch_size=2)
    assert batch["author", "write", "paper"].edge_label_index.shape == (2, 2)


def no_edges() -> None:
    (batch,) = LinkNeighborLoader(Data(num_nodes=9), [2], PAIRS, batch_size=2)
    assert batch.n_id.tolist() == [0, 3, 4]


def no_seeds() -> None:
    refused("empty", input_nodes=torch.zeros(12, dtype=torch.bool))
    assert_refused(lambda: LinkNeighborLoader(ring(12), [2], PAIRS[:, :0]), "empty")


def wrapped() -> None:
    cached = pyg.CachedLoader(nodes())
    assert [batch.n_id.tolist() for batch in cached] == [batch.n_id.tolist() for batch in cached]
    assert [batch.batch_size for batch in pyg.PrefetchLoader(nodes(), torch.device("cpu"))] == [6, 6]


def contexts() -> None:
    loader = nodes(num_workers=2)
    with loader.enable_cpu_affinity([0, 1]), loader.enable_multithreading(2):
        assert len(list(loader)) == 2


def without_meaning() -> None:
    called: list[int] = []
    given = {"persistent_workers": True, "filter_per_worker": True, "is_sorted": True, "in_order": True}
    assert (len(list(nodes(**given, num_workers=2, worker_init_fn=called.append))), called) == (2, [])
    refused("worker_init_fn is of type int", worker_init_fn=1)


def generators() -> None:
    def order(**options: Any) -> list[list[int]]:
        return [batch.n_id.tolist() for batch in nodes(shuffle=True, **options)]

    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    assert order(generator=generator) == order(seed=7) != order()
    assert len(order(generator=torch.Generator().manual_seed(-1))) == 2
    refused("generator=", "seed=0", "leave one of them out", generator=generator, seed=0)
    refused("torch.Generator", generator=7)


def added_fields() -> None:
    """As PyG's examples add global ids for inference; a field of the graph as a whole is left."""
    loader = nodes()
    del loader.data.x, loader.data.y
    loader.data.node_id, loader.data.scale = torch.arange(12) * 10, torch.ones(3)
    assert all(torch.equal(batch.node_id, batch.n_id * 10) for batch in loader)
    data = library()
    loader = NeighborLoader(data, [2], "paper", batch_size=4)
    loader.data["paper"].age = torch.arange(data["paper"].num_nodes) + 20
    assert all(torch.equal(batch["paper"].age, batch["paper"].n_id + 20) for batch in loader)
    loader.data["paper"].age = torch.arange(3)
    assert_refused(lambda: next(iter(loader)), "age", "make the loader again")
    del loader.data["paper"].age
    assert all("age" not in batch["paper"] for batch in loader)


def divided_seeds() -> None:
    """The rest of this row is in test_loaders_of_ranks.py, with two processes."""
    sampler = DistributedSampler(range(12), num_replicas=2, rank=1, shuffle=False)
    batches = list(nodes(sampler=sampler, rank=1, world_size=2, batch_size=4))
    assert [batch.input_id.tolist() for batch in batches] == [[1, 3, 5], [7, 9, 11]]


def torch_randomness() -> None:
    torch.manual_seed(1)
    first = [batch.n_id.tolist() for batch in nodes(shuffle=True)]
    torch.manual_seed(2)
    assert [batch.n_id.tolist() for batch in nodes(shuffle=True)] == first


def other_classes() -> None:
    refused("collate_fn=", "transform=", collate_fn=list)
    refused("transform=", transform_sampler_output=print)
    refused("transform=", custom_cls=HeteroData)


def attributes() -> None:
    data = ring(12)
    loader = NeighborLoader(data, [2], input_nodes=[3, 4, 5], batch_size=2, drop_last=True)
    assert (loader.dataset, loader.data, len(loader)) == (range(3), data, 1)
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (2, 0, True)
    assert not isinstance(loader, DataLoader)  # which Lightning and Accelerate take apart
    assert loader(torch.tensor([2, 0])).input_id.tolist() == [2, 0]
    for name in ("rank", "world_size", "batch_size", "drop_last", "dataset"):  # their batches are drawn already
        with pytest.raises(AttributeError, match=f"{name} of a loader cannot be changed; make another loader"):
            setattr(loader, name, 5)
    with pytest.raises(TypeError, match=r"name the arguments after seeds and times, e\.g\. replace=True"):
        NeighborLoader(data, [2], None, None, True)


def changes_in_place() -> None:
    data = ring(12)
    loader = NeighborLoader(data, [2], input_nodes=[3], batch_size=1)
    data.x[3] = -1.0
    assert loader([0]).x[0].tolist() == [-1.0] * 4
    data.x = torch.ones(4, 12).t()  # of which a loader has to take a copy
    loader = NeighborLoader(data, [2], input_nodes=[3], batch_size=1)
    data.x[3] = -2.0
    assert_refused(lambda: loader([0]), "x of the data was replaced")


def new_fields() -> None:
    said = ("of the data was replaced after the loader was made", "make the loader again")
    ways: list[Callable[[NeighborLoader], Any]] = [list, lambda one: one.steps(range(1)), lambda one: one([0])]
    for way in ways:
        for name in ("x", "y", "edge_attr", "train_mask", "scale"):
            data = ring(12)
            data.scale = torch.ones(1)
            loader = NeighborLoader(data, [2], batch_size=12)
            data[name] = data[name].clone()
            way(loader)
            data[name] = torch.full_like(data[name], 3)
            assert_refused(lambda way=way, loader=loader: way(loader), name, *said)
    data = ring(12)
    data.y = torch.full((12,), torch.nan)  # labels that are missing
    loader = NeighborLoader(data, [2], batch_size=12)
    data.y = data.y.clone()
    assert len(list(loader)) == 1
    data.added = torch.ones(12)
    assert len(list(loader)) == 1
    data.added = torch.ones(7)
    for _ in range(2):
        assert_refused(lambda loader=loader: list(loader), "added", *said)
    for rows in (torch.ones(7, 4), torch.ones(12, 1).to_sparse()):
        data = ring(12)
        loader = NeighborLoader(data, [2], batch_size=12)
        data.x = rows
        assert_refused(lambda loader=loader: list(loader), "x", *said)
    papers = library()
    of_papers = NeighborLoader(papers, [2], "paper", batch_size=10)
    papers["author"].x = papers["author"].x.double()
    assert_refused(lambda: list(of_papers), "x", *said)


def new_edges() -> None:
    options: list[dict[str, Any]] = [{}, {"weight_attr": "edge_attr"}, {"time_attr": "y"}]
    for name, given in zip(("edge_index", "edge_attr", "y"), options, strict=True):
        changed = ring(12)
        changed.edge_attr = changed.edge_attr.view(24, -1)[:, 0].float()
        loader = NeighborLoader(changed, [2], batch_size=12, **given)
        changed[name] = changed[name].clone()
        assert len(list(loader)) == 1
        changed[name] = changed[name] + 1
        assert_refused(lambda loader=loader: list(loader), f"{name} of the data was replaced", "make the loader again")


def moved_fields() -> None:
    data = ring(12)
    loader = NeighborLoader(data, [2], input_nodes=[3], batch_size=1)
    loader.data.to("meta")
    loader.data.n_id = torch.arange(12)
    assert next(iter(loader)).x[0].tolist() == [3.0] * 4


def deleted_fields() -> None:
    for data, seeds in ((ring(12), None), (library(), "paper")):
        of_nodes, of_edges = (data, data) if seeds is None else (data["paper"], data["author", "writes", "paper"])
        of_nodes.num_nodes = len(of_nodes.y)
        loader = NeighborLoader(data, [2], seeds, batch_size=12)
        del of_nodes.x, of_edges.edge_attr
        (batch,) = loader
        assert_same(batch, next(iter(pyg.NodeLoader(data, Replayed([batch]), seeds, batch_size=12))))


def pairs() -> None:
    assert_refused(lambda: NeighborLoader((ring(12), ring(12)), [2]), "tuple", "HeteroData")  # type: ignore[arg-type]


ROWS: dict[str, Callable[[], None]] = {  # works as in PyG
    "`sampler=`: an `ImbalancedSampler`, a `WeightedRandomSampler`, any sampler or list with a length": samplers,
    "the loader, to `CachedLoader` or `PrefetchLoader`": wrapped,
    "`num_neighbors=[]`": no_layers,
    "`generator=`": generators,
    "`edge_label_index` of a relation that the graph does not have": new_relations,
    '`edge_label` with `neg_sampling="triplet"`, which PyG refuses': numbered_triplets,
    "a graph without edges": no_edges,
    "`loader.dataset`, `loader.data`, `len(loader)`, `loader(ids)`, `loader.batch_size`": attributes,
    "`data.x[ids] = rows` after you created the loader": changes_in_place,
    "`del loader.data.x` after you created the loader": deleted_fields,
    "`loader.data.node_id = rows` after you created the loader": added_fields,
    "`sampler=DistributedSampler(...)`, or `split(n // world_size)[rank]` of the seeds": divided_seeds,
}
ROWS |= {  # has no effect
    "`with loader.enable_cpu_affinity(...)`, `enable_multithreading(...)`": contexts,
    "`persistent_workers`, `filter_per_worker`, `is_sorted`, `in_order=True`": without_meaning,
    "`worker_init_fn`": without_meaning,
    "`torch.manual_seed` before the loop": torch_randomness,
    "`data.to(device)` after you created the loader": moved_fields,
    "writing into `data.edge_index`, or into the field of `weight_attr` or `time_attr`": new_edges,
}
ROWS |= {  # raises
    "`shuffle=True` with `sampler=`": lambda: refused("mutually exclusive", sampler=[0], shuffle=True),
    "`batch_sampler=`": batch_samplers,
    "a `DynamicBatchSampler`": batch_samplers,
    "`collate_fn=`, `transform_sampler_output`, `custom_cls`": other_classes,
    "`multiprocessing_context`": lambda: refused("threads", multiprocessing_context="fork"),
    "`generator=` with `seed=`": generators,
    "`edge_label_index` of a relation whose name is nearly one of the graph's": near_relations,
    "`in_order=False`": lambda: refused("leave it out: batches come in order", in_order=False),
    "`pin_memory_device`": lambda: refused("device=", pin_memory_device="cuda"),
    "a `(feature_store, graph_store)` pair": pairs,
    "no seeds: an empty mask, list or `edge_label_index` (in PyG, the loop does nothing)": no_seeds,
    "`neighbor_sampler=`": lambda: refused("give its options to the loader", neighbor_sampler=object()),
    "`data.x = rows` after you created the loader": new_fields,
    "`data.edge_index = ...`, or a new tensor for `weight_attr` or `time_attr`, after you created the loader": (
        new_edges
    ),
}


def test_what_the_page_says_in_sentences_holds() -> None:
    data = ring(12)
    data.adj_t = torch.eye(12).to_sparse_csr()
    assert_refused(lambda: NeighborLoader(data, [2]), "edge_index")


@pytest.mark.parametrize("row", ROWS)
def test_what_a_script_of_pyg_passes_does_what_the_page_says(row: str) -> None:
    ROWS[row]()


def test_the_page_lists_these_rows_and_no_other() -> None:
    section = PAGE.read_text().split("## What your script passes")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)
    assert sorted(row for row in listed if row != "Your script passes") == sorted(ROWS)
