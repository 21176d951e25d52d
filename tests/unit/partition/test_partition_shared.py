"""Cutting a store in buckets, as on Spark: the stages that tasks run, here one after the other without Spark."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyspark")

import hoploom
from hoploom.errors import ConfigError
from hoploom.ops import PartitionRule
from hoploom.partition import assign
from hoploom.partition.spark.clusters import Votes, told_of, winners
from hoploom.partition.spark.exchange import (
    Array,
    BucketMessage,
    Columns,
    InProcess,
    Stage,
    TaskExchange,
    pack,
    sent_to,
    unpack,
)
from hoploom.partition.spark.grants import WishRanks, grant, moved
from hoploom.partition.spark.level import mix
from hoploom.partition.spark.links import LinkSums, chosen, heaviest
from hoploom.partition.spark.partition import SparkOptions, partition_on_spark
from hoploom.partition.spark.read import Buckets, StoreOnPlace
from hoploom.partition.spark.state import State
from hoploom.partition.spark.stream import SeedSplit, assign_stream
from hoploom.store import open_store
from hoploom.store.format import read_manifest
from hoploom.store.storage_path import StoragePath

IMBALANCE = 0.05


class Shuffled(InProcess):
    """Tasks and messages in another order for every seed, as they come on Spark."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def run(self, num_buckets: int, stages: Sequence[Stage]) -> list[Columns]:
        def shuffling(stage: Stage) -> Stage:
            def run(bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
                messages = list(received)
                self.draw.shuffle(messages)
                return stage(bucket, iter(messages))

            return run

        told = super().run(num_buckets, [shuffling(stage) for stage in stages])
        self.draw.shuffle(told)
        return told


def cut_in_buckets(
    folder: Path, work: Path, num_parts: int, size: int, exchange: TaskExchange | None = None
) -> tuple[Array, Array]:
    """The part of every node, and what parts hold of every kind."""
    work.mkdir(exist_ok=True)
    manifest = read_manifest(folder)
    store = StoreOnPlace(StoragePath(str(folder)), manifest.schema, manifest.parts)
    buckets, state = Buckets(store.bounds[-1], size), State(StoragePath(str(work)), f"of-{size}")
    rule = PartitionRule(num_parts, 8, IMBALANCE, 1, 5)
    held = assign_stream(exchange or InProcess(), store, buckets, state, SeedSplit(0, "train"), rule)
    parts = [state.load("parts", bucket, "part")["part"] for bucket in range(buckets.count)]
    return np.concatenate(parts), held


def share_cut(folder: Path, parts: Array) -> float:
    """By the definition: edges whose ends are in different parts."""
    store = open_store(folder)
    firsts = np.cumsum([0, *(t.num_nodes for t in store.schema.node_types)])
    cut = total = 0
    for index, lists in ((i, lists) for part in store.parts for i, lists in enumerate(part.lists)):
        ends = np.repeat(np.arange(lists.indptr.numel() - 1), np.diff(lists.indptr.numpy())) + lists.first_node
        source, destination = store.schema.sources[index], store.schema.destinations[index]
        cut += (parts[lists.indices.numpy() + firsts[source]] != parts[ends + firsts[destination]]).sum()
        total += lists.indices.numel()
    return float(cut / total)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "graph"
    hoploom.generate(folder, num_nodes=4000, num_features=1, num_classes=4, num_parts=2)
    return folder


@pytest.fixture(autouse=True)
def quick_disk(no_sync: None) -> None:
    """Nothing here outlives the test."""


def test_planted_communities_are_cut_as_by_one_process(planted: Path, tmp_path: Path) -> None:
    parts, held = cut_in_buckets(planted, tmp_path, 4, 2000)
    by_one = assign(planted, 4, "stream", seeds="train")["node"].numpy()
    assert share_cut(planted, parts) <= 1.3 * share_cut(planted, by_one)
    assert (held <= held.sum(0) / 4 * (1 + IMBALANCE) + 1).all()
    assert (held[:, 0] == np.bincount(parts, minlength=4)).all()


def test_buckets_do_not_change_the_parts(planted: Path, tmp_path: Path) -> None:
    one, _ = cut_in_buckets(planted, tmp_path, 3, 10_000)
    many, _ = cut_in_buckets(planted, tmp_path, 3, 1400)
    assert (one == many).all()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_messages_does_not_change_the_parts(
    seed: int, planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the levels that the driver would work on, nor with messages of a few values."""
    monkeypatch.setattr("hoploom.partition.spark.placing.MOST_CLUSTERS", 300)
    monkeypatch.setattr("hoploom.partition.spark.exchange.MESSAGE_BYTES", 4096)
    parts, held = cut_in_buckets(planted, tmp_path / "one", 3, 500)
    shuffled, also = cut_in_buckets(planted, tmp_path / "other", 3, 500, Shuffled(seed))
    assert (parts == shuffled).all()
    assert (held == also).all()


def test_of_a_large_graph_only_a_share_of_the_full_clusters_is_told(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the driver and every task would hold them all."""
    monkeypatch.setattr("hoploom.partition.spark.clusters.MOST_TOLD", 40)
    full = np.arange(0, 4000, 40)
    told = told_of(full, 400, 7)
    assert 0 < told.size < 30  # a tenth of 100, about
    assert np.isin(told, full).all()
    assert (told_of(full, 40, 7) == full).all()
    one, held = cut_in_buckets(planted, tmp_path, 4, 10_000)
    many, _ = cut_in_buckets(planted, tmp_path, 4, 1400)
    assert (one == many).all()
    assert (held <= held.sum(0) / 4 * (1 + IMBALANCE) + 1).all()
    by_one = assign(planted, 4, "stream", seeds="train")["node"].numpy()
    assert share_cut(planted, one) <= 1.3 * share_cut(planted, by_one)


def test_every_type_is_balanced_and_so_are_seeds(tmp_path: Path) -> None:
    hoploom.generate(tmp_path / "graph", num_nodes=1500, num_features=1, heterogeneous=True)
    _, held = cut_in_buckets(tmp_path / "graph", tmp_path, 3, 800)
    assert held.sum(0)[-1] > 0
    assert held.sum(0)[:3].tolist() == [1500, 1500, 16]
    assert (held <= np.maximum(held.sum(0) / 3 * (1 + IMBALANCE), np.ceil(held.sum(0) / 3) + 1)).all()


def test_nodes_that_have_only_out_edges_go_where_these_lead(tmp_path: Path) -> None:
    """Two rings of 50 nodes that hold together, and fans without in-edges that follow the one or the other."""
    ring = torch.arange(100)
    inside = torch.stack([ring.repeat(6), torch.cat([(ring + 2 * step) % 100 for step in range(1, 7)])])
    fans = torch.arange(100, 1100)
    followed = torch.stack([fans.repeat(3), torch.cat([fans * 14 % 100 + fans % 2 for _ in range(3)])])
    edges = torch.cat([inside, followed], 1)
    hoploom.from_tensors({}, edges, num_nodes=1100, splits={"train": ring}).save(tmp_path / "graph")
    parts, _ = cut_in_buckets(tmp_path / "graph", tmp_path, 2, 300)
    assert share_cut(tmp_path / "graph", parts) < 0.1


def test_messages_arrive_as_they_were_sent() -> None:
    columns = {"a": np.arange(5), "b": np.ones((5, 2), np.int16), "c": np.empty((0, 3), np.float32)}
    for name, values in unpack(pack(columns)).items():
        assert values.dtype == columns[name].dtype
        assert np.array_equal(values, columns[name])
    sent = list(sent_to(np.array([3, 0, 3]), {"a": np.array([7, 8, 9])}))
    assert [(message.to, message.columns["a"].tolist()) for message in sent] == [(0, [8]), (3, [7, 9])]


def test_every_bucket_runs_every_stage() -> None:
    def first(bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        yield BucketMessage((bucket + 1) % 3, {"from": np.array([bucket])})

    def last(bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        yield BucketMessage(0, {"pair": np.array([bucket, *(int(columns["from"][0]) for columns in received)])})

    told = InProcess().run(3, [first, last])
    assert sorted(columns["pair"].tolist() for columns in told) == [[0, 2], [1, 0], [2, 1]]


def test_the_label_with_most_votes_wins_unless_it_is_closed() -> None:
    votes = Votes(np.array([0, 0, 0, 1, 1], np.uint32), np.array([5, 5, 6, 9, 9]))
    own = np.array([0, 1])
    assert winners(votes, own, np.array([9]), 1)[0].tolist() == [0]
    assert winners(votes, own, np.array([5, 9]), 1)[1].tolist() in ([6], [])  # a tie with its own
    places, labels = winners(votes, own, np.empty(0, np.int64), 1)
    assert (places.tolist(), labels.tolist()) == ([0, 1], [5, 9])


def test_parts_that_are_full_exchange_nodes() -> None:
    ranks = WishRanks(2)
    demand = np.zeros((2, 2, ranks.count, 1), np.int64)
    demand[0, 1, 0], demand[1, 0, 0] = 10, 10
    held, most = np.array([[100], [100]]), np.array([100])
    assert moved(demand, grant(demand, held, most, ranks)).tolist() == [[0], [0]]
    assert (grant(demand, held, most, ranks)[[0, 1], [1, 0]] > 0).all()
    demand[1, 0, 0] = 9  # one more would come than leaves
    assert (held + moved(demand, grant(demand, held, most, ranks)) <= most).all()


def test_a_part_that_holds_too_much_sends_nodes_away() -> None:
    ranks = WishRanks(2)
    demand = np.zeros((2, 2, ranks.count, 1), np.int64)
    demand[0, 1, ranks.wished :] = 3  # nobody gains
    held, most = np.array([[110], [90]]), np.array([105])
    assert (held + moved(demand, grant(demand, held, most, ranks))).tolist() == [[104], [96]]


def test_sampled_in_edges_are_spread_over_all_lists() -> None:
    """40 in-edges, 30 in one list and 10 in another: 16 positions at equal distances, each in the list it lies in."""
    degrees, offsets = np.array([40, 2]), np.array([5, 1])
    first = chosen(degrees, offsets, np.array([0, 0]), np.array([30, 2]))
    second = chosen(degrees, offsets, np.array([30, 2]), np.array([10, 0]))
    wanted = [(sample * 40 + 5) // 16 for sample in range(16)]
    assert [*first[1][first[0] == 0], *(second[1] + 30)] == wanted
    assert first[1][first[0] == 1].tolist() == [0, 1]


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
def test_links_are_summed_up_and_the_heaviest_are_kept(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a loop over all of them does it; some who listen have fewer links than are kept."""
    monkeypatch.setattr("hoploom.partition.spark.links.CHUNK_EDGES", chunk)
    draw, sums, expected = np.random.default_rng(3), LinkSums(), Counter[tuple[int, int]]()
    for _ in range(5):
        places, heard = (draw.integers(40, size=100) ** 2 // 40 for _ in range(2))
        weights = draw.integers(1, 4, size=100)
        sums.add(places, heard + (1 << 39), weights)
        for place, other, weight in zip(places, heard, weights, strict=True):
            expected[int(place), int(other) + (1 << 39)] += int(weight)
    chunks = list(sums.total())
    assert len(chunks) == {1: len({place for place, _ in expected}), 1 << 20: 1}.get(chunk, len(chunks)) > 0
    found = [np.concatenate(column) for column in zip(*chunks, strict=True)]
    assert [((int(a), int(b)), int(w)) for a, b, w in zip(*found, strict=True)] == sorted(expected.items())
    best = set()
    for place in {place for place, _ in expected}:
        of = [pair for pair in expected if pair[0] == place]
        words = {pair: int(mix(0, np.array([pair[1]]))[0]) for pair in of}
        best |= set(sorted(of, key=lambda pair: (-expected[pair], words[pair]))[:6])
    kept = [
        (int(places[at]), int(heard[at]))
        for places, heard, weights in chunks
        for at in heaviest(places, heard, weights, 6)
    ]
    assert set(kept) == best
    assert len(kept) == len(best) < len(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "metis"}, "needs one process"),
        ({"method": "frequency"}, "needs one process"),
        ({"method": "best"}, "unknown method"),
        ({"num_parts": 600}, "give 1 to 512"),
        ({"seeds": "tran"}, "name of a split"),
    ],
)
def test_what_spark_cannot_do_is_said_before_it_starts(
    planted: Path, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    given = {"num_parts": 4, "method": "stream", "seeds": None} | options
    num_parts = given.pop("num_parts")
    with pytest.raises(ConfigError, match=words):
        partition_on_spark(planted, tmp_path / "out", num_parts, SparkOptions(), **given)  # type: ignore[arg-type]
