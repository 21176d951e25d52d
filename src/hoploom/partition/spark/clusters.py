"""Clusters by label propagation in rounds, and the smaller graph whose nodes are the clusters.

In a round, half of the vertices, drawn afresh, ask their neighbours for their labels and want the most frequent one.
A label's owner lets in as many as fit, in the order of a hash. Nothing depends on how many buckets there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from hoploom import keys
from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, Stage, TaskExchange, gathered, sent_to
from hoploom.partition.spark.level import ID_BITS, Level, begins_of, half_of, mix
from hoploom.partition.spark.links import LinkSums, heaviest
from hoploom.partition.spark.read import CHUNK_EDGES, Buckets
from hoploom.partition.spark.stages import Ask, answered
from hoploom.partition.spark.state import State

ROUNDS = 3  # of a level
LINKS = 32  # of a cluster are kept: so many, or more
LEAST_CLUSTERS = 1 << 14  # of a bucket
MOST_LINKS = 1 << 21  # in all, where clusters are few
MOST_TOLD = 1 << 26  # vertices up to which all learn of every full cluster; else of a share: one in a hundred would do


@dataclass(frozen=True)
class PropagationTurn:
    """Half a round of label propagation."""

    level: Level
    number: int
    key: int
    largest: int  # size of a cluster
    closed: Array  # labels that nobody wants: those that nobody else may take, or many of them; ascending
    usual: int  # size of a vertex: a cluster without room for it is closed

    def moves(self, vertices: Array) -> Array:
        """Whose turn it is: [n] bool."""
        return half_of(keys.mix(self.key, self.number // 2), vertices, self.number % 2)


@dataclass(frozen=True)
class SendLabels:
    """Who is heard tells those who listen and may move."""

    turn: PropagationTurn

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        level = self.turn.level
        links, labels = level.links(bucket), level.labels(bucket, self.turn.number)
        for at in range(0, links["heard"].size, CHUNK_EDGES):
            chunk = slice(at, at + CHUNK_EDGES)
            moving = self.turn.moves(links["listener"][chunk])
            listeners = links["listener"][chunk][moving]
            owners = level.buckets.of(listeners)
            columns = {
                "place": (listeners - owners * level.buckets.size).astype(np.uint32),
                "label": labels[links["heard"][chunk][moving]],
            }
            if level.weighted:
                columns["weight"] = links["weight"][chunk][moving]
            yield from sent_to(owners, columns)


@dataclass(frozen=True)
class ProposeLabels:
    """Those who listen want a label; its owner hears of them, and of all who have it."""

    turn: PropagationTurn

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        turn, level = self.turn, self.turn.level
        names, dtypes = ["place", "label"], ["<u4", "<i8"]
        if level.weighted:
            names, dtypes = [*names, "weight"], [*dtypes, "<i8"]
        columns = gathered(received, names, dtypes)
        own, sizes = level.labels(bucket, turn.number), level.sizes(bucket)
        places, wanted = winners(Votes(*columns), own, turn.closed, turn.key)
        owners = level.buckets.of(wanted)
        vertices = places + level.buckets.span(bucket)[0]
        yield from sent_to(owners, {"wanted": wanted, "vertex": vertices, "size": sizes[places]})
        labels, place = np.unique(own, return_inverse=True)
        held = np.zeros(labels.size, np.int64)
        np.add.at(held, place, sizes)
        yield from sent_to(level.buckets.of(labels), {"label": labels, "held": held})


@dataclass(frozen=True)
class AcceptLabels:
    """A label's owner lets in those who fit."""

    turn: PropagationTurn

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        turn, buckets = self.turn, self.turn.level.buckets
        begin, end = buckets.span(bucket)
        held, messages = np.zeros(end - begin, np.int64), []
        for columns in received:
            if "held" in columns:
                np.add.at(held, columns["label"] - begin, columns["held"])
            else:
                messages.append(columns)
        wanted, vertices, sizes = gathered(iter(messages), ("wanted", "vertex", "size"), ("<i8", "<i8", "<i8"))
        order = np.lexsort((vertices, mix(keys.mix(turn.key, turn.number), vertices), wanted))
        wanted, vertices, sizes = wanted[order], vertices[order], sizes[order]
        before = np.cumsum(sizes) - sizes
        before -= before[np.searchsorted(wanted, wanted)] if wanted.size else 0
        fits = held[wanted - begin] + before + sizes <= turn.largest
        wanted, vertices = wanted[fits], vertices[fits]
        np.add.at(held, wanted - begin, sizes[fits])
        yield from sent_to(buckets.of(vertices), {"vertex": vertices, "label": wanted})
        full = np.nonzero(held + turn.usual > turn.largest)[0] + begin
        yield BucketMessage(bucket, {"closed": told_of(full, buckets.num_ids, keys.mix(turn.key, turn.number))})


def told_of(full: Array, num_vertices: int, key: int) -> Array:
    """The full clusters that all learn of, so that nobody wants them: a bounded number, however large the graph."""
    share = MOST_TOLD / max(1, num_vertices)
    return full if share >= 1 else full[mix(key, full) < np.uint64(share * 2**64)]


@dataclass(frozen=True)
class MoveLabels:
    """Those who were let in move. The driver hears how many, and which labels are closed now."""

    turn: PropagationTurn

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        level, number = self.turn.level, self.turn.number
        labels, moved, closed = level.labels(bucket, number).copy(), 0, [np.empty(0, np.int64)]
        for columns in received:
            if "closed" in columns:
                closed.append(columns["closed"])
            else:
                labels[columns["vertex"] - level.buckets.span(bucket)[0]] = columns["label"]
                moved += columns["label"].size
        level.state.save(f"labels-{number + 1}", bucket, label=labels)
        yield BucketMessage(0, {"moved": np.array([moved]), "closed": np.concatenate(closed)})


@dataclass(frozen=True)
class Votes:
    """What vertices have heard."""

    places: Array  # [n] uint32, of those who listen
    labels: Array  # [n] int64
    weights: Array | None = None  # [n] int64


def winners(votes: Votes, own: Array, closed: Array, key: int) -> tuple[Array, Array]:
    """Which vertices want another label, by their places, and which one: the one with most votes that is open.

    The own label has a vote, too: two vertices that have only each other would exchange their labels for ever.
    """
    is_voting = np.zeros(own.size, bool)
    is_voting[votes.places] = True
    voting = np.nonzero(is_voting)[0]
    voted = np.concatenate([votes.places.astype(np.int64), voting]) << ID_BITS
    voted |= np.concatenate([votes.labels, own[voting]])
    if votes.weights is None:
        voted.sort()
        begins = begins_of(voted)
        counts = np.diff(begins, append=voted.size)
    else:
        order = np.argsort(voted)
        voted = voted[order]
        begins = begins_of(voted)
        weights = np.concatenate([votes.weights, np.ones(voting.size, np.int64)])[order]
        counts = np.add.reduceat(weights, begins) if begins.size else begins
    places, labels = voted[begins] >> ID_BITS, voted[begins] & ((1 << ID_BITS) - 1)
    open_ = ~np.isin(labels, closed) | (labels == own[places])
    places, labels, counts = places[open_], labels[open_], counts[open_]
    scores = np.minimum(counts, (1 << 38) - 1) << 24 | (mix(key, labels) >> np.uint64(40)).astype(np.int64)
    groups = begins_of(places)
    if not groups.size:
        return places, labels
    best = np.repeat(np.maximum.reduceat(scores, groups), np.diff(groups, append=places.size))
    first = np.nonzero(scores == best)[0]
    first = first[np.unique(places[first], return_index=True)[1]]  # the smaller label, should two have the same hash
    moving = labels[first] != own[places[first]]
    return places[first][moving], labels[first][moving]


def propagate(exchange: TaskExchange, level: Level, largest: int, usual: int, key: int) -> int:
    """Labels of all vertices, after several rounds; returns how many turns that were."""
    closed = np.empty(0, np.int64)
    for number in range(2 * ROUNDS):
        turn = PropagationTurn(level, number, key, largest, closed, usual)
        stages: list[Stage] = [SendLabels(turn), ProposeLabels(turn), AcceptLabels(turn), MoveLabels(turn)]
        told = exchange.run(level.buckets.count, stages)
        if number:
            level.state.drop(f"labels-{number}")
        closed = np.sort(np.concatenate([columns["closed"] for columns in told]))
        moved = sum(int(columns["moved"][0]) for columns in told)
        if moved == 0 and number % 2:
            break
    return number + 1


# --- the graph of clusters -----------------------------------------------------------------------


@dataclass(frozen=True)
class SumLoads:
    """Loads go to the owners of the labels."""

    level: Level
    turn: int

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        labels, place = np.unique(self.level.labels(bucket, self.turn), return_inverse=True)
        loads = np.zeros((labels.size, self.level.weights.size), np.int64)
        np.add.at(loads, place, self.level.loads(bucket))
        yield from sent_to(self.level.buckets.of(labels), {"label": labels, "loads": loads})


@dataclass(frozen=True)
class NoteLabels:
    """Owners note which of their labels are in use, and what those of a label count for."""

    level: Level

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        begin, end = self.level.buckets.span(bucket)
        loads, used = np.zeros((end - begin, self.level.weights.size), np.int64), np.zeros(end - begin, bool)
        for columns in received:
            np.add.at(loads, columns["label"] - begin, columns["loads"])
            used[columns["label"] - begin] = True
        self.level.state.save("used", bucket, used=used, loads=loads[used])
        yield BucketMessage(0, {"bucket": np.array([bucket]), "count": np.array([used.sum()])})


@dataclass(frozen=True)
class Contraction:
    level: Level
    turn: int
    above: Level
    firsts: Array  # [buckets] int64: the number of the first cluster of each bucket
    most_links: int  # of a cluster

    def stages(self) -> list[Stage]:
        return [
            Ask(partial(self.level.labels, turn=self.turn), self.level.buckets),
            NumberLabels(self),
            NumberVertices(self),
            JoinLinks(self),
            KeepLinks(self),
            WriteClusterLinks(self),
        ]


@dataclass(frozen=True)
class NumberLabels:
    """Owners say which number a label has, and send what it counts for to the bucket of that number."""

    to: Contraction

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        used = self.to.level.state.load("used", bucket, "used", "loads")
        numbers = self.to.firsts[bucket] + np.cumsum(used["used"]) - 1
        first = self.to.level.buckets.span(bucket)[0]
        for columns in received:
            found = {"key": columns["key"], "value": numbers[columns["key"] - first]}
            yield from sent_to(columns["asker"].astype(np.int64), found)
        own = numbers[used["used"]]
        yield from sent_to(self.to.above.buckets.of(own), {"number": own, "loads": used["loads"]})


@dataclass(frozen=True)
class NumberVertices:
    """Vertices note the number of their cluster, and tell it those who listen."""

    to: Contraction

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        level, above = self.to.level, self.to.above
        begin, end = above.buckets.span(bucket)
        loads, answers = np.zeros((end - begin, above.weights.size), np.int64), []
        for columns in received:
            if "number" in columns:
                loads[columns["number"] - begin] = columns["loads"]
            else:
                answers.append(columns)
        if bucket < above.buckets.count:
            above.state.save("loads", bucket, loads=loads)
        numbers = answered(level.labels(bucket, self.to.turn), iter(answers))
        level.state.save("above", bucket, number=numbers)
        links = level.links(bucket)
        for at in range(0, links["heard"].size, CHUNK_EDGES):
            chunk = slice(at, at + CHUNK_EDGES)
            listeners = links["listener"][chunk]
            weights = links["weight"][chunk] if level.weighted else np.ones(listeners.size, np.int64)
            columns = {"vertex": listeners, "heard": numbers[links["heard"][chunk]], "weight": weights}
            yield from sent_to(level.buckets.of(listeners), columns)


@dataclass(frozen=True)
class JoinLinks:
    """Both ends of a link are known: it leads from cluster to cluster, in both directions."""

    to: Contraction

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        first = self.to.level.buckets.span(bucket)[0]
        numbers, clusters = np.unique(self.to.level.above(bucket), return_inverse=True)
        sums = LinkSums()
        for columns in received:
            own = clusters[columns["vertex"] - first]
            between = numbers[own] != columns["heard"]
            sums.add(own[between], columns["heard"][between], columns["weight"][between])
        for places, other, weights in sums.total():
            one = numbers[places]
            for listeners, heard in ((one, other), (other, one)):
                columns = {"listener": listeners, "heard": heard, "weight": weights}
                yield from sent_to(self.to.above.buckets.of(listeners), columns)


@dataclass(frozen=True)
class KeepLinks:
    """A cluster listens to those to which most links lead."""

    to: Contraction

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        sums, first = LinkSums(), self.to.above.buckets.span(bucket)[0]
        for columns in received:
            sums.add(columns["listener"] - first, columns["heard"], columns["weight"])
        for places, heard, weights in sums.total():
            kept = heaviest(places, heard, weights, self.to.most_links)
            columns = {"heard": heard[kept], "listener": places[kept] + first, "weight": weights[kept]}
            yield from sent_to(self.to.above.buckets.of(heard[kept]), columns)


@dataclass(frozen=True)
class WriteClusterLinks:
    """Those who are heard note who listens."""

    to: Contraction

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        above = self.to.above
        heard, listeners, weights = gathered(received, ("heard", "listener", "weight"), ("<i8", "<i8", "<i8"))
        if bucket < above.buckets.count:
            places = heard - above.buckets.span(bucket)[0]
            order = np.argsort(places << ID_BITS | listeners)  # every pair comes once
            places = places[order].astype(np.uint32)
            above.state.save("links", bucket, heard=places, listener=listeners[order], weight=weights[order])
        return
        yield


def contract(exchange: TaskExchange, level: Level, turn: int, folder: State) -> Level:
    """The graph of the clusters."""
    told = exchange.run(level.buckets.count, [SumLoads(level, turn), NoteLabels(level)])
    counts = np.zeros(level.buckets.count + 1, np.int64)
    for columns in told:
        counts[columns["bucket"][0] + 1] = columns["count"][0]
    firsts = np.cumsum(counts)
    size = max(LEAST_CLUSTERS, -(-int(firsts[-1]) // level.buckets.count))  # as many buckets: links stay spread
    above = Level(folder, Buckets(int(firsts[-1]), min(size, level.buckets.size)), level.weights, weighted=True)
    most_links = max(LINKS, MOST_LINKS // above.buckets.num_ids)
    exchange.run(level.buckets.count, Contraction(level, turn, above, firsts, most_links).stages())
    return above
