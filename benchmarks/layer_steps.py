"""The layers that edge_layers.py compares, made from either library, and a step of one: forward and backward.

A peer's process imports this, too, so that both sides measure in the same way.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, EDGE_DIM = 256, 4, 16
LAYERS: dict[str, Callable[[Any], Any]] = {
    "GAT": lambda of: of.GATConv(WIDTH, WIDTH // HEADS, HEADS, edge_dim=EDGE_DIM),
    "GATv2": lambda of: of.GATv2Conv(WIDTH, WIDTH // HEADS, HEADS, edge_dim=EDGE_DIM),
    "GINE": lambda of: of.GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=EDGE_DIM),
}


class Step:
    """A layer on the edges of one layer of a batch, whose destinations are the first sources."""

    def __init__(self, call: Callable[[Tensor], Tensor], num_sources: int) -> None:
        self.call = call
        self.x = torch.randn(num_sources, WIDTH)
        self.grad = torch.ones_like(call(self.x))

    def seconds(self) -> float:
        begin = time.perf_counter()
        self.call(self.x.detach().requires_grad_()).backward(self.grad)
        return time.perf_counter() - begin

    def peak(self) -> int:
        """Bytes that a step needs at most, beyond those that the process has before it."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = _memory("VmRSS")
        self.seconds()
        return _memory("VmHWM") - before


def _memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
