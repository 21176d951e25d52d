"""Map global ids to batch-local ids on the device, by first occurrence. Costs memory, but the host never waits.

Results equal those of hoploom.ops.NodeMap, in whatever order programs run. A map is a table with one slot per node. The
slot holds the node's local id. During a hop a new node has none yet: its slot holds a claim, the number of one of its
picks, which is the batch's size + the pick's index. Claims are greater than all local ids, so an atomic minimum keeps
the first pick. All state is in tensors with fixed addresses: once one batch has sized the map, a batch can be captured
in a CUDA graph. If a batch exceeds its capacity, only its size is valid: make the batch again with more capacity.
`trees` are seed numbers in disjoint sampling.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hoploom.ops.kernels.launch import (
    INT32_MAX,
    SOURCE_OUT_OF_RANGE,
    DeviceFrontier,
    DevicePicks,
    blocks_of,
    kernel,
    launch,
)
from hoploom.ops.kernels.philox import mix
from hoploom.ops.sample import MAP_BUDGET

BLOCK = 1024
HASHED_BLOCK = 128  # one pick per thread, because picks probe for unequal times
MOST_PROGRAMS = 512  # to empty a map
FIRST_TABLE = 1024


class Slots:
    """The table of a DeviceNodeMap, with one entry (slot) per node. Used slots are recorded, to be emptied later."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.slots = _empty_slots(num_slots, device)
        self.homes = torch.empty(0, dtype=torch.int32, device=device)  # the slot of each node of the batch
        self.state = torch.zeros(2, dtype=torch.int64, device=device)
        self.used, self.lost = self.state[0], self.state[1]
        self.is_torn = False  # an operation failed half-way: its claims are not recorded

    def begin(self, capacity: int, num_slots: int) -> None:
        """Empty the table, and allocate memory for `capacity` nodes and at least `num_slots` slots."""
        size = self.slots.numel()
        if self.is_torn:
            self.used.fill_(self.homes.numel() + 1)  # empties all slots
        programs = min(MOST_PROGRAMS, *blocks_of(size, BLOCK))
        arguments = self.slots, self.homes, self.used, self.homes.numel(), size
        launch(forget, (programs,), *arguments, device=self.device, BLOCK=BLOCK)
        self.state.zero_()
        if num_slots > size:
            self.slots = _empty_slots(num_slots, self.device)
        if capacity > self.homes.numel():
            self.homes = torch.empty(capacity, dtype=torch.int32, device=self.device)


class DeviceNodeMap:
    """A map from the node ids of one type to local ids in a batch, on one CUDA stream. Each batch reuses its memory."""

    def __init__(self, num_nodes: int, device: torch.device, budget: int = MAP_BUDGET) -> None:
        self.num_nodes, self.device = num_nodes, device
        is_direct = num_nodes <= min(budget // 4, INT32_MAX)
        self._direct = Slots(num_nodes, device) if is_direct else None
        self._hashed: Slots | None = None
        self._slots = self._direct
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        # The batch's nodes and, in disjoint sampling, their trees: [capacity] each, with the size in use on the device.
        self.nodes = torch.empty(0, dtype=torch.int64, device=device)
        self.trees: Tensor | None = None

    def begin(self, nodes: Tensor, trees: Tensor | None = None) -> None:
        """Empty the map and start a batch in the arrays `nodes` and `trees`, whose length is the batch's capacity."""
        capacity = nodes.numel()
        assert capacity < INT32_MAX, "a batch holds at most 2^31 nodes"
        assert trees is None or trees.numel() == capacity
        self.nodes, self.trees = nodes, trees
        if self._direct is not None and trees is None:
            self._slots = self._direct
            self._slots.begin(capacity, self.num_nodes)
            return
        num_slots = max(FIRST_TABLE, triton.next_power_of_2(2 * capacity))
        self._slots = self._hashed = self._hashed or Slots(num_slots, self.device)
        self._slots.begin(capacity, num_slots)

    def add_seeds(self, nodes: Tensor, trees: Tensor | None, size: Tensor, faults: Tensor) -> None:
        """Add the seeds, repeated ones included, and write their number to `size`. Look-ups find first occurrences.

        An array that is longer than the number of seeds ends in -1.
        """
        num_seeds = nodes.numel()
        size.copy_((nodes >= 0).sum())
        if num_seeds == 0:
            return
        found = self._scratch(num_seeds)
        slots = self._begun()
        self._claim(found, nodes, (self._zero, size, self._zero, faults), (None, trees, None, None))
        arguments = found, nodes, trees, self.nodes, self.trees, slots.homes, slots.used, size
        sizes = num_seeds, self.nodes.numel(), slots.homes.numel()
        launch(place_seeds, blocks_of(num_seeds, BLOCK), *arguments, *sizes, device=self.device, BLOCK=BLOCK)
        slots.is_torn = False

    def add(
        self, picks: DevicePicks, frontier: DeviceFrontier, local: Tensor, before: Tensor, after: Tensor, faults: Tensor
    ) -> None:
        """Append new nodes; write each pick's local id to `local`. `before`, `after`: the batch's sizes, [] int64.

        A source out of range sets `faults`; a batch that is too large does not grow.
        """
        assert before.data_ptr() != after.data_ptr()
        most = picks.span.most
        if most == 0:
            after.copy_(before)
            return
        assert self.nodes.numel() + most < INT32_MAX, "a hop and the nodes before it are at most 2^31"
        places = min(picks.sources.numel(), local.numel())
        found, firsts, numbers = self._scratch(most), self._scratch(most), self._scratch(most)
        slots = self._begun()
        sources, begin, end = picks.sources[:places], picks.span.begin, picks.span.end
        tree_from = (picks.destinations, frontier.trees) if self.trees is not None else (None, None)
        self._claim(found, sources, (begin, end, before, faults), (*tree_from, self.nodes, self.trees))
        grid = blocks_of(most, BLOCK)
        launch(settle, grid, slots.slots, found, before, numbers, firsts, most, device=self.device, BLOCK=BLOCK)
        ranks = torch.cumsum(firsts, 0, dtype=torch.int32)
        read = slots.slots, found, numbers, ranks, sources, begin, end, before
        written = after, slots.used, slots.lost, slots.homes, self.nodes, local
        sizes = places, most, self.nodes.numel(), slots.homes.numel()
        trees = *tree_from, self.trees
        launch(assign, grid, *read, *written, *sizes, *trees, device=self.device, BLOCK=BLOCK)
        slots.is_torn = False

    def _claim(self, found: Tensor, sources: Tensor, span: tuple[Tensor, ...], keys: tuple[Tensor | None, ...]) -> None:
        """Start the kernel that enters each pick in the table, and writes the index of the pick's slot to `found`."""
        slots, most = self._begun(), found.numel()
        slots.is_torn = True
        read = slots.slots, found, sources, *span
        sizes = sources.numel(), most, self.nodes.numel(), self.num_nodes
        if slots is self._direct:
            launch(claim_direct, blocks_of(most, BLOCK), *read, *sizes, device=self.device, BLOCK=BLOCK)
            return
        grid, table = blocks_of(most, HASHED_BLOCK), (slots.slots.numel() - 1, *keys, slots.lost)
        launch(claim_hashed, grid, *read, *sizes, *table, device=self.device, BLOCK=HASHED_BLOCK)

    def _scratch(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=self.device)

    def _begun(self) -> Slots:
        assert self._slots is not None, "begin() comes first"
        return self._slots


def _empty_slots(num_slots: int, device: torch.device) -> Tensor:
    return torch.full((num_slots,), EMPTY_SLOT, dtype=torch.int32, device=device)


# --- kernels ------------------------------------------------------------------------------------

EMPTY_SLOT = 2**31 - 1
PROBES = 256  # at half load, the chance of so many full slots in a row is below 2^-60

EMPTY = tl.constexpr(EMPTY_SLOT)
NEVER = tl.constexpr(-1)  # no slot has this value, so compare-and-swap with it changes nothing
MOST_PROBES = tl.constexpr(PROBES)
BAD_SOURCE = tl.constexpr(SOURCE_OUT_OF_RANGE)


@triton.jit
def picks_of_block(sources, begin, end, before, num_places, most, capacity, num_nodes, faults, BLOCK: tl.constexpr):
    """Return the picks of this program, their sources, the mask of valid picks, and the values of `begin`, `before`."""
    pick = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(begin)
    size = tl.load(before)
    live = (pick < most) & (pick < tl.load(end) - first) & (first + pick < num_places) & (size <= capacity)
    source = tl.load(sources + first + pick, mask=live, other=0)
    inside = (source >= 0) & (source < num_nodes)
    if tl.max((live & (inside == 0)).to(tl.int32), 0) > 0:
        tl.atomic_max(faults, tl.full([], BAD_SOURCE, tl.int64))
    return pick, source, live & inside, first, size


@kernel
def claim_direct(
    slots, found, sources, begin, end, before, faults, num_places, most, capacity, num_nodes, BLOCK: tl.constexpr
):  # fmt: skip
    """Write each pick's number to slots[source]; the lowest stays.

    The number is the batch's size plus the pick's index; found[pick] gets the source, or -1 if the pick is invalid.
    """
    pick, source, live, _, size = picks_of_block(
        sources, begin, end, before, num_places, most, capacity, num_nodes, faults, BLOCK
    )  # fmt: skip
    tl.atomic_min(slots + source, (size + pick).to(tl.int32), mask=live, sem="relaxed")
    tl.store(found + pick, tl.where(live, source, -1).to(tl.int32), mask=pick < most)


@triton.jit
def tree_of(trees, destinations, place, live):
    """Return the seed number of the pick, or without `destinations` of the seed, at `place`; 0 without `trees`."""
    tree = place ^ place
    if trees is not None:
        if destinations is not None:
            place = tl.load(destinations + place, mask=live, other=0)
        tree = tl.load(trees + place, mask=live, other=0)
    return tree


@kernel
def claim_hashed(
    slots, found, sources, begin, end, before, faults, num_places, most, capacity, num_nodes,
    slot_mask, destinations, trees, nodes, node_trees, lost, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do as `claim_direct`, in a hash table of (source, seed number); set `lost` if PROBES tries found no slot."""
    pick, source, live, first, size = picks_of_block(
        sources, begin, end, before, num_places, most, capacity, num_nodes, faults, BLOCK
    )  # fmt: skip
    tree = tree_of(trees, destinations, first + pick, live)
    claim = (size + pick).to(tl.int32)
    zero = (pick ^ pick).to(tl.uint64)
    slot = mix(mix(zero, tree.to(tl.uint64)), source.to(tl.uint64)).to(tl.int64) & slot_mask
    home = tl.full([BLOCK], -1, tl.int64)
    pending = live
    probes = 0
    while (tl.max(pending.to(tl.int32), 0) > 0) & (probes < MOST_PROBES):
        # A stale read may show an empty slot; the compare corrects that. The owner of a slot never changes.
        holder = tl.load(slots + slot, mask=pending, other=0)
        tries = pending & (holder == EMPTY)
        at = tl.where(tries, slot, pick & slot_mask)  # atomic_cas has no mask: idle lanes use other slots
        old = tl.atomic_cas(slots + at, tl.where(tries, EMPTY, NEVER), claim, sem="relaxed")
        won = tries & (old == EMPTY)
        holder = tl.where(tries, old, holder).to(tl.int64)
        is_node = pending & (won == 0) & (holder < size)
        is_pick = pending & (won == 0) & (holder >= size)
        there = first + holder - size
        held_source = tl.load(sources + there, mask=is_pick, other=0)
        held_tree = tree_of(trees, destinations, there, is_pick)
        if nodes is not None:
            held_source = tl.where(is_node, tl.load(nodes + holder, mask=is_node, other=0), held_source)
            if node_trees is not None:
                held_tree = tl.where(is_node, tl.load(node_trees + holder, mask=is_node, other=0), held_tree)
        same = won | ((is_node | is_pick) & (held_source == source) & (held_tree == tree))
        home = tl.where(same, slot, home)
        pending = pending & (same == 0)
        slot = tl.where(pending, (slot + 1) & slot_mask, slot)
        probes += 1
    if tl.max(pending.to(tl.int32), 0) > 0:
        tl.atomic_max(lost, tl.full([], 1, tl.int64))
    tl.atomic_min(slots + home, claim, mask=home >= 0, sem="relaxed")
    tl.store(found + pick, home.to(tl.int32), mask=pick < most)


@kernel
def settle(slots, found, before, claims, is_first, most, BLOCK: tl.constexpr):
    """Copy the value in each pick's slot to `claims`. Set is_first[pick] if the value is the pick's own number."""
    pick = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = pick < most
    home = tl.load(found + pick, mask=live, other=-1)
    claim = tl.load(slots + home, mask=home >= 0, other=-1)
    tl.store(claims + pick, claim, mask=live)
    tl.store(is_first + pick, (claim == tl.load(before) + pick).to(tl.int32), mask=live)


@kernel
def assign(
    slots, found, claims, ranks, sources, begin, end, before, after, used, lost, homes, nodes, local,
    num_places, most, capacity, num_noted, destinations, trees, node_trees, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the local id of each pick's source to `local`; append new nodes (sources of first picks) to `nodes`.

    `ranks` is the running sum of `is_first`, which `settle` has set. Nodes beyond the capacity are counted but not
    written; local ids are limited to the capacity - 1.
    """
    pick = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(begin)
    size = tl.load(before)
    live = (pick < most) & (pick < tl.load(end) - first) & (first + pick < num_places)
    home = tl.load(found + pick, mask=live, other=-1)
    claim = tl.load(claims + pick, mask=home >= 0, other=0)
    is_new = (home >= 0) & (claim >= size)
    rank = tl.load(ranks + (claim - size), mask=is_new, other=0)
    node = tl.where(is_new, size + rank - 1, claim)
    tl.store(local + first + pick, tl.minimum(node, capacity - 1), mask=live)
    appends = is_new & (claim == size + pick)
    fits = appends & (node < capacity)
    source = tl.load(sources + first + pick, mask=fits, other=0)
    tl.store(nodes + node, source, mask=fits)
    if node_trees is not None:
        tl.store(node_trees + node, tree_of(trees, destinations, first + pick, fits), mask=fits)
    tl.store(homes + node, home, mask=appends & (node < num_noted))
    tl.store(slots + home, node.to(tl.int32), mask=appends)
    if tl.program_id(0) == 0:
        total = tl.load(ranks + most - 1)
        tl.store(used, tl.load(used) + total)
        too_many = (tl.load(lost) > 0) & (size + total <= capacity)
        tl.store(after, tl.where(too_many, capacity + 1, size + total))


@kernel
def place_seeds(
    found, seeds, trees, nodes, node_trees, homes, used, size, most, capacity, num_noted, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the seeds as the batch's first nodes, seed i at index i, and record their slots in `homes`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    num_seeds = tl.load(size)
    live = (place < most) & (place < num_seeds)
    fits = live & (place < capacity)
    tl.store(nodes + place, tl.load(seeds + place, mask=fits, other=0), mask=fits)
    if node_trees is not None:
        tl.store(node_trees + place, tl.load(trees + place, mask=fits, other=0), mask=fits)
    tl.store(homes + place, tl.load(found + place, mask=live, other=-1), mask=live & (place < num_noted))
    if tl.program_id(0) == 0:
        tl.store(used, num_seeds)


@kernel
def forget(slots, homes, used, num_noted, num_slots, BLOCK: tl.constexpr):
    """Empty the slots that the last batch used, or all slots if it used more than `homes` can record."""
    count = tl.load(used)
    is_all = count > num_noted
    count = tl.where(is_all, num_slots, count)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        live = place < count
        noted = tl.load(homes + place, mask=live & (is_all == 0), other=-1).to(tl.int64)
        slot = tl.where(is_all, place, noted)
        tl.store(slots + slot, EMPTY, mask=live & (slot >= 0))
