"""One side of against.py: reads the name of a question, answers with seconds. Uses what both checkouts have alike."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import hoploom
from hoploom import NeighborLoader
from hoploom.nn import GraphSAGE

FANOUTS = [15, 10, 5]
NODES, DEGREE, FEATURES, CLASSES = 300_000, 20, 100, 16


class Side:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.closing = ExitStack()
        self.loops: dict[str, Iterator[Any]] = {}

    @cache  # noqa: B019
    def store(self) -> hoploom.Store:
        path = self.folder / "graph.store"
        if not path.exists():
            sizes = {"num_nodes": NODES, "avg_degree": DEGREE, "num_features": FEATURES, "num_classes": CLASSES}
            hoploom.generate(path, **sizes)
        return hoploom.open(path)

    @cache  # noqa: B019
    def parts(self) -> Path:
        self.store()
        path = self.folder / "graph.parts"
        if not path.exists():
            words = ["partition", self.folder / "graph.store", "-o", path, "--parts", 2, "--method", "range"]
            subprocess.run([sys.executable, "-m", "hoploom", *map(str, words)], check=True, stdout=sys.stderr)
        return path

    @cache  # noqa: B019
    def servers(self) -> list[str]:
        """A server for each part."""
        return [self.serve("--part", str(part)) for part in range(2)]

    @cache  # noqa: B019
    def server(self) -> str:
        """One for all parts, which makes batches."""
        return self.serve()

    def serve(self, *more: str) -> str:
        words = [sys.executable, "-m", "hoploom", "serve", str(self.parts()), *more]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.closing.callback(server.wait)
        self.closing.callback(server.terminate)
        assert server.stdout is not None
        found = re.search(r"127\.0\.0\.1:\d+", server.stdout.readline())
        assert found is not None
        return found[0]

    def walk(self, name: str, make: Callable[[], NeighborLoader], batches: int) -> float:
        """Seconds for so many batches of a loop that goes on and on; none is made ahead between two of them."""
        loader = self.loader(name, make)
        begin = time.perf_counter()
        for _ in islice(iter(loader), batches):
            pass
        return time.perf_counter() - begin

    def loader(self, name: str, make: Callable[[], NeighborLoader]) -> NeighborLoader:
        if name not in self.loaders:
            self.loaders[name] = make()
        return self.loaders[name]

    loaders: dict[str, NeighborLoader] = {}  # noqa: RUF012

    def sampling(self) -> float:
        empty = self.loader("sampling", lambda: NeighborLoader(self.bare(), FANOUTS, "train", batch_size=1024))
        begin = time.perf_counter()
        for _ in islice(iter(empty), 6):
            pass
        return time.perf_counter() - begin

    @cache  # noqa: B019
    def bare(self) -> hoploom.Store:
        path = self.folder / "bare.store"
        if not path.exists():
            hoploom.generate(path, num_nodes=NODES, avg_degree=DEGREE, num_features=1, num_classes=CLASSES)
        return hoploom.open(path)

    def alone(self) -> float:
        return self.walk("alone", lambda: NeighborLoader(self.store(), FANOUTS, "train", batch_size=1024), 4)

    def threads(self) -> float:
        make = lambda: NeighborLoader(self.store(), FANOUTS, "train", batch_size=1024, num_workers=2)  # noqa: E731
        return self.walk("threads", make, 12)

    def blocks(self) -> float:
        make = lambda: NeighborLoader(self.store(), FANOUTS, "train", batch_size=1024, num_workers=2, mode="blocks")  # noqa: E731
        return self.walk("blocks", make, 10)

    def small(self) -> float:
        return self.walk("small", lambda: NeighborLoader(self.store(), [2, 2], "train", batch_size=16), 1000)

    @cache  # noqa: B019
    def learner(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[Any]]:
        model = GraphSAGE(FEATURES, hidden_channels=128, num_layers=3, out_channels=CLASSES)
        loader = NeighborLoader(self.store(), FANOUTS, "train", batch_size=512)
        return model, torch.optim.Adam(model.parameters()), list(islice(iter(loader), 4))

    def steps(self) -> float:
        model, optimizer, batches = self.learner()
        begin = time.perf_counter()
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch), batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - begin

    def served(self) -> float:
        def make() -> NeighborLoader:
            there = self.closing.enter_context(hoploom.connect(self.server()))
            return NeighborLoader(there, FANOUTS, "train", batch_size=512, num_workers=2)

        return self.walk("served", make, 8)

    def remote(self) -> float:
        def make() -> NeighborLoader:
            there = self.closing.enter_context(hoploom.connect(self.servers(), made="here"))
            return NeighborLoader(there, FANOUTS, "train", batch_size=512, num_workers=2)

        return self.walk("remote", make, 8)

    def commit(self) -> str:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        at = Path(hoploom.__file__).parent
        return subprocess.run(command, cwd=at, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    side = Side(Path(sys.argv[1]))
    with side.closing:
        for line in sys.stdin:
            print(json.dumps(getattr(side, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
