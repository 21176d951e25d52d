"""Loaders: each divides an epoch into steps and makes the batch of every step."""

import sys
from types import ModuleType
from typing import NoReturn

from hoploom.errors import ConfigError
from hoploom.load.neighbor import HGTLoader, LinkNeighborLoader, NeighborLoader

__all__ = ["HGTLoader", "LinkNeighborLoader", "NeighborLoader"]
__dir__ = __all__.copy


class _NotCallable(ModuleType):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            "hoploom.load is a package and cannot be called; hoploom.open(path) opens a store, and "
            "hoploom.load_run(folder) a finished run"
        )


sys.modules[__name__].__class__ = _NotCallable
