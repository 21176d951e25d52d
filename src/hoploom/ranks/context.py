"""The context of a rank: its number, its device, and the calls that it makes together with the other ranks.

All calls go through torch.distributed: gradients by NCCL or Gloo, all others by Gloo from the CPU, in int64 or float64,
so that counts are exact. Nothing is pickled. A single process has no process group at all. Every wait has a deadline.
If a rank ended or hangs, a PeerError names it; finding it takes a second.

Shared calls use a separate Gloo group, so they never pair with calls of DDP or of the user. Each shared call sends a
label; different labels are an error. The label and up to 64 bytes of content travel in one all-gather of 256 bytes per
rank, so numbers and small tensors need no second all-gather.
"""

import atexit
import json
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from numbers import Integral
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from hoploom import ops
from hoploom.config.values import as_number
from hoploom.errors import ConfigError, HoploomError, PeerError
from hoploom.ranks import environment
from hoploom.ranks.agreement import SAME_CALLS, DeadlockDetector, calling, detector_here
from hoploom.ranks.environment import LOOPBACK, RankInfo
from hoploom.ranks.rendezvous import Rendezvous, adopted, interface_of, meet

Value = TypeVar("Value", Tensor, int, float)
DEADLINE = 600.0  # seconds that ranks wait for each other by default
WRAPPERS = ("_orig_mod", "called_model")  # attributes in which torch.compile and hoploom.train keep a model
FINISHED = "has finished, after fewer steps or calls than this rank"
LEFT = "read the output of that rank, then start again from the last checkpoint"
UNMET = (
    "read the output of that rank; if it cannot reach this host, set GLOO_SOCKET_IFNAME to the network interface that "
    "connects the hosts"
)
UNCLOSED = "ended without closing its context: it exited, or made fewer steps or calls than this rank"
LABEL, LINE, CONTENT = 144, 48, 64  # bytes in a message: the label, the script's line, a small value
CHANNEL = "calls"
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
AVERAGING = "averaging gradients"
DOING = {SUM: "summing over all ranks", MAX: "finding the maximum over all ranks"}
LOCATION = re.compile(r"^\[[^\]]*\] ")  # in Gloo's source, at the beginning of its errors
LOST = re.compile(r"gloo/|connection (closed|reset|refused)|broken pipe|timed? ?out|socket closed", re.IGNORECASE)


def init(
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float = DEADLINE,
) -> "Context":
    """Join the other ranks that torchrun, Slurm or `spawn` started. If there are none, this process is rank 0 of 1.

    >>> with hoploom.init() as context:
    ...     model = context.wrap(model)

    `device` is by default this rank's GPU if there is one, else the CPU; `backend` is "nccl" or "gloo". `timeout` is
    the limit in seconds of every wait for another rank, and of a step's wait for the device. A launcher of your own
    must set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If you have made a process group already, it is used, and
    stays open when the context is closed.
    """
    seconds = read_timeout(timeout)
    if dist.is_initialized():
        info = adopted(environment.in_group(dist.get_rank(), dist.get_world_size()))
    else:
        info = environment.read_rank()
    chosen_backend(backend, chosen_device(device, info))  # a mistake is raised before any wait for other ranks
    rendezvous = meet(info, seconds) if info.world_size > 1 else None
    try:
        if rendezvous is not None and info.uncounted:
            info = environment.with_local_rank(info, rendezvous.texts())
        chosen = chosen_device(device, info)
        return Context(info, chosen, chosen_backend(backend, chosen), seconds, rendezvous)
    except BaseException as error:
        if rendezvous is not None:
            rendezvous.leave(error, stays=True)
        raise


def read_timeout(timeout: float) -> float:
    """Return `timeout`, the seconds that a rank may wait for another, as a float; raise ConfigError if not above 0."""
    seconds = as_number("timeout", timeout, "give the seconds that a rank may wait for another")
    if seconds == 0:
        raise ConfigError("timeout is 0; give the seconds that a rank may wait for another")
    return seconds


def chosen_device(wanted: str | torch.device | None, info: RankInfo) -> torch.device:
    """Return the device `wanted`; if None, this rank's GPU, or the CPU if there is none."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted is None else wanted)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {wanted!r}; give 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type != "cuda":
        return device
    num_devices = torch.cuda.device_count()
    index = info.local_rank if device.index is None else device.index
    if num_devices == 1 and device.index is None and info.source == "slurm":
        index = 0  # Slurm may show each task only its own GPU
    if index >= num_devices:
        raise ConfigError(
            f"local rank {info.local_rank} wants device cuda:{index}, but this host shows {num_devices} CUDA devices; "
            "start fewer ranks, or give device='cpu'"
        )
    return torch.device("cuda", index)


def chosen_backend(wanted: str | None, device: torch.device) -> str:
    """Return the torch.distributed backend: `wanted`, or the usual one of `device`. Raise ConfigError if unfit."""
    allowed = {"cuda": ("nccl", "gloo"), "cpu": ("gloo",)}.get(device.type, ("gloo",))
    chosen = allowed[0] if wanted is None else wanted
    if dist.is_initialized():
        config = dist.get_backend_config()
        if f"{device.type}:" not in config or (wanted or "") not in config:
            raise ConfigError(
                f"torch.distributed is in use already, with {config!r}, which does not go with "
                f"device={str(device)!r} and backend={wanted!r}; change it, or leave init_process_group to "
                "hoploom.init()"
            )
    elif chosen not in allowed:
        raise ConfigError(f"backend is {wanted!r}, but on {device.type} it is one of {list(allowed)}")
    return "cpu:gloo,cuda:nccl" if chosen == "nccl" else "gloo"


def unwrap(model: nn.Module) -> nn.Module:
    """Return your own model, without the wrappers that `Context.wrap`, torch.compile and Hoploom's training add."""
    names = ("module",) if isinstance(model, DistributedDataParallel) else WRAPPERS
    held = next((inner for name in names if isinstance(inner := getattr(model, name, None), nn.Module)), None)
    return model if held is None else unwrap(held)


class OverRanks:
    """Base class of modules that compute over the rows of all ranks in training."""

    context: "Context | None" = None  # set by `Context.wrap` if there are several ranks; not kept by copies and files

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in vars(self).items() if name != "context"}


class Context:
    """One rank of a job: its number, its device, and the calls that all ranks make together. Made by `init`."""

    def __init__(
        self,
        info: RankInfo,
        device: torch.device,
        backend: str,
        timeout: float,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.rank = info.rank
        self.local_rank = info.local_rank
        self.world_size = info.world_size
        self.restarts = info.restarts  # how often torchrun or Slurm has started this run again
        self.device = device
        self.timeout = timeout  # seconds that this rank waits for another
        self.rank_info = info
        self.host_address = LOOPBACK  # the address at which ranks on other hosts reach this rank
        self.closing = ExitStack()  # closes the store, and other objects, with this context
        self._peers = rendezvous  # until this rank leaves
        self._here: DeadlockDetector | None = None  # None for a single rank
        self._shared: dist.ProcessGroup | None = None  # for the calls that all ranks make; None after this rank left
        self._group: dist.ProcessGroup | None = None  # the group that this context must destroy
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            ops.keep_freed_memory()  # faulting in each step's pages anew took a third of its time
        self.num_cores = environment.share_of_cores(info)  # of this host, for this rank
        threads = torch.get_num_threads()
        is_bounded = self.num_cores < threads and not environment.names_threads()
        try:
            if is_bounded:
                torch.set_num_threads(self.num_cores)
                self.closing.callback(torch.set_num_threads, threads)
            if rendezvous is not None:
                self._join(rendezvous, info, backend)
        except BaseException:
            self.closing.close()
            raise
        if self.is_main and (is_bounded or self.world_size > 1) and not environment.is_quiet():
            print(f"hoploom: {self}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        threads = f"torch threads {torch.get_num_threads()}{' (OMP_NUM_THREADS)' * environment.names_threads()}"
        return f"rank {self.rank} of {self.world_size} on {self.device}: cores {self.num_cores}, {threads}"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files that exist only once."""
        return self.rank == 0

    def wrap(self, model: nn.Module, *, find_unused_parameters: bool = False) -> nn.Module:
        """Return the model on the device of this rank, as DistributedDataParallel if there are several ranks.

        All ranks begin with the parameters and buffers of rank 0. Buffers are not sent again at every step, so ranks
        may call the model a different number of times without gradients. `sync_buffers` sends them when you need it.
        """
        parameters = list(model.parameters())
        if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
            raise ConfigError("the model has parameters without a shape; call it on one batch before wrap(model)")
        if not any(parameter.requires_grad for parameter in parameters):
            raise ConfigError("the model has no parameter that needs a gradient; wrap is for models to train")
        if any(hasattr(parameter, "full_tensor") for parameter in parameters):  # a DTensor
            raise ConfigError("the model is cut by fully_shard; give wrap the whole model")
        model = model.to(self.device)
        if self.world_size == 1:
            return model
        listed = [f"{name} {list(parameter.shape)}" for name, parameter in model.named_parameters()]
        for rank, other in enumerate(gather_json(self, listed)):
            if other != listed:  # DDP pairs parameters by position, and would mix them up in silence
                raise ConfigError(
                    f"rank {self.rank} has a model of other parameters, or in another order, than rank {rank}; build "
                    "it alike on all ranks (a loop over a set has another order in every process)"
                )
        for module in model.modules():
            if isinstance(module, OverRanks):
                module.context = self
        devices = [self.device] if self.device.type == "cuda" else None
        with self.guard("wrapping the model"):
            wrapped = DistributedDataParallel(model, device_ids=devices, find_unused_parameters=find_unused_parameters)
        wrapped.broadcast_buffers = False
        if self._here is not None and self.device.type == "cpu":  # NCCL runs beside the host, which does not wait
            GradientAveraging(wrapped, self._here, self.guard)
        return wrapped

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 (such as running statistics) to every rank, before you evaluate or save."""
        if self.world_size > 1:
            for buffer in model.buffers():
                buffer.copy_(self.broadcast(buffer))

    def mean_loss(self, losses: Tensor, total: int | None = None) -> Tensor:
        """Return the loss to call backward() on. Its gradient gives every seed of all ranks the same weight.

        `losses` [n] has one entry per seed of this rank. `total` is the number of seeds over all ranks; if you know it
        (`loader.num_seeds(step)`), the ranks need not exchange it. To print the mean loss over all seeds, call
        `context.sum(loss) / context.world_size` on all ranks.
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
        self._agree("waiting at a barrier")

    def sum(self, value: Value) -> Value:
        """Return the sum over all ranks, in int64 for integers and in float64 for other types."""
        return self._reduce(value, SUM)  # type: ignore[no-any-return]

    def max(self, value: Value) -> Value:
        """Return the maximum over all ranks of each entry, in int64 or float64."""
        return self._reduce(value, MAX)  # type: ignore[no-any-return]

    def add_up(self, tensor: Tensor, doing: str) -> None:
        """Replace a tensor on this rank's device by its sum over all ranks; the host does not wait for a GPU."""
        if self.world_size > 1 and tensor.is_cuda:
            with self.guard(doing):
                dist.all_reduce(tensor)
        elif self.world_size > 1:
            tensor.copy_(self.sum(tensor))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of ranks. All tensors must have the same shape and dtype."""
        says, rows = self._small("gathering from all ranks", tensor)
        if rows is None:
            sent = _bytes_of(tensor)
            received = [torch.empty_like(sent) for _ in range(self.world_size)]
            self._call(says, lambda: dist.all_gather(received, sent, group=self._shared, async_op=True))
            rows = [_tensor_of(row, tensor) for row in received]
        return rows

    def exchange(
        self,
        rows: Tensor,
        counts: Sequence[int],
        doing: str = "exchanging rows",
        answer: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Send counts[r] of the rows to rank r, in their order; return the rows received, in the order of ranks.

        With `answer`, each rank sends back the rows that it returns for those received. They come in the order sent.
        """
        if self.world_size == 1:
            return rows if answer is None else answer(rows)
        says, of_ranks = self._small(f"{doing} with all ranks", torch.tensor(counts))
        coming = torch.stack(of_ranks or self.gather(torch.tensor(counts)))[:, self.rank].tolist()

        def swapped(sent: Tensor, going: list[int], coming: list[int]) -> Tensor:
            found = sent.new_empty((sum(coming), *sent.shape[1:]))
            begin = partial(dist.all_to_all_single, found, sent, coming, going, group=self._shared, async_op=True)
            self._call(says, begin)
            return found

        received = swapped(rows, list(counts), coming)
        return received if answer is None else swapped(answer(received), coming, list(counts))

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0. The other ranks give any tensor of the same shape and dtype."""
        says, rows = self._small("receiving from rank 0", tensor)
        if rows is None:
            sent = _bytes_of(tensor).clone()
            self._call(says, lambda: dist.broadcast(sent, src=0, group=self._shared, async_op=True))
            rows = [_tensor_of(sent, tensor)]
        return rows[0]

    @contextmanager
    def guard(self, doing: str, *, way_out: str = LEFT) -> Iterator[None]:
        """If another rank is lost in the `with` block, raise a PeerError that says what this rank was `doing`.

        >>> with context.guard("averaging gradients"):
        ...     loss.backward()
        """
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
        """Return a function that waits until all other ranks have left. Use it if they need something of this rank."""
        peers, seconds = self._peers, self.timeout
        return lambda: None if peers is None or peers.has_lost else peers.wait_for_the_others(seconds)

    def close(self) -> None:
        """Leave the other ranks, and close the store of this context. Ranks that wait for this one get an error."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            self._leave(raised[1])
        finally:
            self.closing.__exit__(*raised)

    def _join(self, rendezvous: Rendezvous, info: RankInfo, backend: str) -> None:
        """Make DDP's process group, unless the user has made one, and a second group for shared calls."""
        wait = timedelta(seconds=self.timeout)
        with self.guard("meeting the other ranks", way_out=UNMET):
            if info.on_one_host or info.port:  # else the user's group has met by other means than an address
                self.host_address = LOOPBACK if info.on_one_host else rendezvous.own_address(info)
                self.closing.enter_context(environment.listening_on(interface_of(self.host_address)))
            if info.source != "group":
                store, size = rendezvous.store, self.world_size
                dist.init_process_group(backend, store=store, timeout=wait, rank=self.rank, world_size=size)
                self._group = dist.group.WORLD
            self._shared, self._here = dist.new_group(backend="gloo", timeout=wait), detector_here()
            self._group = self._group or self._shared
        atexit.register(self._leave_at_exit)

    def _leave(self, error: BaseException | None, otherwise: str = FINISHED) -> None:
        atexit.unregister(self._leave_at_exit)
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.leave(otherwise if error is None else error, self._leave_group)

    def _leave_at_exit(self) -> None:
        """Leave the other ranks when a script ends without closing its context. Post the script's error, if known."""
        self._leave(getattr(sys, "last_value", None), UNCLOSED)

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            self._shared = None  # a group keeps the rendezvous store alive
            if self._here is not None and group is dist.group.WORLD:  # the user's own group may go on
                self._here.leave()
            dist.destroy_process_group(group)

    def _reduce(self, value: Any, operation: dist.ReduceOp.RedOpType) -> Any:
        """Reduce a tensor or a number over all ranks. Numbers give an int if all are ints, else a float."""
        if isinstance(value, Tensor):
            exact = value.detach().to("cpu", torch.float64 if value.is_floating_point() else torch.int64, copy=True)
            says, rows = self._small(DOING[operation], exact)
            if rows is None:
                self._call(says, lambda: dist.all_reduce(exact, operation, group=self._shared, async_op=True))
            else:
                exact = torch.stack(rows).sum(dim=0) if operation == SUM else torch.stack(rows).amax(dim=0)
            return exact.to(value.device)
        text = repr(int(value) if isinstance(value, Integral) else float(value))
        if len(text) > CONTENT:
            raise ConfigError(f"the number {value} has more than {CONTENT} digits, and ranks cannot exchange it")
        texts = [_text(each) for each in self._agree(DOING[operation], "a number", text.encode())[1]]
        is_float = any(not each.lstrip("-").isdecimal() for each in texts)
        numbers = [float(each) if is_float else int(each) for each in texts]
        return sum(numbers) if operation == SUM else max(numbers)

    def _small(self, doing: str, tensor: Tensor) -> tuple[str, list[Tensor] | None]:
        """Check that all ranks make the call `doing`. Return its full name, and all ranks' tensors or None if large."""
        if self._here is None:
            return doing, [tensor.detach().clone()]
        is_small = tensor.nbytes <= CONTENT
        sent = bytes(_bytes_of(tensor).tolist()) if is_small else b""
        says, received = self._agree(doing, f"a {tensor.dtype} tensor of shape {list(tensor.shape)}", sent)
        rows = [torch.tensor(list(each[: tensor.nbytes]), dtype=torch.uint8) for each in received if is_small]
        return says, [_tensor_of(row, tensor) for row in rows] if is_small else None

    def _agree(self, doing: str, value: str = "", content: bytes = b"") -> tuple[str, list[bytes]]:
        """Check that all ranks make the call `doing`; return its full name and the `content` of all ranks."""
        if self._here is None:
            return doing, [content]
        number, (function, line) = self._here.begin(CHANNEL), calling(doing)
        says, text = f"{doing} ({function} at {line})", "|".join((str(number), doing, value, function)).encode()
        message = text[:LABEL].ljust(LABEL) + line.encode()[-LINE:].ljust(LINE) + content.ljust(CONTENT)
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = torch.empty(self.world_size, len(sent), dtype=torch.uint8)
        rows = list(received.unbind())
        self._call(says, lambda: dist.all_gather(rows, sent, group=self._shared, async_op=True))
        messages = [bytes(row) for row in received.numpy()]
        other = next((rank for rank, each in enumerate(messages) if each[:LABEL] != messages[0][:LABEL]), None)
        if other is not None:
            raise ConfigError(_difference(messages[0], messages[other], other))
        return says, [each[-CONTENT:] for each in messages]

    def _call(self, says: str, begin: Callable[[], dist.Work]) -> None:
        if self._shared is None or self._here is None:
            raise ConfigError("the context is closed, so ranks share no more calls; make them before its `with` ends")
        with self.guard(says):
            self._here.wait(CHANNEL, says, partial(_is_over, begin()))


class GradientAveraging:
    """Averages DDP's gradients over Gloo. Meanwhile, the deadlock detector notices ranks that are lost or stuck."""

    def __init__(
        self,
        model: DistributedDataParallel,
        here: DeadlockDetector,
        guard: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._model = weakref.proxy(model)  # DDP holds this hook where garbage collection cannot see it
        self._here, self._guard = here, guard
        self._channel = f"gradients {here.begin('models')}"
        self._pending: list[dist.Work] = []
        self._is_first = True
        model.register_comm_hook(None, self._begin)

    def _begin(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start to average a bucket of gradients. The first one makes the backward pass end with `_finish`."""
        if bucket.index() == 0:
            self._pending = []
            self._here.begin(self._channel)
            Variable._execution_engine.queue_callback(self._finish)
        gradients = bucket.buffer().div_(self._here.size)
        self._pending.append(dist.all_reduce(gradients, group=self._model.process_group, async_op=True))
        begun: torch.futures.Future[Tensor] = torch.futures.Future()
        begun.set_result(bucket.buffer())  # DDP looks at it after `_finish`
        return begun

    def _finish(self) -> None:
        doing, began = "{} ({} at {})".format(AVERAGING, *calling("backward")), time.perf_counter()
        with self._guard(doing):
            for work in self._pending:
                self._here.wait(self._channel, doing, partial(_is_over, work))
        self._pending = []
        self._here.averaging_seconds += time.perf_counter() - began
        if self._is_first:  # DDP itself chooses its buckets anew in the next forward pass, and would wait there
            self._is_first = False
            Variable._execution_engine.queue_callback(self._rebuild_buckets)

    def _rebuild_buckets(self) -> None:
        with self._guard(AVERAGING):
            self._model.reducer._rebuild_buckets()


def _is_over(work: dist.Work, seconds: float) -> bool:
    """Wait for `work`, at most `seconds`; return whether it is done. Raise its error if it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises the error if the work has failed
    return True


def _difference(first: bytes, other: bytes, rank: int) -> str:
    """Return the error text if ranks made different calls. `first` is rank 0's message, `other` that of `rank`."""
    ours, theirs = (_text(message[:LABEL]).split("|") for message in (first, other))
    if [*ours[:2], *ours[3:]] == [*theirs[:2], *theirs[3:]]:
        return f"rank 0 was {ours[1]}: {ours[2]}, but rank {rank} has {theirs[2]}; give all ranks the same"
    one, another = (
        f"{doing}{value and ': '}{value} ({function} at {_text(message[LABEL:-CONTENT])}, call {number})"
        for (number, doing, value, function), message in ((ours, first), (theirs, other))
    )
    return f"rank 0 was {one}, but rank {rank} was {another}; {SAME_CALLS}"


def _text(padded: bytes) -> str:
    return padded.decode(errors="replace").strip()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _tensor_of(sent: Tensor, like: Tensor) -> Tensor:
    return sent.view(like.dtype).reshape(like.shape).to(like.device)


class Ranks(Protocol):
    """The methods of a `Context` that `gather_json` and `all_or_none` need."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather(self, tensor: Tensor, /) -> list[Tensor]: ...  # of all ranks, with equal shape and dtype


def gather_json(ranks: Ranks, value: Any) -> list[Any]:
    """Gather a JSON `value` from each rank; return the list in the order of ranks. All ranks must call this."""
    content = json.dumps(value).encode()
    size = max(int(size) for size in ranks.gather(torch.tensor(len(content))))
    padded = torch.tensor(list(content.ljust(size)), dtype=torch.uint8)
    return [json.loads(bytes(entry.tolist())) for entry in ranks.gather(padded)]


@contextmanager
def all_or_none(ranks: Ranks, doing: str, *, stops: bool = False) -> Iterator[None]:
    """A context manager that all ranks leave together: an error on one rank is raised on all.

    >>> with all_or_none(context, "writing the checkpoint"):
    ...     write(path)

    After Ctrl-C or SystemExit, this rank does not wait for the others, which then report it as lost. With `stops`, it
    waits; use `stops` only if the block ends soon on all ranks once one rank fails.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        if not stops and not isinstance(error, Exception):
            raise
        failure = error
    texts: list[str | None] = []
    try:
        if ranks.world_size > 1:
            own = None if failure is None else str(failure) or type(failure).__name__
            with nullcontext() if failure is None else suppress(PeerError):  # this error matters more than lost ranks
                texts = gather_json(ranks, own)
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback refers to this frame: the cycle would keep files mapped
    rank = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if rank is not None:
        raise PeerError(f"rank {rank} failed {doing}: {texts[rank]}")
