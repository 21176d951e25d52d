"""Hoploom trains graph neural networks on graphs of any size with one script."""

import gc
from importlib import import_module
from threading import current_thread, main_thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # isort: off
    from hoploom.batch import Block as Block
    from hoploom.deploy.open import open as open
    from hoploom.errors import *  # noqa: F403
    from hoploom.gpu.placement import place as place
    from hoploom.gpu.whole_steps import WholeStep as WholeStep
    from hoploom.inference.best_links import best as best
    from hoploom.inference.infer import infer as infer
    from hoploom.inference.propagate import propagate as propagate
    from hoploom.ingest.formats.dgl import from_dgl as from_dgl
    from hoploom.ingest.synthetic import generate as generate
    from hoploom.load import (
        HGTLoader as HGTLoader,
        LinkNeighborLoader as LinkNeighborLoader,
        NeighborLoader as NeighborLoader,
    )
    from hoploom.nn.embedding import Embedding as Embedding
    from hoploom.partition.partition import partition as partition
    from hoploom.ranking.all_nodes import rank_links as rank_links
    from hoploom.ranks.context import init as init
    from hoploom.ranks.spawn import spawn as spawn
    from hoploom.sample import Edges as Edges
    from hoploom.serve.connect import connect as connect
    from hoploom.store import Store as Store
    from hoploom.store.from_pyg import from_pyg as from_pyg
    from hoploom.store.from_tensors import from_tensors as from_tensors
    from hoploom.train.checkpoint import Checkpoint as Checkpoint
    from hoploom.train.link_prediction import LinkPrediction as LinkPrediction
    from hoploom.train.loop import evaluate as evaluate, fit as fit
    from hoploom.train.runs.run import load_run as load_run
    from hoploom.train.step import Learner as Learner, Training as Training
    from hoploom.train.tasks import (
        MultiLabel as MultiLabel,
        NodeClassification as NodeClassification,
        NodeRegression as NodeRegression,
        SeveralTasks as SeveralTasks,
    )
    # isort: on

__version__ = "0.1.0"

# Modules and their public names, imported at first use: building a store needs no PyG, which takes 160 MB and 1 s.
_NAMES = {
    "batch": "Block",
    "deploy.open": "open",
    "errors": "BatchError ConfigError DataError HoploomError PeerError StoreError TrainError",
    "gpu.placement": "place",
    "gpu.whole_steps": "WholeStep",
    "inference.best_links": "best",
    "inference.infer": "infer",
    "inference.propagate": "propagate",
    "ingest.formats.dgl": "from_dgl",
    "ingest.synthetic": "generate",
    "load": "HGTLoader LinkNeighborLoader NeighborLoader",
    "nn.embedding": "Embedding",
    "ranking.all_nodes": "rank_links",
    "ranks.context": "init",
    "ranks.spawn": "spawn",
    "sample": "Edges",
    "serve.connect": "connect",
    "store": "Store",
    "store.from_pyg": "from_pyg",
    "store.from_tensors": "from_tensors",
    "train.checkpoint": "Checkpoint",
    "train.link_prediction": "LinkPrediction",
    "train.loop": "evaluate fit",
    "train.runs.run": "load_run",
    "train.step": "Learner Training",
    "train.tasks": "MultiLabel NodeClassification NodeRegression SeveralTasks",
}
_HOMES = {name: room for room, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_HOMES, "partition"])  # partition is a package that can be called
# each has an __all__
_PUBLIC = {"inference", "load", "nn", "ops", "partition", "ranking", "sample", "scale", "store", "train"}
_PACKAGES = {"batch", "config", "deploy", "ranks", "errors", "gpu", "ingest", "keys", "schema", "serve", *_PUBLIC}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_import(_HOMES[name]), name)
    if name in _PACKAGES:
        return _import(name)
    raise AttributeError(f"module 'hoploom' has no attribute {name!r}")


def _import(room: str) -> ModuleType:
    """Import hoploom.`room`. Garbage collection is paused in the main thread, which saves a fifth of the time."""
    paused = gc.isenabled() and current_thread() is main_thread()
    if paused:
        gc.disable()
    try:
        return import_module(f"hoploom.{room}")
    finally:
        if paused:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*__all__, *_PUBLIC, "__version__"])
