"""GLT's distributed loaders over one graph, as its own examples start them, driven by a benchmark: JSON in, JSON out.

Its examples are examples/distributed/dist_train_sage_supervised.py and server_client_mode/: their partitioning, groups
and worker options, on CPUs, and without a model. Runs in a venv of its own: `python glt_cluster_peer.py`.
"""

import contextlib
import json
import os
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from loader_peer import Graph  # noqa: E402

Options = dict[str, Any]
HOST = "127.0.0.1"
CPU = torch.device("cpu")


def out_edges(graph: Graph) -> torch.Tensor:
    """GLT's examples follow out-edges; ours are in-edges."""
    return graph.edge_index().flip(0)


def partition(graph: Graph, folder: Path, num_parts: int) -> None:
    """Once: nodes at random, out-edges with their source, rows with their node."""
    import graphlearn_torch as glt

    if folder.exists():
        return
    begun = folder.with_suffix(".begun")
    edges = out_edges(graph)
    parts = glt.partition.RandomPartitioner(str(begun), num_parts, graph.num_nodes, edges, node_feat=graph.x)
    parts.partition()
    torch.save(graph.y, begun / "label.pt")
    begun.rename(folder)


def whole(files: Options) -> Any:
    """One part that has all of it; GLT's partitioner makes two or more."""
    import graphlearn_torch as glt

    graph = Graph(**files)
    books = {"node_pb": torch.zeros(graph.num_nodes, dtype=torch.int64)}
    books["edge_pb"] = torch.zeros(len(graph.indices), dtype=torch.int64)
    found = glt.distributed.DistDataset(1, 0, **books)
    found.init_graph(edge_index=out_edges(graph), graph_mode="CPU")
    found.init_node_features(node_feature_data=graph.x, with_gpu=False)
    found.init_node_labels(node_label_data=graph.y)
    return found


def part(folder: str, rank: int) -> Any:
    import graphlearn_torch as glt

    found = glt.distributed.DistDataset()
    labels = str(Path(folder) / "label.pt")
    found.load(folder, rank, graph_mode="CPU", feature_with_gpu=False, whole_node_label_file=labels)
    return found


def worker_options(mode: str, port: int) -> Any:
    """As the examples have them."""
    import graphlearn_torch.distributed as dist

    meeting = {"master_addr": HOST, "master_port": port}
    if mode == "collocated":
        return dist.CollocatedDistSamplingWorkerOptions(**meeting)
    common = {"num_workers": 1, "worker_devices": [CPU], "worker_concurrency": 4, **meeting}
    if mode == "sampler processes":
        return dist.MpDistSamplingWorkerOptions(channel_size="1GB", pin_memory=False, **common)
    return dist.RemoteDistSamplingWorkerOptions(
        server_rank=[0], buffer_size="1GB", prefetch_size=2, worker_key="train", **common
    )


def serve(told: Options) -> None:
    import graphlearn_torch.distributed as dist

    torch.set_num_threads(told["threads"])
    meeting = {"master_addr": HOST, "master_port": told["ports"][0]}
    counts = {"num_servers": 1, "num_clients": 1, "server_rank": 0}
    dist.init_server(dataset=whole(told["graph"]), num_rpc_threads=16, **counts, **meeting)
    dist.wait_and_shutdown_server()


def train(rank: int, told: Options, orders: Any) -> None:
    """One trainer: an epoch for every order."""
    import graphlearn_torch.distributed as dist

    torch.set_num_threads(told["threads"])
    served = told["mode"] == "server-client"
    if served:
        meeting = {"master_addr": HOST, "master_port": told["ports"][0]}
        dist.init_client(num_servers=1, num_clients=1, client_rank=0, num_rpc_threads=4, **meeting)
    else:
        dist.init_worker_group(told["trainers"], rank, "trainer")
    seeds = torch.tensor(told["seeds"]).chunk(told["trainers"])[rank]
    if served:
        path = Path(told["folder"]).with_suffix(".seeds")
        torch.save(seeds, path)
    loader = dist.DistNeighborLoader(
        data=None if served else part(told["folder"], rank),
        num_neighbors=told["fanouts"],
        input_nodes=[str(path)] if served else seeds,
        batch_size=told["batch_size"],
        shuffle=True,
        collect_features=True,
        to_device=CPU,
        random_seed=1,  # without one, GLT asks the system for a random number for every node: 40 times as slow
        worker_options=worker_options(told["mode"], told["ports"][1]),
    )
    orders.send("ready")
    while orders.recv() == "epoch":
        begin = time.perf_counter()
        rows = [len(batch.x) for batch in loader]
        orders.send({"seconds": time.perf_counter() - begin, "batches": len(rows), "rows": sum(rows)})


def free_ports(count: int) -> list[int]:
    """Of those that the system gives to nobody by itself: GLT asks it for more before it takes them."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 5000, 32_000):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            found.append(port)
        if len(found) == count:
            break
    return found


class Trainers:
    """The processes of one mode."""

    def __init__(self, told: Options) -> None:
        context = mp.get_context("spawn")
        told["ports"] = free_ports(2)
        self._servers = [context.Process(target=serve, args=(told,))] if told["mode"] == "server-client" else []
        pipes = [context.Pipe() for _ in range(told["trainers"])]
        self._orders = [pipe[0] for pipe in pipes]
        self._trainers = [context.Process(target=train, args=(rank, told, pipe[1])) for rank, pipe in enumerate(pipes)]
        for one in [*self._servers, *self._trainers]:
            one.start()
        self._answers()

    def _answers(self) -> list[Any]:
        while not all(pipe.poll(0.1) for pipe in self._orders):
            if not all(one.is_alive() for one in [*self._servers, *self._trainers]):
                self.end()
                raise SystemExit("a process of GLT has ended")
        return [pipe.recv() for pipe in self._orders]

    def epoch(self) -> Options:
        for pipe in self._orders:
            pipe.send("epoch")
        found = self._answers()
        return {"seconds": max(one["seconds"] for one in found), "batches": max(one["batches"] for one in found)}

    def end(self) -> None:
        """GLT's own ending waits for others: these have nothing left to do."""
        for one in [*self._trainers, *self._servers]:
            for child in _children(one.pid):
                os.kill(child, 9)
            one.kill()
            one.join()


def _children(pid: int | None) -> list[int]:
    """Its own sampler processes, whichever of its threads has started them."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; only answers go to the other side
    try:
        import graphlearn_torch
    except ImportError as error:
        raise SystemExit(f"GLT cannot be imported: {error}") from error
    versions = f"GLT {getattr(graphlearn_torch, '__version__', '0.2.4')}, torch {torch.__version__}"
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    trainers: Trainers | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: Options = {}
        if request.pop("ask") == "make":
            if trainers is not None:
                trainers.end()
            if request["mode"] != "server-client":
                partition(Graph(**request["graph"]), Path(request["folder"]), request["trainers"])
            trainers = Trainers(request)
        else:
            assert trainers is not None
            answer = trainers.epoch()
        print(json.dumps(answer), file=answers, flush=True)
    if trainers is not None:
        trainers.end()


if __name__ == "__main__":
    main()
