"""`hoploom.place`: check its arguments, then copy a store to device memory or pinned host memory for GPU kernels."""

from dataclasses import replace
from typing import Literal

import torch

from hoploom.config.values import parse_share_or_bytes
from hoploom.errors import ConfigError
from hoploom.ranks.context import Ranks
from hoploom.store import Store

Topology = Literal["device", "host", "auto"]
Features = Literal["device", "host", "auto"] | float | int  # a share of the rows as float, bytes as int
NO_GPU = (
    "there is no GPU here; leave out place, [placement] or --device, and the CPU samples (in tests, TRITON_INTERPRET=1 "
    "runs kernels on 'cpu')"
)


def place(
    store: Store,
    topology: str | torch.device | None = None,
    features: str | float | torch.device | None = None,
    *,
    device: str | torch.device | None = None,
    among: Ranks | None = None,
) -> Store:
    """Return the store with its edges and features in memory that a GPU reads. Batches stay the same.

    >>> store = hoploom.place(hoploom.open("papers.store"), topology="cuda", features="20%")
    >>> print(store.placed)

    `topology` is "cuda" (device memory), "host" (pinned host memory, one copy for all processes of the host) or
    "auto" (as free memory allows, topology first). `features` takes these values too, or the share ("20%", 0.2) or
    bytes ("4GB") of feature rows for the device: the first of every part, which are the most sampled rows if
    `partition` wrote the store. With `among=context`, all ranks must call; "auto" chooses alike within a host.

    If some parts are on other hosts, the rows here and those of a cache are placed; loaders fetch the others ahead of
    time. "auto" leaves the topology to the CPU if some of it is on other hosts.

    Close the store after its last batch.
    """
    if not isinstance(store, Store):
        raise ConfigError(f"store is a {type(store).__name__}; give hoploom.open(path) or hoploom.from_pyg(graph)")
    wanted_topology, wanted_features = read_topology(topology), read_features(features)
    if wanted_topology is None and wanted_features is None:
        raise ConfigError("neither topology nor features are given; give at least one, e.g. place(topology='cuda')")
    if device is not None and not _is_device(device):
        raise ConfigError(f"device is {device!r:.80}; give 'cuda' or 'cuda:1', or leave it out")
    if among is not None and not all(hasattr(among, name) for name in ("rank", "world_size", "gather")):
        raise ConfigError(f"among is {among!r:.80}; give the context that hoploom.init made, or leave it out")
    if store.learned:
        raise ConfigError(
            f"the store has learned rows of {store.learned_types}; place the store first, then make the rows: "
            "hoploom.Embedding(placed_store, ...)"
        )
    to = _device({str(word) for word in (topology, features, device) if _is_device(word)})
    from hoploom.gpu.loading import OnDevice  # imports Triton, which is installed: `_device` has looked
    from hoploom.gpu.place_plan import copy_store, plan_placement

    placed = copy_store(store, plan_placement(store, wanted_topology, wanted_features, to, among))
    before = store.deployment
    on_device = OnDevice(placed=placed, before=before, homes=before.homes, look_ahead=before.look_ahead)
    return replace(store, deployment=on_device)


def read_topology(value: object) -> Topology | None:
    """Return the kind of memory that `topology` names; raise ConfigError for other values."""
    if value is None or (isinstance(value, str) and value in ("host", "auto")):
        return value  # type: ignore[return-value]
    if not _is_device(value):
        raise ConfigError(f"topology is {value!r:.80}; give 'cuda', 'host', 'auto', or leave it out")
    return "device"


def read_features(value: object) -> Features | None:
    """Return the kind of memory that `features` names, or the share (float) or bytes (int) of rows for the device."""
    if value is None or (isinstance(value, str) and value in ("host", "auto")):
        return value  # type: ignore[return-value]
    if _is_device(value):
        return "device"
    way_out = "give 'cuda', 'host', 'auto', a share such as '20%' or 0.2, or bytes such as '4GB'"
    return parse_share_or_bytes("features", value, way_out)


def _is_device(value: object) -> bool:
    if not isinstance(value, str | torch.device):
        return False
    try:
        return torch.device(value).type in ("cuda", "cpu")
    except RuntimeError:
        return False


def _device(named: set[str]) -> torch.device:
    """Return the one device that the arguments name; raise ConfigError unless kernels run on it."""
    interprets = kernels_are_interpreted()
    if not interprets and not torch.cuda.is_available():
        raise ConfigError(NO_GPU)
    numbered = {name for name in named if ":" in name}
    if len(numbered) > 1 or len({torch.device(name).type for name in named}) > 1:
        raise ConfigError(
            f"topology, features and device name {sorted(named)}; a store is placed on one, name that one"
        )
    device = torch.device(min(numbered or named or {"cpu" if interprets else "cuda"}))
    if device.type == "cpu":
        if not interprets:
            raise ConfigError("kernels do not run on the device 'cpu'; give 'cuda', or do not place the store")
        return torch.device("cpu")
    if interprets:
        raise ConfigError("TRITON_INTERPRET is set, so kernels run on the CPU alone; unset it, or give 'cpu'")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"there is no {device}; this process sees {torch.cuda.device_count()} GPUs, give one of them")
    return torch.device("cuda", index)


def kernels_are_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter; raise ConfigError without Triton."""
    try:
        from triton.runtime.interpreter import InterpretedFunction

        from hoploom.ops.kernels.philox import mix
    except ImportError as error:
        raise ConfigError(
            f"placing needs Triton ({error}); pip install triton, or leave the store as it is, on the host"
        ) from error
    return isinstance(mix, InterpretedFunction)
