"""Epochs of GraphSAGE on a GPU through `fit`, as the gpu benchmarks time and profile them; and PyG's layers beside.

Run by itself it takes two small epochs kernel by kernel: for compute-sanitizer, which needs no graphs and no figures.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import gpu
import graph
import torch
from gpu import Workload
from stepping import Reports
from torch import Tensor

import hoploom
from hoploom import NeighborLoader
from hoploom.nn import GraphSAGE
from hoploom.store import Store
from hoploom.train import Learner, NodeClassification, Training, fit
from hoploom.train.loop import Outcome

LAYERS = 3
CPU_THREADS = 16  # of the loader that makes batches on the CPU
Precision = Literal["fp32", "bf16"]


class Bell(Reports):
    """Stands where a run's journal does: calls at every epoch's end, when all its losses are known."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        super().__init__()
        self._at_end = at_end

    def epoch(self, *_: object, **__: object) -> None:
        self._at_end()


@dataclass(frozen=True)
class Epochs:
    """Training runs over some seeds of a store; `placed` has it where kernels read it."""

    store: Store
    placed: Store
    work: Workload
    num_steps: int

    @property
    def num_classes(self) -> int:
        (node_type,) = self.store.schema.node_types
        return int(self.store.parts[0].tables[node_type.name, "y"].rows.max()) + 1

    @property
    def num_features(self) -> int:
        return self.store.schema.node_types[0].fields["x"].shape[0]

    @property
    def device(self) -> torch.device:
        assert self.placed.placed is not None
        return self.placed.placed.device

    def _loader(self, store: Store, **options: Any) -> NeighborLoader:
        size = self.work.batch_size
        seeds = graph.seeds_at(store, 0, self.num_steps * size)
        return NeighborLoader(store, list(self.work.fanouts), seeds, shuffle=True, batch_size=size, **options)

    def _adam(self, model: torch.nn.Module) -> torch.optim.Adam:
        on_gpu = self.device.type == "cuda"
        return torch.optim.Adam(model.parameters(), lr=0.001, fused=on_gpu, capturable=on_gpu)

    def run(self, epochs: int, precision: Precision, *, whole: bool, at_end: Callable[[], None]) -> Outcome:
        """Train from the beginning; `at_end` is called after every epoch."""
        torch.manual_seed(0)
        with hoploom.init(device=str(self.device)) as context:
            model = context.wrap(GraphSAGE(self.num_features, self.work.hidden, LAYERS, self.num_classes))
            threads = 2 if self.device.type == "cuda" else 0  # the interpreter is for one thread at a time
            loader = self._loader(self.placed, num_workers=threads)
            learner = Learner(model, self._adam(model), NodeClassification(num_classes=self.num_classes), loader)
            training = Training(epochs=epochs, precision=precision, progress=False)
            stepper = hoploom.WholeStep if whole else None
            return fit(learner, training, context, journal=Bell(at_end), stepper=stepper)  # type: ignore[arg-type]

    def peer(self) -> Callable[[], Tensor]:
        """An epoch with PyG's layers, batches from CPU threads; returns its mean loss, on the device."""
        from torch_geometric.nn import GraphSAGE as PyGSAGE

        torch.manual_seed(0)
        model = PyGSAGE(self.num_features, self.work.hidden, LAYERS, self.num_classes).to(self.device)
        optimizer = self._adam(model)
        loader = self._loader(self.store, num_workers=CPU_THREADS, device=str(self.device))

        def epoch() -> Tensor:
            total = torch.zeros((), device=self.device)
            for batch in loader:
                hops = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes}
                hops |= {"num_sampled_edges_per_hop": batch.num_sampled_edges}
                out = model(batch.x, batch.edge_index, **hops)[: batch.batch_size]
                loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
            return total / self.num_steps

        return epoch


def end_times(run: Callable[[Callable[[], None]], Outcome]) -> tuple[list[float], Outcome]:
    """When the epochs of a run ended: `run` is given what to call."""
    ends: list[float] = []
    outcome = run(lambda: ends.append(time.perf_counter()))
    return ends, outcome


def main() -> None:
    """Two small epochs."""
    work, here = gpu.workload(tiny=True), gpu.device()
    store = gpu.open_store(work)
    with hoploom.place(store, topology=str(here), features=str(here)) as placed:
        epochs = Epochs(store, placed, work, work.num_steps)
        outcome = epochs.run(2, "fp32", whole=False, at_end=lambda: None)
    print(f"{outcome.steps} steps, loss {outcome.history[-1]['train_loss']:.4f}")


if __name__ == "__main__":
    main()
