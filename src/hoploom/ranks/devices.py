"""The device of a rank, and the backend that averages gradients there."""

import torch
import torch.distributed as dist

from hoploom.errors import ConfigError
from hoploom.ranks.environment import RankInfo


def chosen_device(wanted: str | torch.device | None, place: RankInfo) -> torch.device:
    """What the user wants, else this rank's GPU, else the CPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted is None else wanted)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {wanted!r}; give 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type != "cuda":
        return device
    num_devices = torch.cuda.device_count()
    index = place.local_rank if device.index is None else device.index
    if num_devices == 1 and device.index is None and place.source == "slurm":
        index = 0  # Slurm may show each task nothing but its own
    if index >= num_devices:
        raise ConfigError(
            f"local rank {place.local_rank} wants device cuda:{index}, but this host shows {num_devices} CUDA devices; "
            "start fewer ranks, or give device='cpu'"
        )
    return torch.device("cuda", index)


def chosen_backend(wanted: str | None, device: torch.device) -> str:
    """What torch.distributed is told; the user wants "nccl" or "gloo", or leaves it to the device."""
    allowed = {"cuda": ("nccl", "gloo"), "cpu": ("gloo",)}.get(device.type, ("gloo",))
    chosen = allowed[0] if wanted is None else wanted
    if dist.is_initialized():
        _check_group(wanted, device)
    elif chosen not in allowed:
        raise ConfigError(f"backend is {wanted!r}, but on {device.type} it is one of {list(allowed)}")
    return "cpu:gloo,cuda:nccl" if chosen == "nccl" else "gloo"


def _check_group(wanted: str | None, device: torch.device) -> None:
    """Whether the process group that the user made is one that can average gradients there."""
    there = dist.get_backend_config()
    if f"{device.type}:" not in there or (wanted or "") not in there:
        raise ConfigError(
            f"torch.distributed is in use already, with {there!r}, which does not go with device={str(device)!r} and "
            f"backend={wanted!r}; change it, or leave init_process_group to hoploom.init()"
        )
