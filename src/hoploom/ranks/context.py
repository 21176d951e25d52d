"""The ranks of a training run: who this process is, its device, and everything it does together with the others.

What ranks exchange goes through torch.distributed: gradients by NCCL or Gloo, all else by Gloo from the CPU in
int64 or float64, so that counts are exact. Never pickled objects. A single process has no process group at all.
Every wait has a deadline, and a peer that ended or hangs becomes a PeerError; the price of naming it is a second.
"""

import atexit
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from numbers import Integral
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from hoploom import ops
from hoploom.config.values import as_number
from hoploom.errors import ConfigError, HoploomError, PeerError
from hoploom.ranks import environment
from hoploom.ranks.collectives import gather_json
from hoploom.ranks.deadlock import detector_here
from hoploom.ranks.devices import chosen_backend, chosen_device
from hoploom.ranks.environment import LOOPBACK, RankInfo
from hoploom.ranks.one_report import report_once
from hoploom.ranks.rendezvous import Rendezvous, adopted, interface_of, meet
from hoploom.ranks.shared_calls import MAX, SUM, GradientAveraging, SharedCalls

Value = TypeVar("Value", Tensor, int, float)
DEADLINE = 600.0  # seconds that ranks wait for each other where the user gives no timeout
WRAPPERS = ("_orig_mod", "called_model")  # where torch.compile and hoploom.train keep the model that they call
FINISHED = "has finished, after fewer steps or calls than this rank"
LEFT = "read the output of that rank, then start again from the last checkpoint"
UNMET = (
    "read the output of that rank; if it cannot reach this host, set GLOO_SOCKET_IFNAME to the network interface that "
    "connects the hosts"
)
UNCLOSED = "ended without closing its context: it exited, or made fewer steps or calls than this rank"
LOCATION = re.compile(r"^\[[^\]]*\] ")  # of a line in Gloo's source
LOST = re.compile(r"gloo/|connection (closed|reset|refused)|broken pipe|timed? ?out|socket closed", re.IGNORECASE)


def init(
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float = DEADLINE,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
) -> "Context":
    """Join the other ranks that torchrun, Slurm or `spawn` started. If there are none, this process is rank 0 of 1.

    >>> with hoploom.init() as context:
    ...     model = context.wrap(model)

    `device` is by default this rank's GPU if there is one, else the CPU; `backend` is "nccl" or "gloo". `timeout` is
    the limit in seconds of every wait for another rank, and of a step's wait for the device. Your own launcher gives
    `rank`, `world_size` and `address` (HOST:PORT of rank 0); then the environment is not read. If you have made a
    process group already, it is used and stays open when the context is closed.
    """
    report_once()
    seconds = read_timeout(timeout)
    place = _place(rank, world_size, address)
    chosen_backend(backend, chosen_device(device, place))  # a mistake is told before anybody is waited for
    notes = meet(place, seconds) if place.world_size > 1 else None
    try:
        if notes is not None and place.uncounted:
            place = _counted(place, notes, device)
        chosen = chosen_device(device, place)
        return Context(place, chosen, chosen_backend(backend, chosen), seconds, notes)
    except BaseException as error:
        if notes is not None:
            notes.leave(f"ended with {type(error).__name__}: {error}"[:300])
            notes.outlast()
        raise


def read_timeout(timeout: float) -> float:
    """The seconds that a rank may wait for another."""
    seconds = as_number("timeout", timeout, "give the seconds that a rank may wait for another")
    if seconds == 0:
        raise ConfigError("timeout is 0; give the seconds that a rank may wait for another")
    return seconds


def _place(rank: int | None, world_size: int | None, address: str | None) -> RankInfo:
    """By the process group of the user's own, else by the arguments, else by the environment."""
    named = (rank, world_size, address) != (None, None, None)
    if not dist.is_initialized():
        return environment.given(rank, world_size, address) if named else environment.read()
    own = dist.get_rank(), dist.get_world_size()
    if named and (rank, world_size) not in (own, (None, None)):
        raise ConfigError(
            f"rank and world_size are {rank} and {world_size}, but torch.distributed is in use already with {own[0]} "
            f"and {own[1]}; leave them out"
        )
    return adopted(environment.in_group(*own))


def _counted(place: RankInfo, notes: Rendezvous, device: str | torch.device | None) -> RankInfo:
    """With its number among the ranks of its host. Variables without it are half a set: other libraries read it too."""
    hosts = notes.said()
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
    if (
        "LOCAL_RANK" in place.uncounted
        and place.source == "torchrun"
        and len(neighbours) > 1
        and (device is None or str(device) == "cuda")
    ):
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, LOCAL_RANK is not, and ranks {neighbours} share a host, where each would "
            "take GPU 0; set LOCAL_RANK for each, or give device='cuda:1', say, or device='cpu'"
        )
    return environment.counted(place, hosts)


def unwrap(model: nn.Module) -> nn.Module:
    """Your own model, without the wrappers of `Context.wrap`, torch.compile and training."""
    names = ("module",) if isinstance(model, DistributedDataParallel) else WRAPPERS
    held = next((inner for name in names if isinstance(inner := getattr(model, name, None), nn.Module)), None)
    return model if held is None else unwrap(held)


class Context:
    """One rank of a job: its number, its device, and what it does together with the other ranks. Made by `init`."""

    def __init__(
        self, place: RankInfo, device: torch.device, backend: str, timeout: float, notes: Rendezvous | None = None
    ) -> None:
        self.rank = place.rank
        self.local_rank = place.local_rank
        self.world_size = place.world_size
        self.restarts = place.restarts  # how often torchrun or Slurm has started this run again
        self.device = device
        self.timeout = timeout  # seconds that this rank waits for another
        self.rank_info = place
        self.closing = ExitStack()  # what is closed with this context, such as its store
        self._peers = notes
        self._calls: SharedCalls | None = None  # of several ranks only
        self._group: dist.ProcessGroup | None = None  # to leave in the end
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            ops.keep_freed_memory()  # faulting in each step's pages anew took a third of its time
        self.num_cores = environment.share_of_cores(place)  # of this host, for this rank
        try:
            had_more = self._bound_threads()
            if notes is not None:
                self._join(place, backend)
        except BaseException:
            self.closing.close()
            raise
        if self.is_main and (had_more or self.world_size > 1) and not environment.is_quiet():
            print(f"hoploom: {self}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        threads = f"torch threads {torch.get_num_threads()}{' (OMP_NUM_THREADS)' * environment.names_threads()}"
        return f"rank {self.rank} of {self.world_size} on {self.device}: cores {self.num_cores}, {threads}"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files that exist only once."""
        return self.rank == 0

    def wrap(self, model: nn.Module, *, find_unused_parameters: bool = False) -> nn.Module:
        """The model on the device of this rank, as DistributedDataParallel if there are several ranks.

        All ranks begin with the parameters and buffers of rank 0. Buffers are not sent again at every step, so ranks
        may call the model a different number of times without gradients. `sync_buffers` sends them when you need it.
        """
        parameters = list(model.parameters())
        if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
            raise ConfigError("the model has parameters without a shape; call it on one batch before wrap(model)")
        if not any(parameter.requires_grad for parameter in parameters):
            raise ConfigError("the model has no parameter that needs a gradient; wrap is for models to train")
        if any(hasattr(parameter, "full_tensor") for parameter in parameters):  # a DTensor
            raise ConfigError("the model is sharded, and averages its gradients itself; leave wrap(model) out")
        model = model.to(self.device)
        if self.world_size == 1:
            return model
        self._check_alike(model)
        devices = [self.device] if self.device.type == "cuda" else None
        with self.guard("wrapping the model"):
            wrapped = DistributedDataParallel(model, device_ids=devices, find_unused_parameters=find_unused_parameters)
        wrapped.broadcast_buffers = False
        here = detector_here()
        if here is not None and self.device.type == "cpu":  # NCCL runs beside the host, which waits for nobody here
            GradientAveraging(wrapped, here, self.guard)
        return wrapped

    def _check_alike(self, model: nn.Module) -> None:
        """DDP pairs parameters by position: another order on another rank would mix them up in silence."""
        listed = [f"{name} {list(parameter.shape)}" for name, parameter in model.named_parameters()]
        for rank, other in enumerate(gather_json(self, listed)):
            if other != listed:
                raise ConfigError(
                    f"rank {self.rank} has a model of other parameters, or in another order, than rank {rank}; build "
                    "it alike on all ranks (a loop over a set has another order in every process)"
                )

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 (such as running statistics) to every rank, before you evaluate or save."""
        if self.world_size > 1:
            for buffer in model.buffers():
                buffer.copy_(self.broadcast(buffer))

    def mean_loss(self, losses: Tensor, total: int | None = None) -> Tensor:
        """The loss to call backward() on: every seed of all ranks has the same weight in its gradient.

        `losses` [n] has one entry per seed of this rank. `total` is the number of seeds over all ranks; if you know it
        (`loader.num_seeds(step)`), the ranks need not exchange it. The value is this rank's share: its mean over the
        ranks is the mean over all seeds, which `context.sum(loss) / context.world_size` returns if all ranks call it.
        """
        if losses.dim() != 1:
            raise ConfigError(
                f"losses have shape {list(losses.shape)}; give one per seed, e.g. cross_entropy(..., reduction='none')"
            )
        total = self.sum(len(losses)) if total is None else total
        if total < len(losses) or total == 0:
            raise ConfigError(
                f"total is {total}, but this rank alone has {len(losses)} losses; count those of all ranks"
            )
        return losses.sum() * (self.world_size / total)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self._calls is not None:
            self._calls.barrier()

    def sum(self, value: Value) -> Value:
        """The sum over all ranks, in int64 for integers and in float64 for other types."""
        return self._reduce(value, SUM)  # type: ignore[no-any-return]

    def max(self, value: Value) -> Value:
        """The maximum over all ranks of each entry, in int64 or float64."""
        return self._reduce(value, MAX)  # type: ignore[no-any-return]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in the order of ranks. They must have the same shape and dtype."""
        return [tensor.detach().clone()] if self._calls is None else self._calls.gather(tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0. The other ranks give any tensor of the same shape and dtype."""
        return tensor.detach().clone() if self._calls is None else self._calls.broadcast(tensor)

    def guard(self, doing: str) -> AbstractContextManager[None]:
        """Raise one PeerError, which says what this rank was doing, if another rank is lost inside this block.

        >>> with context.guard("averaging gradients"):
        ...     loss.backward()
        """
        return self._guard(doing)

    @contextmanager
    def _guard(self, doing: str, way_out: str = LEFT) -> Iterator[None]:
        try:
            yield
        except HoploomError:
            raise
        except RuntimeError as error:
            if self._peers is None or not (isinstance(error, dist.DistError) or LOST.search(str(error))):
                raise
            reason = LOCATION.sub("", str(error).splitlines()[0]).split(". ")[0]
            raise PeerError(
                f"rank {self.rank} of {self.world_size} was {doing}, and {self._peers.missing()} ({reason:.300}); "
                f"{way_out}; if it was only slow, give hoploom.init a timeout above {self.timeout:g} seconds"
            ) from error

    def after_the_others(self) -> Callable[[], None]:
        """What waits, once this rank has left, until all others have: for who keeps something that they need."""
        peers, seconds = self._peers, self.timeout
        return lambda: None if peers is None else peers.wait_for_the_others(seconds)

    def close(self) -> None:
        """Leave the other ranks, and close the store of this context. Ranks that wait for this one get an error."""
        try:
            self._leave(None)
        finally:
            self.closing.close()

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *raised: Any) -> None:
        error = raised[1]
        if error is None:
            self.close()
        else:
            self._leave(error)
            self.closing.__exit__(*raised)

    def _bound_threads(self) -> bool:
        """Keep torch to as many threads as this rank has cores, until it is closed; whether it had more."""
        before = torch.get_num_threads()
        had_more = self.num_cores < before and not environment.names_threads()
        if had_more:
            torch.set_num_threads(self.num_cores)
            self.closing.callback(torch.set_num_threads, before)
        return had_more

    def _join(self, place: RankInfo, backend: str) -> None:
        """The group that DDP uses, unless the user made it, and one for what ranks do besides."""
        wait = timedelta(seconds=self.timeout)
        assert self._peers is not None
        with self._guard("meeting the other ranks", way_out=UNMET):
            if place.on_one_host or place.port:  # else the user's group has met elsewhere than at an address
                own = LOOPBACK if place.on_one_host else self._peers.own_address(place)
                self.closing.enter_context(environment.listening_on(interface_of(own)))
            if place.source != "group":
                store, size = self._peers.store, self.world_size
                dist.init_process_group(backend, store=store, timeout=wait, rank=self.rank, world_size=size)
                self._group = dist.group.WORLD
            besides, here = dist.new_group(backend="gloo", timeout=wait), detector_here()
            assert here is not None
            self._group = self._group or besides
            self._calls = SharedCalls(besides, here, self.guard)
        atexit.register(self._leave_at_exit)

    def _leave(self, error: BaseException | None, otherwise: str = FINISHED) -> None:
        atexit.unregister(self._leave_at_exit)
        peers, self._peers = self._peers, None
        if peers is not None:
            told = otherwise if error is None else f"ended with {type(error).__name__}: {error}"[:300]
            peers.leave(told, self._leave_group)

    def _leave_at_exit(self) -> None:
        """Of a script that never closes its context: the others learn how it ended, but sys.exit leaves no trace."""
        self._leave(getattr(sys, "last_value", None), UNCLOSED)

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            if self._calls is not None:
                self._calls.leave(for_good=group is dist.group.WORLD)  # the user's own group may go on
            dist.destroy_process_group(group)

    def _reduce(self, value: Any, operation: dist.ReduceOp.RedOpType) -> Any:
        if not isinstance(value, Tensor):
            if self._calls is None:
                return int(value) if isinstance(value, Integral) else float(value)
            return self._calls.reduce_number(value, operation)
        exact = value.detach().to("cpu", torch.float64 if value.is_floating_point() else torch.int64, copy=True)
        return (exact if self._calls is None else self._calls.reduce(exact, operation)).to(value.device)
