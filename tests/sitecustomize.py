"""Import two slow packages on first use, in every Python process that a test starts.

PyG imports all its data sets (which import pandas) and torch's compiler. Most trainers of tests use neither, and they
are half of the processor time of a start. `import` and `from` behave as before.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any

LATE = ("torch._dynamo", "torch_geometric.datasets")
LOCK = RLock()


class LateModule(ModuleType):
    """A module that runs its code when an attribute is missing; other threads wait until it has run."""

    def __getattr__(self, name: str) -> Any:
        with LOCK:
            if not name.startswith("__") or name == "__all__":
                loader = self.__dict__.pop("__late__", None)
                if loader is not None:
                    loader.exec_module(self)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class LateLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__late__"] = self.loader


class LateFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target) if name in LATE else None
        if found is not None and found.loader is not None:
            found.loader = LateLoader(found.loader)
        return found


sys.meta_path.insert(0, LateFinder())
