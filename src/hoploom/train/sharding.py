"""Models that torch's fully_shard has cut: their state whole for a checkpoint, and cut again when it is restored.

A checkpoint is the same file as without, for any number of ranks. The price: every rank holds the whole state once.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hoploom.errors import ConfigError


def check_sharding(model: nn.Module) -> None:
    """Raise ConfigError for the older FSDP, whose state and forward need calls of its own on all ranks."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "the model is a FullyShardedDataParallel, which neither fit, evaluate nor Checkpoint can take; use "
            "torch.distributed.fsdp.fully_shard(model), or context.wrap(model) where the model fits on every rank"
        )


def is_sharded(part: Any) -> bool:
    """Whether a model or an optimizer has parameters of which a rank holds a share."""
    if isinstance(part, nn.Module):
        check_sharding(part)
    return any(_is_cut(parameter) for parameter in _parameters(part))


def whole(state: Any) -> Any:
    """A state with whole tensors. All ranks call."""
    if isinstance(state, dict) and not isinstance(state, Counter):
        return {key: whole(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(whole, state))
    return state.full_tensor() if _is_cut(state) else state


def cut_as(part: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved state with this rank's shares of what is cut in a model or an optimizer."""
    if not is_sharded(part):
        return state
    if isinstance(part, nn.Module):
        mine = part.state_dict()
        return {name: _cut(value, mine[name]) for name, value in state.items()}
    kept = {
        number: {name: _cut(value, parameter) for name, value in state["state"][number].items()}
        for number, parameter in enumerate(_parameters(part))
        if number in state["state"]
    }
    return {**state, "state": kept}


def _parameters(part: Any) -> list[Tensor]:
    if isinstance(part, nn.Module):
        return list(part.parameters())
    if isinstance(part, torch.optim.Optimizer):
        return [parameter for group in part.param_groups for parameter in group["params"]]
    return []


def _is_cut(value: Any) -> bool:
    """Whether it is a DTensor, without the import, which takes a while."""
    return hasattr(value, "full_tensor")


def _cut(value: Any, like: Any) -> Any:
    if not (_is_cut(like) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
