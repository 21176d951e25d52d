"""Rounds in which nodes move to the part where most of their neighbours are, while parts keep within their limits.

In a turn half of the nodes, drawn afresh, count the parts of those they hear and wish to move. The driver sees sums of
these wishes and grants them up to a rank, by pairs of parts. Nodes apply what was granted when the next turn begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hoploom import keys
from hoploom.ops import PartitionRule
from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, TaskExchange, gathered, sent_to
from hoploom.partition.spark.grants import WishRanks, grant, moved
from hoploom.partition.spark.level import Level, half_of, mix
from hoploom.partition.spark.read import CHUNK_EDGES
from hoploom.partition.spark.stages import total

PASSES = 8  # at most; two turns each
RELIEF = 8  # more passes, at most, while a part holds too much
FEW = 1000  # a pass that moves less than one in so many nodes is the last
GREAT = 4  # votes gained


@dataclass(frozen=True)
class RefinementTurn:
    """Half a pass."""

    nodes: Level
    number: int
    key: int
    ranks: WishRanks
    granted: Array | None  # [parts, parts] int64, of the wishes of the turn before
    over: Array  # [parts, kinds] bool: what parts hold too much of
    full: Array  # [parts] bool: parts without room

    def moves(self, ids: Array) -> Array:
        """Whose turn it is: [n] bool."""
        return half_of(keys.mix(self.key, self.number // 2), ids, self.number % 2)

    def parts(self, bucket: int) -> Array:
        return self.nodes.state.load(f"parts-{self.number}", bucket, "part")["part"]


@dataclass(frozen=True)
class SendParts:
    """Granted wishes come true, and who is heard tells its part to those who listen and may move."""

    turn: RefinementTurn

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        turn, nodes = self.turn, self.turn.nodes
        parts = granted_parts(turn, bucket)
        links = nodes.links(bucket)
        for at in range(0, links["heard"].size, CHUNK_EDGES):
            chunk = slice(at, at + CHUNK_EDGES)
            moving = turn.moves(links["listener"][chunk])
            listeners = links["listener"][chunk][moving]
            owners = nodes.buckets.of(listeners)
            places = (listeners - owners * nodes.buckets.size).astype(np.uint32)
            yield from sent_to(owners, {"place": places, "part": parts[links["heard"][chunk][moving]]})


def granted_parts(turn: RefinementTurn, bucket: int) -> Array:
    """The parts of a bucket's nodes as they are now, which are saved."""
    state = turn.nodes.state
    if turn.granted is None:
        return turn.parts(bucket)
    parts = state.load(f"parts-{turn.number - 1}", bucket, "part")["part"]
    wishes = state.load(f"wishes-{turn.number - 1}", bucket, "place", "part", "rank")
    yes = wishes["rank"] < turn.granted[parts[wishes["place"]], wishes["part"]]
    parts[wishes["place"][yes]] = wishes["part"][yes]
    state.save(f"parts-{turn.number}", bucket, part=parts)
    return parts


@dataclass(frozen=True)
class Wish:
    """Nodes wish to move, and what they count for is summed up by where they would move."""

    turn: RefinementTurn

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        turn, nodes = self.turn, self.turn.nodes
        begin, end = nodes.buckets.span(bucket)
        own, loads = turn.parts(bucket), nodes.loads(bucket)
        places, heard = gathered(received, ("place", "part"), ("<u4", "<i2"))
        may_move = turn.moves(np.arange(begin, end))
        must = may_move & (turn.over[own] & (loads > 0)).any(1)
        wishes = wishes_of(turn, begin, own, must, (places, heard))
        nodes.state.save(f"wishes-{turn.number}", bucket, place=wishes[0], part=wishes[1], rank=wishes[2])
        ways = (own[wishes[0]].astype(np.int64) * turn.ranks.num_parts + wishes[1]) * turn.ranks.count + wishes[2]
        yield from sent_to(*_summed(ways, loads[wishes[0]], nodes.buckets.count))


def _summed(ways: Array, loads: Array, num_buckets: int) -> tuple[Array, Columns]:
    found, place = np.unique(ways, return_inverse=True)
    sums = np.zeros((found.size, loads.shape[1]), np.int64)
    np.add.at(sums, place, loads)
    return found % num_buckets, {"way": found, "loads": sums}


@dataclass(frozen=True)
class SumWishes:
    kinds: int

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        messages = list(received)
        ways = np.concatenate([np.empty(0, np.int64), *(columns["way"] for columns in messages)])
        loads = np.concatenate([np.empty((0, self.kinds), np.int64), *(columns["loads"] for columns in messages)])
        yield BucketMessage(0, _summed(ways, loads, 1)[1])


def wishes_of(
    turn: RefinementTurn, begin: int, own: Array, must: Array, heard: tuple[Array, Array]
) -> tuple[Array, ...]:
    """Who wishes to move: places [n] int64, the parts where to [n] int16, and ranks [n] int64.

    A node wishes to be in the part of most of those it hears. One that must leave goes to one of its open parts.
    """
    places, parts, votes = _counted(heard)
    ids = places + begin
    ties = (mix(keys.mix(turn.key, turn.number), ids * turn.ranks.num_parts + parts) >> np.uint64(48)).astype(np.int64)
    own_votes = np.zeros(own.size, np.int64)
    is_own = parts == own[places]
    own_votes[places[is_own]] = votes[is_own]
    best, best_votes = _best(own, places[~is_own], parts[~is_own], (4 * votes - turn.full[parts] << 16 | ties)[~is_own])
    gains = best_votes - own_votes
    wishing = (best != own) & (gains > 0)
    left = np.nonzero(must & ~wishing)[0]
    open_parts = np.nonzero(~turn.full)[0]
    if left.size and open_parts.size:
        is_open = ~is_own & ~turn.full[parts]
        other, other_votes = _best(own, places[is_open], parts[is_open], (4 * votes << 16 | ties)[is_open])
        any_open = open_parts[mix(turn.key + 1, left + begin) % np.uint64(open_parts.size)]
        best[left] = np.where(other[left] == own[left], any_open, other[left])
        gains[left] = np.where(other[left] == own[left], 0, other_votes[left]) - own_votes[left]
        wishing[left] = best[left] != own[left]
    moving = np.nonzero(wishing)[0]
    gained = gains[moving]
    classes = np.select([gained >= GREAT, gained > 0, gained >= -1], [0, 1, 2], 3)
    draws = (mix(keys.mix(turn.key + 2, turn.number), moving + begin) % np.uint64(turn.ranks.per_class)).astype(
        np.int64
    )
    return moving, best[moving].astype(np.int16), classes * turn.ranks.per_class + draws


def _counted(heard: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Places and parts, every pair once, and how often it came: [n] int64."""
    both = heard[0].astype(np.int64) << 16 | heard[1].astype(np.int64)
    found, votes = np.unique(both, return_counts=True)
    return found >> 16, found & 0xFFFF, votes


def _best(own: Array, places: Array, parts: Array, scores: Array) -> tuple[Array, Array]:
    """Of every node the part with the greatest score, its own where it has none, and that part's votes."""
    best, votes = own.astype(np.int64), np.zeros(own.size, np.int64)
    order = np.lexsort((scores, places))
    last = np.ones(order.size, bool)
    last[:-1] = places[order][1:] != places[order][:-1]
    chosen = order[last]
    best[places[chosen]] = parts[chosen]
    votes[places[chosen]] = (scores[chosen] >> 16) + 3 >> 2
    return best, votes


@dataclass(frozen=True)
class SumParts:
    nodes: Level
    num_parts: int

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        held = np.zeros((self.num_parts, self.nodes.weights.size), np.int64)
        np.add.at(held, self.nodes.state.load("parts-0", bucket, "part")["part"], self.nodes.loads(bucket))
        yield BucketMessage(0, {"sum": held})


@dataclass(frozen=True)
class KeepParts:
    """The last wishes come true."""

    turn: RefinementTurn

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        self.turn.nodes.state.save("parts", bucket, part=granted_parts(self.turn, bucket))
        return
        yield


def refine(exchange: TaskExchange, nodes: Level, most: Array, rule: PartitionRule) -> Array:
    """Better parts, in the file `parts` of every bucket; what each holds of every kind: [parts, kinds] int64."""
    count, kinds, ranks = nodes.buckets.count, most.size, WishRanks(rule.num_parts)
    held = total(exchange, count, SumParts(nodes, rule.num_parts))
    granted: Array | None = None
    number = moves = 0
    while True:
        over, full = held > most, np.asarray((held >= most).any(1))
        turn = RefinementTurn(nodes, number, rule.key, ranks, granted, over, full)
        demand = _demand(exchange, turn, kinds)
        granted = grant(demand, held, most, ranks)
        held = held + moved(demand, granted)
        if number:
            nodes.state.drop(f"parts-{number - 1}")
            nodes.state.drop(f"wishes-{number - 1}")
        moves = _count_moves(demand, granted) + (moves if number % 2 else 0)
        number += 1
        if number % 2 == 0 and _is_done(number // 2, moves, nodes.buckets.num_ids, bool((held > most).any()), rule):
            break
    exchange.run(count, [KeepParts(replace(turn, number=number, granted=granted))])
    nodes.state.drop(f"wishes-{number - 1}")
    return held


def _demand(exchange: TaskExchange, turn: RefinementTurn, kinds: int) -> Array:
    """[parts from, parts to, ranks, kinds] int64: what would move."""
    num_parts, ranks = turn.ranks.num_parts, turn.ranks.count
    told = exchange.run(turn.nodes.buckets.count, [SendParts(turn), Wish(turn), SumWishes(kinds)])
    demand = np.zeros((num_parts * num_parts * ranks, kinds), np.int64)
    for columns in told:
        demand[columns["way"]] = columns["loads"]
    return demand.reshape(num_parts, num_parts, ranks, kinds)


def _is_done(passes: int, moves: int, num_nodes: int, is_over: bool, rule: PartitionRule) -> bool:
    if is_over:
        return moves == 0 or passes == rule.passes + RELIEF
    return moves <= num_nodes // FEW or passes >= rule.passes


def _count_moves(demand: Array, granted: Array) -> int:
    below = np.arange(demand.shape[2]) < granted[:, :, None]
    return int((demand[..., :-2].sum(-1) * below).sum())  # every node is of one type; edges and seeds are the last
