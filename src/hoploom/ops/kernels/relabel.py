"""Map global ids to batch-local ids on the device, in order of first sight. Trades memory for no host synchronization.

Equal to hoploom.ops.NodeMap in whatever order programs run: see claims.py. All state is in tensors with fixed
addresses, so a batch can be captured in a CUDA graph and replayed, after an eager batch has sized the map. A batch
larger than its capacity reports its size and is otherwise invalid: make it again with more capacity.
"""

import torch
import triton
from torch import Tensor

from hoploom.ops.kernels import claims
from hoploom.ops.kernels.forms import DeviceFrontier, DevicePicks
from hoploom.ops.kernels.launch import INT32_MAX, blocks_of, launch
from hoploom.ops.relabel import MAP_BUDGET

BLOCK = 1024
HASHED_BLOCK = 128  # one pick a thread: they probe for unequal times
MOST_PROGRAMS = 512  # that empty a map
FIRST_TABLE = 1024


class Slots:
    """A slot table, direct or hashed, with a record of the slots that the last batch used."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.slots = _empty_slots(num_slots, device)
        self.homes = torch.empty(0, dtype=torch.int32, device=device)  # the slot of each node of the batch
        self.state = torch.zeros(2, dtype=torch.int64, device=device)
        self.used, self.lost = self.state[0], self.state[1]
        self.is_torn = False  # an operation failed half-way: its claims are not recorded
        self._is_captured = False

    def begin(self, capacity: int, num_slots: int) -> None:
        """Empty the table, and provide `capacity` nodes and at least `num_slots` slots."""
        if self.is_torn:
            self.slots.fill_(claims.EMPTY_SLOT)
        else:
            self._forget()
        self.state.zero_()
        self.is_torn = False
        grows = num_slots > self.slots.numel(), capacity > self.homes.numel()
        is_capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not (any(grows) and (is_capturing or self._is_captured)), "a captured map keeps its size"
        self._is_captured |= is_capturing
        if grows[0]:
            self.slots = _empty_slots(num_slots, self.device)
        if grows[1]:
            self.homes = torch.empty(capacity, dtype=torch.int32, device=self.device)

    def _forget(self) -> None:
        num_slots = self.slots.numel()
        programs = min(MOST_PROGRAMS, *blocks_of(num_slots, BLOCK))
        arguments = self.slots, self.homes, self.used, self.homes.numel(), num_slots
        launch(claims.forget, (programs,), *arguments, device=self.device, BLOCK=BLOCK)


class DeviceNodeMap:
    """The nodes of one type in a batch, on one stream; reused for the next batch."""

    def __init__(self, num_nodes: int, device: torch.device, budget: int = MAP_BUDGET) -> None:
        self.num_nodes, self.device = num_nodes, device
        is_direct = num_nodes <= min(budget // 4, INT32_MAX)
        self._direct = Slots(num_nodes, device) if is_direct else None
        self._hashed: Slots | None = None
        self._slots = self._direct
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        # [capacity] each, with the size on the device; trees if the batch has them.
        self.nodes = torch.empty(0, dtype=torch.int64, device=device)
        self.trees: Tensor | None = None

    def begin(self, nodes: Tensor, trees: Tensor | None = None) -> None:
        """Start a batch in these arrays, which limit its nodes; empty the map."""
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
        """Add the seeds, including repeated ones, each found at its first position, and write their number."""
        num_seeds = nodes.numel()
        size.fill_(num_seeds)
        if num_seeds == 0:
            return
        found = self._scratch(num_seeds)
        slots = self._begun()
        slots.is_torn = True
        self._claim(found, nodes, (self._zero, size, self._zero, faults), (None, trees, None, None))
        arguments = found, nodes, trees, self.nodes, self.trees, slots.homes, slots.used
        sizes = num_seeds, self.nodes.numel(), slots.homes.numel()
        launch(claims.place_seeds, blocks_of(num_seeds, BLOCK), *arguments, *sizes, device=self.device, BLOCK=BLOCK)
        slots.is_torn = False

    def add(
        self, picks: DevicePicks, frontier: DeviceFrontier, local: Tensor, before: Tensor, after: Tensor, faults: Tensor
    ) -> None:
        """Write the picks' local ids; append new nodes. `before` and `after` are sizes, two tensors [] int64.

        Sources out of range get some local id and a fault. The size of a batch that is too large stays unchanged.
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
        slots.is_torn = True
        sources, begin, end = picks.sources[:places], picks.span.begin, picks.span.end
        tree_from = (picks.destinations, frontier.trees) if self.trees is not None else (None, None)
        self._claim(found, sources, (begin, end, before, faults), (*tree_from, self.nodes, self.trees))
        grid = blocks_of(most, BLOCK)
        launch(claims.settle, grid, slots.slots, found, before, numbers, firsts, most, device=self.device, BLOCK=BLOCK)
        ranks = torch.cumsum(firsts, 0, dtype=torch.int32)
        read = slots.slots, found, numbers, ranks, sources, begin, end, before
        written = after, slots.used, slots.lost, slots.homes, self.nodes, local
        sizes = places, most, self.nodes.numel(), slots.homes.numel()
        trees = *tree_from, self.trees
        launch(claims.assign, grid, *read, *written, *sizes, *trees, device=self.device, BLOCK=BLOCK)
        slots.is_torn = False

    def _claim(self, found: Tensor, sources: Tensor, span: tuple[Tensor, ...], keys: tuple[Tensor | None, ...]) -> None:
        """Claim slots. keys: the lookup of the picks' trees, then the batch's current nodes and trees."""
        slots, most = self._begun(), found.numel()
        read = slots.slots, found, sources, *span
        sizes = sources.numel(), most, self.nodes.numel(), self.num_nodes
        if slots is self._direct:
            launch(claims.claim_direct, blocks_of(most, BLOCK), *read, *sizes, device=self.device, BLOCK=BLOCK)
            return
        grid, table = blocks_of(most, HASHED_BLOCK), (slots.slots.numel() - 1, *keys, slots.lost)
        launch(claims.claim_hashed, grid, *read, *sizes, *table, device=self.device, BLOCK=HASHED_BLOCK)

    def _scratch(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=self.device)

    def _begun(self) -> Slots:
        assert self._slots is not None, "begin() comes first"
        return self._slots


def _empty_slots(num_slots: int, device: torch.device) -> Tensor:
    return torch.full((num_slots,), claims.EMPTY_SLOT, dtype=torch.int32, device=device)
