"""Hoploom trains graph neural networks on graphs of any size with one script."""

import gc
from importlib import import_module
from threading import current_thread, main_thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoploom.batch import Block
    from hoploom.deploy.open import open
    from hoploom.errors import BatchError, ConfigError, DataError, HoploomError, PeerError, StoreError, TrainError
    from hoploom.gpu.placement import place
    from hoploom.gpu.whole_steps import WholeStep
    from hoploom.inference.infer import infer
    from hoploom.ingest.formats.dgl import from_dgl
    from hoploom.ingest.synthetic import generate
    from hoploom.load import HGTLoader, LinkNeighborLoader, NeighborLoader
    from hoploom.partition.partition import partition  # the package, which can be called
    from hoploom.ranks.context import init
    from hoploom.ranks.spawn import spawn
    from hoploom.sample import Edges
    from hoploom.serve.connect import connect
    from hoploom.store import Store
    from hoploom.store.from_pyg import from_pyg
    from hoploom.store.from_tensors import from_tensors
    from hoploom.train.checkpoint import Checkpoint
    from hoploom.train.evaluation import evaluate
    from hoploom.train.learner import Learner, Training
    from hoploom.train.loop import fit
    from hoploom.train.runs.run import load_run
    from hoploom.train.tasks import LinkPrediction, MultiLabel, NodeClassification, NodeRegression

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "Block",
    "Checkpoint",
    "ConfigError",
    "DataError",
    "Edges",
    "HGTLoader",
    "HoploomError",
    "Learner",
    "LinkNeighborLoader",
    "LinkPrediction",
    "MultiLabel",
    "NeighborLoader",
    "NodeClassification",
    "NodeRegression",
    "PeerError",
    "Store",
    "StoreError",
    "TrainError",
    "Training",
    "WholeStep",
    "connect",
    "evaluate",
    "fit",
    "from_dgl",
    "from_pyg",
    "from_tensors",
    "generate",
    "infer",
    "init",
    "load_run",
    "open",
    "partition",
    "place",
    "spawn",
]
# Where a name comes from, at first use: building a store needs no PyG, which takes 160 MB and a second to import.
_HOMES = {
    "Block": "batch",
    "Edges": "sample",
    "Store": "store",
    "connect": "serve.connect",
    "from_dgl": "ingest.formats.dgl",
    "from_pyg": "store.from_pyg",
    "from_tensors": "store.from_tensors",
    "generate": "ingest.synthetic",
    "open": "deploy.open",
    "place": "gpu.placement",
} | dict.fromkeys(("HGTLoader", "LinkNeighborLoader", "NeighborLoader"), "load")
_HOMES |= {
    "WholeStep": "gpu.whole_steps",
    "infer": "inference.infer",
    "init": "ranks.context",
    "spawn": "ranks.spawn",
}
_HOMES |= {"Checkpoint": "train.checkpoint", "evaluate": "train.evaluation", "fit": "train.loop"}
_HOMES |= {"load_run": "train.runs.run", "Learner": "train.learner", "Training": "train.learner"}
_HOMES |= dict.fromkeys(("LinkPrediction", "MultiLabel", "NodeClassification", "NodeRegression"), "train.tasks")
_HOMES |= {name: "errors" for name in __all__ if name.endswith("Error")}
_PUBLIC = {"inference", "load", "nn", "ops", "partition", "sample", "scale", "store", "train"}  # each has an __all__
_PACKAGES = {"batch", "config", "deploy", "ranks", "errors", "gpu", "ingest", "keys", "schema", "serve", *_PUBLIC}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_import(_HOMES[name]), name)
    if name in _PACKAGES:
        return _import(name)
    raise AttributeError(f"module 'hoploom' has no attribute {name!r}")


def _import(room: str) -> ModuleType:
    """Import without collections: they take a fifth of the time, and nothing of a module is garbage."""
    if current_thread() is not main_thread():  # which may have its own reasons to do without
        return import_module(f"hoploom.{room}")
    enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(f"hoploom.{room}")
    finally:
        if enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*__all__, *_PUBLIC, "__version__"])
