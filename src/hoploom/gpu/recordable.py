"""Check that a learner's step can be recorded and replayed, and keep its learning rates on the device.

A recording keeps the values that host numbers had. Learning rates are read from the device instead, so that changes by
a schedule take effect; a later change of any other option of the optimizer raises ConfigError.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from hoploom.errors import ConfigError
from hoploom.load.maker import NodeMaker
from hoploom.nn import GNN
from hoploom.ranks.context import unwrap
from hoploom.train.step import Learner, Training, check_closure
from hoploom.train.tasks import NodeTask


def check_learner(learner: Learner, training: Training, device: torch.device) -> NodeMaker:
    """Return the maker of the loader's batches; raise ConfigError if the step cannot be replayed."""
    loader, model, task = learner.loader, unwrap(learner.model), learner.task
    is_distributed = isinstance(learner.model, DistributedDataParallel) or loader.world_size > 1
    maker = getattr(loader, "maker", None)
    _refuse(
        [
            (is_distributed, f"are for one process, this is one of {loader.world_size}"),
            (not isinstance(model, GNN), f"are for the models of hoploom.nn, the model is a {type(model).__name__}"),
            (not isinstance(task, NodeTask), f"are for tasks on nodes, the task is {type(task).__name__}"),
            (training.precision == "fp16", 'are not for "fp16": it asks the host at every step; take "bf16" or "fp32"'),
            (training.accumulate > 1, f"do not go with accumulate={training.accumulate}; take a larger batch_size"),
            (not isinstance(maker, NodeMaker), f"are for a NeighborLoader, this is a {type(loader).__name__}"),
        ]
    )
    assert isinstance(maker, NodeMaker)
    _check_maker(maker, device)
    check_optimizer(learner.optimizer, device, scheduled=learner.scheduler is not None)
    return maker


def _check_maker(maker: NodeMaker, device: torch.device) -> None:
    """Raise ConfigError if the batches cannot be made on the device."""
    placed, sampling, schema = maker.assembler.store.placed, maker.sampler.sampling, maker.assembler.store.schema
    is_there = placed is not None and placed.lists is not None and placed.device == device
    fields = {} if placed is None else placed.fields
    missing = [t.name for t in schema.node_types if "x" in t.fields and (t.name, "x") not in fields]
    give = "hoploom.place(store, topology='auto', features='auto')"
    _refuse(
        [
            (not is_there, f"need a graph that lies on {device}; give the loader {give}"),
            (bool(missing), f"need features on {device}, and x of {missing} is not placed; give the loader {give}"),
            (sampling.disjoint, "do not go with disjoint or temporal sampling"),
            (sampling.subgraph != "directional", f"do not go with subgraph_type={sampling.subgraph!r}"),
            (maker.sampler.sample_frontier is not None, "do not go with sample_frontier"),
            (maker.transform is not None, "do not go with transform"),
            (maker.assembler.reduce is not None, "do not go with aggregate"),
            (maker.assembler.fields is not None, "do not go with fields"),
        ]
    )


def check_optimizer(optimizer: Optimizer, device: torch.device, *, scheduled: bool) -> None:
    """Raise ConfigError if the optimizer needs a closure or, on this device, cannot be recorded."""
    check_closure(optimizer)
    name = type(optimizer).__name__
    if device.type != "cuda":
        return
    for group in optimizer.param_groups:
        if "capturable" in group and not group["capturable"]:
            raise not_recordable(f"do not go with {name} that counts its steps on the host; give it capturable=True")
        if "capturable" not in group and not isinstance(optimizer, SGD):
            raise not_recordable(f"do not go with {name}; take Adam or AdamW with capturable=True, SGD")
        if scheduled and not _takes_tensor(group):
            raise not_recordable(
                f"do not go with {name} that keeps the learning rate it began with; give it fused=True"
            )


def _takes_tensor(group: dict[str, Any]) -> bool:
    """Return whether the learning rate may be a tensor that is read on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def not_recordable(why: str) -> ConfigError:
    """Return the error for a step that cannot be recorded."""
    return ConfigError(f"whole steps {why}, or leave whole steps off")


def _refuse(reasons: Sequence[tuple[bool, str]]) -> None:
    """Raise the first error whose condition holds."""
    for is_so, why in reasons:
        if is_so:
            raise not_recordable(why)


def prepare_optimizer(optimizer: Optimizer, *, recorded: bool) -> None:
    """Set an optimizer's options for recorded steps, or for steps that are not; a checkpoint may hold the other ones.

    >>> prepare_optimizer(optimizer, recorded=True)
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


class LearningRates:
    """Learning rates of an optimizer's groups as tensors on the device.

    Between steps the groups hold plain numbers, which schedules and checkpoints need.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors = [  # None if the group needs a number
            torch.full((), float(group["lr"]), dtype=torch.float32, device=group["params"][0].device)
            if _takes_tensor(group)
            else None
            for group in optimizer.param_groups
        ]
        self._values = [float(group["lr"]) for group in optimizer.param_groups]
        self._recorded: list[dict[str, Any]] = []

    @property
    def _groups(self) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
        return zip(self._optimizer.param_groups, self._tensors, strict=True)

    def send(self) -> None:
        """Copy changed rates to the device, without waiting for it."""
        for number, (group, tensor) in enumerate(self._groups):
            value = float(group["lr"])
            if tensor is not None and value != self._values[number]:
                tensor.fill_(value)
                self._values[number] = value

    @contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Set the groups' rates to the tensors in this block."""
        numbers = [group["lr"] for group, _ in self._groups]
        for group, tensor in self._groups:
            group["lr"] = group["lr"] if tensor is None else tensor
        try:
            yield
        finally:
            for (group, _), number in zip(self._groups, numbers, strict=True):
                group["lr"] = number

    def check(self) -> None:
        """Raise ConfigError if an option has changed that the recording has as a constant."""
        now = []
        for group, tensor in self._groups:
            unseen = {"params", "initial_lr", "lr"} if tensor is not None else {"params", "initial_lr"}
            now.append({name: value for name, value in group.items() if name not in unseen})
        self._recorded = self._recorded or now
        for before, group in zip(self._recorded, now, strict=True):
            for name, value in group.items():
                if value != before[name]:
                    raise not_recordable(
                        f"do not see that {name} of {type(self._optimizer).__name__} went from {before[name]} to "
                        f"{value}; keep it, for lr give the optimizer fused=True"
                    )
