"""Check the arguments of `place`: words, shares and sizes for topology and features, a dtype, a device."""

from dataclasses import dataclass
from typing import Literal

import torch

from hoploom.config.values import parse_share_or_bytes
from hoploom.errors import ConfigError

DEVICE, HOST, AUTO, SPREAD = "device", "host", "auto", "spread"
Topology = Literal["device", "host", "auto"]
Features = Literal["device", "host", "auto", "spread"] | float | int  # a share of the rows as float, bytes as int
NARROW = {"int8": torch.int8, "float16": torch.float16, "bfloat16": torch.bfloat16}

TOPOLOGY_WAY_OUT = "give 'cuda', 'host', 'auto', or leave it out"
FEATURES_WAY_OUT = "give 'cuda', 'host', 'auto', 'spread', a share such as '20%' or 0.2, or bytes such as '4GB'"
NO_GPU = "there is no GPU here; leave the store as it is: loaders sample on the host and copy batches to their device"


@dataclass(frozen=True)
class PlaceRequest:
    """The checked arguments of `place`."""

    topology: Topology | None
    features: Features | None
    narrow: torch.dtype | None
    device: torch.device


def read(topology: object, features: object, dtype: object, device: object) -> PlaceRequest:
    """Check the arguments; raise ConfigError if they are invalid or impossible on this machine."""
    wanted_topology, wanted_features, narrow = read_topology(topology), read_features(features), read_dtype(dtype)
    if wanted_topology is None and wanted_features is None:
        raise ConfigError("neither topology nor features are given; give at least one, e.g. place(topology='cuda')")
    if narrow is not None and wanted_features is None:
        raise ConfigError(f"dtype is {dtype!r:.80}, but features are not placed; give features too, or drop dtype")
    if device is not None and not _is_device(device):
        raise ConfigError(f"device is {device!r:.80}; give 'cuda' or 'cuda:1', or leave it out")
    named = {str(word) for word in (topology, features, device) if _is_device(word)}
    return PlaceRequest(wanted_topology, wanted_features, narrow, _device(named))


def read_topology(value: object) -> Topology | None:
    """Check `topology`; return its kind of memory."""
    if value is None or (isinstance(value, str) and value in (HOST, AUTO)):
        return value  # type: ignore[return-value]
    if not _is_device(value):
        raise ConfigError(f"topology is {value!r:.80}; {TOPOLOGY_WAY_OUT}")
    return "device"


def read_features(value: object) -> Features | None:
    """Check `features`; return their kind of memory, or the device's share as a float or in bytes as an int."""
    if value is None or (isinstance(value, str) and value in (HOST, AUTO, SPREAD)):
        return value  # type: ignore[return-value]
    if _is_device(value):
        return "device"
    return parse_share_or_bytes("features", value, FEATURES_WAY_OUT)


def read_dtype(value: object) -> torch.dtype | None:
    """Check `dtype`; return the torch dtype."""
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if name is None:
        return None
    if not isinstance(name, str) or name not in NARROW:
        raise ConfigError(f"dtype is {value!r:.80}; give 'int8', 'float16' or 'bfloat16', or leave it out")
    return NARROW[name]


# --- the device ----------------------------------------------------------------------------------


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
    default = "cpu" if interprets else "cuda"
    numbered = {name for name in named if ":" in name}
    types = {torch.device(name).type for name in named}
    if len(types) > 1 and not interprets and not torch.cuda.is_available():
        raise ConfigError(NO_GPU)  # neither of them works
    if len(numbered) > 1 or len(types) > 1:
        raise ConfigError(f"the devices {sorted(named)} differ; a store is placed on one, name one of them")
    return _numbered(torch.device(min(numbered or named or {default})), interprets)


def _numbered(device: torch.device, interprets: bool) -> torch.device:
    if device.type == "cpu":
        if not interprets:
            raise ConfigError("kernels do not run on the device 'cpu'; give 'cuda', or leave the store as it is")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(NO_GPU)
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
