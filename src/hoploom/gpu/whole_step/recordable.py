"""What a learner must be like for its step to be recorded once and replayed, and what a recording would hold on to.

A recording keeps every number of the host that it has seen. Learning rates go through the device instead, so that a
schedule's changes are seen; any other option of the optimizer that changes later is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from hoploom.errors import ConfigError
from hoploom.nn import GNN
from hoploom.ranks.context import unwrap
from hoploom.train.learner import Learner, Training
from hoploom.train.step import check_closure
from hoploom.train.tasks import NodeTask

LEAVE = "leave whole steps off"


def check_learner(learner: Learner, training: Training, device: torch.device) -> None:
    """Raise ConfigError for what cannot be replayed."""
    if isinstance(learner.model, DistributedDataParallel) or learner.loader.world_size > 1:
        raise ConfigError(f"whole steps are for one process, this is one of {learner.loader.world_size}; {LEAVE}")
    if not isinstance(unwrap(learner.model), GNN):
        name = type(learner.model).__name__
        raise ConfigError(f"whole steps are for the models of hoploom.nn, the model is a {name}; {LEAVE}")
    if not isinstance(learner.task, NodeTask):
        raise ConfigError(f"whole steps are for tasks on nodes, the task is {type(learner.task).__name__}; {LEAVE}")
    if training.precision == "fp16":
        raise ConfigError(f'precision "fp16" asks the host at every step; take "bf16" or "fp32", or {LEAVE}')
    if training.accumulate > 1:
        raise ConfigError(f"accumulate is {training.accumulate}; take a larger batch_size instead, or {LEAVE}")
    check_optimizer(learner.optimizer, device, scheduled=learner.scheduler is not None)


def check_optimizer(optimizer: Optimizer, device: torch.device, *, scheduled: bool) -> None:
    """Raise ConfigError for an optimizer whose step cannot be taken or, on this device, not recorded."""
    check_closure(optimizer)
    name = type(optimizer).__name__
    if device.type != "cuda":
        return
    for group in optimizer.param_groups:
        if "capturable" in group and not group["capturable"]:
            raise ConfigError(f"{name} counts its steps on the host; give it capturable=True, or {LEAVE}")
        if "capturable" not in group and not isinstance(optimizer, SGD):
            raise ConfigError(f"{name} cannot be recorded; take Adam or AdamW with capturable=True, SGD, or {LEAVE}")
        if scheduled and not _takes_tensor(group):
            raise ConfigError(f"{name} would keep the learning rate it began with; give it fused=True, or {LEAVE}")


def prepare(optimizer: Optimizer, *, recorded: bool) -> None:
    """Make an optimizer one whose step is recorded, or one whose step is not; a checkpoint may have made it the other.

    >>> prepare(optimizer, recorded=True)
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD):
            group["fused"] = True if recorded else None
        if "capturable" not in group or group["capturable"] == recorded:
            continue
        group["capturable"] = recorded
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device if recorded else "cpu", torch.float32)


def _takes_tensor(group: dict[str, Any]) -> bool:
    """Whether the learning rate may be a tensor that is read on the device."""
    return bool(group.get("capturable") or group.get("fused"))


class Rates:
    """The learning rates of an optimizer's groups, on the device while a step is taken.

    Between steps the groups hold plain numbers, as schedules and checkpoints know them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._tensors = [self._tensor(group) for group in self._groups]
        self._values = [float(group["lr"]) for group in self._groups]
        self._others: list[dict[str, Any]] | None = None

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @staticmethod
    def _tensor(group: dict[str, Any]) -> Tensor | None:
        if not _takes_tensor(group):
            return None
        return torch.full((), float(group["lr"]), dtype=torch.float32, device=group["params"][0].device)

    def send(self) -> None:
        """Bring the newest rates to the device; does not wait for it."""
        for number, (group, tensor) in enumerate(zip(self._groups, self._tensors, strict=True)):
            value = float(group["lr"])
            if tensor is not None and value != self._values[number]:
                tensor.fill_(value)
                self._values[number] = value

    @contextmanager
    def on_the_device(self) -> Iterator[None]:
        """Within: the groups' rates are the tensors."""
        numbers = [group["lr"] for group in self._groups]
        for group, tensor in zip(self._groups, self._tensors, strict=True):
            group["lr"] = group["lr"] if tensor is None else tensor
        try:
            yield
        finally:
            for group, number in zip(self._groups, numbers, strict=True):
                group["lr"] = number

    def check(self) -> None:
        """Raise ConfigError if an option has changed that is no rate on the device: the recording would not see it."""
        others = [self._recorded_options(*pair) for pair in zip(self._groups, self._tensors, strict=True)]
        if self._others is None:
            self._others = others
        for before, now in zip(self._others, others, strict=True):
            for name, value in now.items():
                if value != before[name]:
                    raise ConfigError(
                        f"{name} of {self._name} went from {before[name]} to {value}, which a recorded step does not "
                        f"see; keep it, for lr give the optimizer fused=True, or {LEAVE}"
                    )

    @staticmethod
    def _recorded_options(group: dict[str, Any], tensor: Tensor | None) -> dict[str, Any]:
        left_out = {"params", "initial_lr"} | (set() if tensor is None else {"lr"})
        return {name: value for name, value in group.items() if name not in left_out}
