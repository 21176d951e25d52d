"""What tests of inference compare with, and what their ranks do, in processes of their own or as threads of one."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom import PeerError
from hoploom.inference import Inference, infer
from hoploom.nn import GNN, Shape
from hoploom.train import Context, NodeClassification
from support.graphs import random_graph
from support.stores import left_in

SMALL = 2048  # bytes: slices of a few nodes
COLUMNS = ("embedding", "output", "prediction")
EVERYTHING = Inference(task=NodeClassification(4), columns=COLUMNS, memory=SMALL)  # 4: outputs of the tests' models


def graph_with_loops() -> Data:
    """60 nodes, edges in no order, some from a node to itself, and two nodes without any in-edge."""
    graph = random_graph(60, 400, 1)
    graph.edge_index[:, :8] = torch.arange(8)
    graph.edge_index[1] %= 58
    return graph


def read(folder: Path, column: str) -> Tensor:
    return torch.tensor(pyarrow.parquet.read_table(folder)[column].to_pylist())


def forward(model: GNN, graph: Data | HeteroData) -> Any:
    with torch.no_grad():
        return model.eval()(graph)


def assert_equal_to_forward(out: Path, model: GNN, graph: Data | HeteroData) -> None:
    whole = forward(model, graph)
    by_type = {"node": whole} if isinstance(whole, Tensor) else whole
    assert left_in(out) == sorted(by_type)
    for node_type, rows in by_type.items():
        torch.testing.assert_close(read(out / node_type, "output"), rows, atol=1e-5, rtol=1e-5)
        assert read(out / node_type, "id").tolist() == list(range(len(rows)))
        assert read(out / node_type, "prediction").tolist() == rows.argmax(dim=1).tolist()


def model_of(store: hoploom.Store, kind: str = "sage") -> GNN:
    torch.manual_seed(0)
    return GNN(kind, store.schema, Shape(hidden=8, num_layers=3, out=4))


def infer_and_fail(context: Context, folder: str) -> None:
    """Two inferences together: one by a wrapped model, one in which rank 1 fails."""
    store = hoploom.from_pyg(random_graph(60, 400, 1))
    for kind in ("sage", "gcn"):
        wrapped = context.wrap(model_of(store, kind))
        infer(wrapped, store, Path(folder) / kind, context, inference=EVERYTHING)

    def fail(done: int, total: int) -> None:
        if context.rank == 1 and done > total // 2:
            raise ZeroDivisionError("rank 1 has had enough")

    try:
        infer(model_of(store), store, Path(folder) / "failed", context, inference=EVERYTHING, progress=fail)
    except (PeerError, ZeroDivisionError) as error:
        (Path(folder) / f"told-{context.rank}").write_text(f"{type(error).__name__}: {error}")


class ThreadContext:
    """Ranks that are threads of one process: enough of a Context for `infer`."""

    def __init__(self, rank: int, world_size: int, board: "Board") -> None:
        self.rank, self.world_size, self._board = rank, world_size, board

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sync_buffers(self, model: nn.Module) -> None:
        pass

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self._board.exchange(self.rank, tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        sent: Tensor = self._board.exchange(self.rank, tensor)[0]
        return sent


class Board:
    def __init__(self, size: int) -> None:
        self._barrier, self._values = threading.Barrier(size, timeout=60), [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values: list[Any] = list(self._values)
        self._barrier.wait()
        return values


def in_threads(world_size: int, call: Callable[[Any], object]) -> list[BaseException | None]:
    """Call with a context per rank, all at once; what each raised."""
    board = Board(world_size)
    raised: list[BaseException | None] = [None] * world_size

    def run(rank: int) -> None:
        try:
            call(ThreadContext(rank, world_size, board))
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return raised
