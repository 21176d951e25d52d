"""Nodes to parts: few edges cut, every part balanced, the same for any threads; visits expected; memory kept."""

import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.sparse_stores import mapped_kilobytes, save_sparse
from support.watched import Watched, watched
from torch import Tensor

import hoploom
from hoploom import ConfigError, StoreError
from hoploom.load.presample import BATCH_SIZE, Presampling, count_visits
from hoploom.ops import Frontier
from hoploom.ops.assign_parts import FIXED_BYTES, NODE_BYTES, PartitionRule, assign_parts, count_cut
from hoploom.partition import METHODS, assign, edge_cut
from hoploom.partition.assign import topology_of
from hoploom.partition.bounded_store import BoundedStore, pieces
from hoploom.partition.on_spark import ONE, expected_visits, visit_classes
from hoploom.partition.partition import partition
from hoploom.partition.report import report
from hoploom.partition.store_files import StoreFiles
from hoploom.sample.hops import resolve_fanouts
from hoploom.schema import DTYPES, HOMOGENEOUS_RELATION, Field, NodeType, Relation, Schema
from hoploom.store import Draw, Store, open_store
from hoploom.store import format as layout
from hoploom.store.storage_path import StoragePath

pytestmark = pytest.mark.usefixtures("no_sync")


PLANTED_NODES, COMMUNITIES, DEGREE = 4000, 8, 16


def planted(num_nodes: int = PLANTED_NODES, homophily: float = 0.8, seed: int = 0) -> Store:
    """Node v belongs to community v % COMMUNITIES; a share of its DEGREE in-edges stays inside, others go anywhere."""
    generator = torch.Generator().manual_seed(seed)
    destinations = torch.arange(num_nodes).repeat_interleave(DEGREE)
    inside = torch.rand(destinations.numel(), generator=generator) < homophily
    anywhere = torch.randint(num_nodes, destinations.shape, generator=generator)
    at_home = anywhere // COMMUNITIES * COMMUNITIES + destinations % COMMUNITIES
    return of_edges(num_nodes, torch.where(inside, at_home % num_nodes, anywhere), destinations)


def of_edges(num_nodes: int, sources: Tensor, destinations: Tensor) -> Store:
    edges = torch.stack([sources, destinations])
    return hoploom.from_tensors({}, edges, num_nodes=num_nodes, splits={"train": torch.arange(0, num_nodes, 3)})


def share_cut(store: Store, parts: Mapping[str, Tensor]) -> float:
    return sum(edge_cut(store, parts).values()) / sum(relation.num_edges for relation in store.schema.relations)


def excess(values: Tensor, parts: Tensor, num_parts: int) -> float:
    sums = torch.zeros(num_parts).index_add_(0, parts.long(), values.float())
    return float(sums.max() / sums.mean())


def in_degrees(store: Store) -> Tensor:
    return store.parts[0].lists[0].indptr.diff()


def naive_cut(store: Store, parts: Mapping[str, Tensor]) -> list[int]:
    found = []
    for relation, lists in zip(store.schema.relations, store.parts[0].lists, strict=True):
        ends = torch.repeat_interleave(torch.arange(lists.indptr.numel() - 1), lists.indptr.diff())
        found.append(int((parts[relation.source][lists.indices.long()] != parts[relation.destination][ends]).sum()))
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_parts", [1, 2, 5, 12])
def test_every_node_has_a_part_and_every_part_a_node(method: str, num_parts: int) -> None:
    nothing = torch.empty(2, 0, dtype=torch.int64)
    counts = {"a": 3, "b": 4, "c": 5}
    edges = {("a", "to", "b"): torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3]]), ("b", "to", "c"): nothing}
    parts = assign(hoploom.from_tensors({name: {} for name in counts}, edges, num_nodes=counts), num_parts, method)
    assert {name: own.numel() for name, own in parts.items()} == counts
    assert set(torch.cat(list(parts.values())).tolist()) == set(range(num_parts))


def test_edges_cut_are_those_between_parts(tmp_path: Path) -> None:
    store = hoploom.generate(tmp_path / "s", num_nodes=600, avg_degree=6, num_features=1, heterogeneous=True)
    parts = assign(store, 3, "hash")
    assert list(edge_cut(store, parts, threads=2).values()) == naive_cut(store, parts)
    assert sum(edge_cut(store, assign(store, 1)).values()) == 0


def test_hash_and_range_differ_by_one_node_at_most() -> None:
    store = planted(1003)
    for method in ("hash", "range"):
        counts = torch.bincount(assign(store, 4, method)["node"].long())
        assert counts.max() - counts.min() <= 1
    assert torch.equal(assign(store, 4, "range")["node"], assign(store, 4, "range")["node"].sort()[0])


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_planted_communities_are_found(num_parts: int) -> None:
    """What leaves a community goes anywhere: at best (1 - homophily) (1 - 1 / parts) of the edges are cut."""
    store = planted()
    best = 0.2 * (1 - 1 / num_parts)
    cut = share_cut(store, assign(store, num_parts, seeds="train"))
    assert cut < 1.15 * best
    assert cut < share_cut(store, assign(store, num_parts, "hash")) / 2


@pytest.mark.parametrize("num_nodes", [70, 3000])
def test_neither_threads_nor_files_change_the_parts(num_nodes: int, tmp_path: Path) -> None:
    store = planted(num_nodes)
    one = assign(store, 4, seeds="train", threads=1)["node"]
    for threads in (2, 4):
        assert torch.equal(assign(store, 4, seeds="train", threads=threads)["node"], one)
    assert one.dtype == torch.int16
    store.save(tmp_path / "s")
    for memory in (1, 1 << 40):  # edges are read piece by piece, or held
        assert torch.equal(assign(tmp_path / "s", 4, seeds="train", memory=memory)["node"], one)
        assert edge_cut(tmp_path / "s", {"node": one}, memory=memory) == edge_cut(store, {"node": one})


def test_ids_of_more_than_32_bits_make_parts_as_good() -> None:
    store = planted()
    with topology_of(store) as topology:
        parts = [assign_parts(topology, None, PartitionRule(4, 5, 0.05, 2, 1, wide)) for wide in (False, True)]
        narrow, wide = (int(count_cut(topology, of, 2).sum()) for of in parts)
    assert abs(narrow - wide) < 0.03 * narrow


def test_nodes_edges_and_seeds_are_balanced(tmp_path: Path) -> None:
    store = hoploom.generate(tmp_path / "s", num_nodes=5000, avg_degree=12, num_features=1)
    parts = assign(store, 4, seeds="train")["node"]
    seeds = torch.zeros(5000).index_fill_(0, store.split("train"), 1)
    for values in (torch.ones(5000), in_degrees(store), seeds):
        assert excess(values, parts, 4) <= 1.051


def test_every_type_is_balanced_and_the_cut_half_of_hashs(tmp_path: Path) -> None:
    store = hoploom.generate(tmp_path / "s", num_nodes=4000, avg_degree=16, num_features=1, heterogeneous=True)
    parts = assign(store, 4, seeds="train")
    for own in parts.values():
        assert torch.bincount(own.long()).max() <= max(1.05 * own.numel() / 4, own.numel() / 4 + 1)
    assert share_cut(store, parts) < share_cut(store, assign(store, 4, "hash")) / 2


def test_nodes_without_in_edges_go_where_their_edges_lead() -> None:
    """Authors only write: nothing leads to them, so their papers must tell."""
    papers = planted(2000, 0.95)
    lists = papers.parts[0].lists[0]
    ends = torch.repeat_interleave(torch.arange(2000), lists.indptr.diff())
    generator = torch.Generator().manual_seed(3)
    authors = torch.arange(1000).repeat_interleave(4)
    written = torch.randint(250, (4000,), generator=generator) * COMMUNITIES + authors % COMMUNITIES
    edges = {
        ("paper", "cites", "paper"): torch.stack([lists.indices.long(), ends]),
        ("author", "writes", "paper"): torch.stack([authors, written]),
    }
    store = hoploom.from_tensors({"paper": {}, "author": {}}, edges, num_nodes={"paper": 2000, "author": 1000})
    assert edge_cut(store, assign(store, 4))["author", "writes", "paper"] < 0.15 * 4000


@pytest.mark.parametrize("name", ["random", "star in", "star out", "ring", "loops", "isolated", "bipartite"])
def test_no_graph_is_cut_more_than_by_hash(name: str) -> None:
    count = 1200
    ids = torch.arange(count)
    generator = torch.Generator().manual_seed(5)
    anywhere = torch.randint(count, (2, 8 * count), generator=generator)
    sources, destinations = {
        "random": (anywhere[0], anywhere[1]),
        "star in": (ids, torch.zeros_like(ids)),
        "star out": (torch.zeros_like(ids), ids),
        "ring": ((ids + 1) % count, ids),
        "loops": (ids, ids),
        "isolated": (ids[:2], ids[1:3]),
        "bipartite": (anywhere[0] // 2, anywhere[1] // 2 + count // 2),
    }[name]
    store = of_edges(count, sources, destinations)
    parts = assign(store, 4)
    assert excess(torch.ones(count), parts["node"], 4) <= 1.051
    assert share_cut(store, parts) <= share_cut(store, assign(store, 4, "hash"))


def test_a_graph_without_edges_is_balanced() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert excess(torch.ones(1000), assign(of_edges(1000, nothing, nothing), 4)["node"], 4) <= 1.051


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_parts": 0}, "num_parts is 0"),
        ({"num_parts": 71}, "71 for 70 nodes"),
        ({"num_parts": 40_000}, "40000 for 70 nodes; give 1 to 70"),
        ({"method": "steam"}, "did you mean 'stream'"),
        ({"seeds": "trian"}, "unknown split 'trian' of 'node'; it has .'train'."),
        ({"passes": 0}, "passes is 0; give 1 or more"),
        ({"imbalance": float("nan")}, "imbalance is nan"),
        ({"threads": 0}, "threads is 0"),
        ({"seeds": torch.tensor([3, 70])}, "70"),
    ],
)
def test_wrong_options_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        assign(planted(70), **{"num_parts": 2, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, 70, 2**31 - 1])
def test_a_damaged_source_id_is_an_error(wrong: int) -> None:
    store = planted(70)
    lists = store.parts[0].lists[0]
    lists.indices[37] = wrong
    for call in (lambda: assign(store, 2), lambda: edge_cut(store, {"node": torch.zeros(70, dtype=torch.int16)})):
        with pytest.raises(StoreError, match=f"node to node, list 2: source id {wrong} is out of range"):
            call()


def test_a_damaged_list_is_an_error() -> None:
    store = planted(70)
    begins = store.parts[0].lists[0].indptr
    assert all(end - begin == DEGREE for begin, end in pairwise(begins.tolist()))
    begins[5] = 10**12
    with pytest.raises(StoreError, match="node to node, list 4: its list runs from 64 to 1000000000000"):
        assign(store, 2)


def visits_of(folder: Path, fanouts: object, memory: int = 1 << 40) -> torch.Tensor:
    files = StoreFiles.at(StoragePath(str(folder)))
    hops = resolve_fanouts(files.schema, fanouts)  # type: ignore[arg-type]
    return expected_visits(files, files.schema.node_types[0].name, "train", hops, memory)


def by_definition(store: Store, hops: tuple[tuple[int, ...], ...], num_batches: int) -> np.ndarray:
    """Edge by edge, with numpy's own exponential."""
    schema = store.schema
    firsts = np.cumsum([0, *(t.num_nodes for t in schema.node_types)])
    visits = np.zeros(firsts[-1])
    visits[np.concatenate([part.split(schema.node_types[0].name, "train").numpy() for part in store.parts])] = 1
    before = np.zeros_like(visits)
    for fanouts in hops:
        new = num_batches * (np.exp(-before / num_batches) - np.exp(-visits / num_batches))
        before = visits.copy()
        for part in store.parts:
            for index, (lists, fanout) in enumerate(zip(part.lists, fanouts, strict=True)):
                degrees = np.diff(lists.indptr.numpy())
                share = np.ones(degrees.size) if fanout < 0 else np.minimum(1, fanout / np.maximum(1, degrees))
                ends = np.repeat(np.arange(degrees.size), degrees)
                given = new[firsts[schema.destinations[index]] + lists.first_node + ends] * share[ends]
                np.add.at(visits, firsts[schema.sources[index]] + lists.indices.numpy(), given)
    return visits


@pytest.fixture(scope="module")
def several_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed") / "graph"
    hoploom.generate(folder, num_nodes=900, num_features=1, heterogeneous=True, num_parts=2)
    return folder


@pytest.mark.parametrize("fanouts", [[3, 2], [-1, 4, 1], [2]])
def test_visits_are_those_of_the_definition(several_types: Path, fanouts: list[int]) -> None:
    store = open_store(several_types)
    num_batches = -(-store.schema.node_types[0].splits["train"] // BATCH_SIZE)
    wanted = by_definition(store, resolve_fanouts(store.schema, fanouts), num_batches)  # type: ignore[arg-type]
    assert np.allclose(visits_of(several_types, fanouts).numpy() / ONE, wanted, rtol=1e-3, atol=1e-3)
    assert wanted.max() > 1.5
    assert torch.equal(visits_of(several_types, fanouts), visits_of(several_types, fanouts, memory=1))


def test_a_relation_that_is_not_sampled_leads_to_no_visits(several_types: Path) -> None:
    store = open_store(several_types)
    fanouts = {relation.key: [0] for relation in store.schema.relations}
    assert visits_of(several_types, fanouts).sum() == ONE * store.schema.node_types[0].splits["train"]


def test_a_cache_of_the_first_nodes_is_as_good_as_one_by_sampling(tmp_path: Path) -> None:
    """Of what later batches ask for, the tenth of the nodes that comes first has as much either way."""
    rng, num_nodes = np.random.default_rng(1), 20_000
    popular = rng.permutation(1 / np.arange(1, num_nodes + 1) ** 1.1)
    ends = [rng.choice(num_nodes, 10 * num_nodes, p=popular**share / (popular**share).sum()) for share in (1, 0.5)]
    edges, seeds = torch.from_numpy(np.stack(ends)), torch.from_numpy(rng.choice(num_nodes, 4000, replace=False))
    graph = hoploom.from_tensors({}, edges, num_nodes=num_nodes, splits={"train": seeds.sort().values})
    graph.save(tmp_path / "graph")
    store, fanouts = open_store(tmp_path / "graph"), [5, 3]
    asked = count_visits(store, fanouts, "train", Presampling(seed=9, batches=range(100)))["node"]
    sampled = count_visits(store, fanouts, "train", Presampling(batches=range(100)))["node"]
    expected = visits_of(tmp_path / "graph", fanouts)
    found = {
        name: asked[visit_classes(visits).argsort(descending=True, stable=True)[: num_nodes // 10]].sum() / asked.sum()
        for name, visits in (("sampled", sampled), ("expected", expected), ("as they are", torch.zeros(num_nodes)))
    }
    assert found["expected"] > 0.99 * found["sampled"] > 3 * found["as they are"]


MB = 1 << 20
PARTITION = """
import os, sys
os.fsync = lambda descriptor: None
from hoploom.errors import ConfigError
from hoploom.partition.partition import partition

path, out, method, memory, *fanouts = sys.argv[1:]
try:
    print(partition(path, out, 3, method=method, fanouts=[int(f) for f in fanouts], memory=int(memory)))
except ConfigError as error:
    sys.exit(str(error))
"""


ASSIGN = """
import sys
from pathlib import Path
from hoploom.partition import assign
from hoploom.system import resident_bytes

before = resident_bytes()
assign(sys.argv[1], 4, seeds="train", memory=1)
lines = Path("/proc/self/status").read_text().splitlines()
print(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 - before)
"""


def save_linked(path: Path, num_nodes: int, degree: int, width: int, num_seeds: int) -> Path:
    """A store whose edges come from anywhere, whose rows are zero and take no disk space."""
    node_type = NodeType("node", num_nodes, {"x": Field("float32", (width,))}, {"train": num_seeds})
    relation = Relation(*HOMOGENEOUS_RELATION, num_nodes * degree)
    some = np.random.default_rng(1).integers(0, num_nodes, 1 << 20, dtype=np.int32).tobytes()
    num_edges, indptr = num_nodes * degree, np.arange(num_nodes + 1) * degree
    columns = {"indptr": ("int64", (num_nodes + 1,), iter([indptr.tobytes()]))}
    columns["indices"] = ("int32", (num_edges,), (some for _ in range(0, num_edges, 1 << 20)))
    values = {
        layout.node_file(0, "node", "x"): ("float32", (num_nodes, width), iter(())),
        layout.split_file(0, "node", "train"): ("int64", (num_seeds,), iter([np.arange(num_seeds).tobytes()])),
        **{layout.topology_file(0, relation, name): column for name, column in columns.items()},
    }
    entries = {}
    for name, (dtype, shape, chunks) in values.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            size = layout.write_npy_header(out, dtype, shape) + int(np.prod(shape)) * DTYPES[dtype].itemsize
            for chunk in chunks:
                out.write(chunk)
            out.truncate(size)
        entries[name] = layout.FileEntry(size, 0)
    part = layout.PartRange((0,), (num_nodes,), (0,), (num_nodes * degree,), {"node": {"train": num_seeds}})
    manifest = layout.Manifest(Schema((node_type,), (relation,), homogeneous=True), (part,), entries)
    (path / layout.STORE_FILE).write_text(layout.manifest_to_json(manifest))
    return path


def run(folder: Path, method: str, memory: int, *fanouts: int) -> Watched:
    paths = (folder / "store", folder / "parts")
    return watched([sys.executable, "-c", PARTITION, *map(str, (*paths, method, memory, *fanouts))])


def assert_kept(folder: Path, method: str, memory: int, *fanouts: int) -> None:
    ran = run(folder, method, memory, *fanouts)
    assert ran.code == 0, ran.said
    print(f"limit {memory / MB:.0f} MB, peak {ran.peak / MB:.0f} MB")
    assert 200 * MB < ran.peak <= memory
    assert len(hoploom.open(folder / "parts").parts) == 3


@pytest.mark.slow  # near two gigabytes are written
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["stream", "hash"])
def test_topology_and_features_larger_than_the_memory_are_partitioned_within_it(method: str, tmp_path: Path) -> None:
    save_linked(tmp_path / "store", 300_000, 560, 600, 20_000)  # 670 MB of edges, 720 MB of rows
    assert_kept(tmp_path, method, 816 * MB, 10, 5)


@pytest.mark.slow  # a graph so large that bytes per node are told from what any graph takes
@pytest.mark.timeout(900)
def test_assigning_takes_24_bytes_a_node(tmp_path: Path) -> None:
    """No node has the eight in-edges with which out-edges are not kept, and there are no clusters to find."""
    num_nodes = 12_000_000
    save_linked(tmp_path / "store", num_nodes, 4, 1, 20_000)
    ran = subprocess.run([sys.executable, "-c", ASSIGN, str(tmp_path / "store")], check=True, stdout=subprocess.PIPE)
    assert int(ran.stdout) < num_nodes * NODE_BYTES + FIXED_BYTES < num_nodes * 50


@pytest.mark.slow  # two whole runs of the command
def test_the_least_memory_that_is_named_works(tmp_path: Path) -> None:
    save_linked(tmp_path / "store", 50_000, 200, 800, 1000)  # 40 MB of edges, 160 MB of rows
    code, _, said = run(tmp_path, "stream", 1024, 4)
    assert code == 1
    found = re.search(r"memory is 1024 bytes, too little for 50000 nodes .*; give at least (\d+) \(", said)
    assert found, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    assert_kept(tmp_path, "stream", int(found[1]), 4)


def test_memory_that_is_not_enough_is_refused_before_anything_is_done(
    ring_store: hoploom.Store, tmp_path: Path
) -> None:
    said: list[str] = []
    for memory in (1, 1024, 60 * MB):
        with pytest.raises(ConfigError, match=f"memory is {memory} bytes, too little"):
            partition(ring_store, tmp_path / "parts", 2, memory=memory, progress=said.append)
    with pytest.raises(ConfigError, match="memory is 0"):
        partition(ring_store, tmp_path / "parts", 2, memory=0)
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_to_a_store_of_the_users_stays(tmp_path: Path) -> None:
    store = hoploom.open(save_linked(tmp_path / "store", 3000, 20, 1, 100))
    store.parts[0].lists[0].indices.fill_(7)
    partition(store, tmp_path / "parts", 2, fanouts=[2])
    report(store, [2], memory=1)
    assert bool((store.parts[0].lists[0].indices == 7).all())
    assert report(tmp_path / "parts", None).cuts[0].num_edges == 60_000


@pytest.mark.parametrize("memory", [1, 1 << 40])
def test_sampling_lets_go_within_a_hop_what_is_too_much(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_linked(tmp_path / "store", 100_000, 100, 1, 100)  # 40 MB
    opened = BoundedStore(folder, memory)
    seen = []

    def watched() -> None:
        seen.append(mapped_kilobytes(folder)["Rss"])
        BoundedStore.drop(opened)

    monkeypatch.setattr(opened, "drop", watched)
    nodes = Frontier(torch.arange(0, 100_000, 25))
    (picks,) = opened.store.graph.sample([nodes], Draw(1, 0, [3]))
    (expected,) = hoploom.open(folder).graph.sample([nodes], Draw(1, 0, [3]))
    assert all(torch.equal(found, want) for found, want in zip(picks, expected, strict=True))
    if memory == 1:
        assert len(seen) == -(-4000 // 256)
        assert max(seen) < 10 * 1024
    else:
        assert seen == []


def test_reading_a_store_leaves_none_of_it_in_memory(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 10_000, 500)  # 20 MB
    opened = BoundedStore(folder, 1 << 30)
    for begin, end in pieces(10_000, 2000):
        rows = opened.rows(0, "node", "x", begin, end)
        assert rows.shape == (end - begin, 500)
        assert rows.nbytes <= 4 << 20
        assert mapped_kilobytes(folder)["Rss"] < 256
    assert list(opened.edge_spans(0, 0, 8)) == []
