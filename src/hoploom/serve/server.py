"""The server: it listens, and answers each client that it admits in a thread of its own; no state between requests.

A client hears that its answer is being made. One that leaves meanwhile has its work ended, and one that stops reading
is cut off. A stop is graceful: what is under way is finished, what comes after is refused.
"""

import contextlib
import math
import os
import resource
import secrets
import select
import socket
import sys
import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hoploom import ops
from hoploom.closing import Closing
from hoploom.config.values import is_loopback, join_address, split_address
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, StoreError
from hoploom.serve import greeting, wire
from hoploom.serve.arrivals import BACKLOG, Arrival, Arrivals, Steps
from hoploom.serve.connection import Connection
from hoploom.serve.greeting import Door, RefusedError
from hoploom.serve.incoming import Incoming
from hoploom.serve.memory_budget import WAIT, BusyError, Call, CancelledError, MemoryBudget, Reservation
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ServerSecurity
from hoploom.serve.service import Service
from hoploom.serve.shared_memory import SharedAnswers, is_possible
from hoploom.serve.wire import BrokenError, MalformedError, Message, Prepared, TooLargeError

GRACE = 30.0  # seconds that requests under way get at a stop
MAX_CONNECTIONS = 4096
MAX_ARRIVING = 1024  # besides, connections that are not admitted yet
LOOK_UP = 1.0  # seconds after which a waiting main thread sees a signal that another thread has caught
HEADER = 40  # bytes that a byte of a header may take once it is read
FREE = 1 << 16  # bytes of a header, and of tensors, that take none of the budget: a connection has more for itself
WITHOUT_TENSORS = ("info", "split")  # requests
TRIM_FROM, TRIM_AFTER = 64 << 20, 10.0  # bytes that requests and picks have taken at once, and seconds
TICK = 0.1  # seconds between two looks for clients that have left
LEFT = getattr(select, "POLLRDHUP", 0)  # the other side has ended; not every system tells
LAST_WORDS = 2.0  # seconds for threads to end


@dataclass(frozen=True)
class ServerLimits:
    """What a client may take of a server."""

    stall: float = 60.0  # seconds for a piece of a message to be read by the client, or to come from it
    beat: float = 0.5  # seconds after which, and then how often, a client hears that its answer is being made
    request: int = wire.MAX_REQUEST  # bytes of a request's tensors
    shared: int = 2 << 30  # bytes of memory that is shared with clients on this host
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(2 << 30, WAIT, "requests"))


class Server(Closing):
    """A listening server, from when it is made until it is closed."""

    def __init__(
        self,
        service: Service,
        address: str,
        security: ServerSecurity,
        metrics: Metrics,
        limits: ServerLimits | None = None,
    ) -> None:
        self._service, self._metrics, self._limits = service, metrics, limits or ServerLimits()
        listener = listen(*split_address(address))
        self.host, self.port = split_address(address)[0], int(listener.getsockname()[1])
        unix, name = _listen_on_unix()
        self._door = Door(security, name)
        self._shared = MemoryBudget(self._limits.shared, 0, "shared memory")
        self._open: set[Caller] = set()
        self._trim_at = math.inf  # when memory that requests have taken goes back to the system
        self._lock, self._closed = threading.Lock(), threading.Event()
        arriving = min(MAX_ARRIVING, _allow_many_files() // 4)
        listeners = [listener] if unix is None else [listener, unix]
        self._arrivals = Arrivals(listeners, self._meet, arriving, greeting.PATIENCE, "hoploom-accept")
        threading.Thread(target=self._look_after, name="hoploom-look-after", daemon=True).start()

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def under_way(self) -> int:
        """How many requests are being answered."""
        return self._metrics.under_way

    def drain(self, grace: float = GRACE) -> bool:
        """Refuse what is new, wait for what is under way; whether all of it was finished."""
        self._metrics.draining = True
        end = time.monotonic() + grace
        while not (idle := self._metrics.wait_until_idle(min(LOOK_UP, grace))) and time.monotonic() < end:
            pass
        return idle

    def close(self) -> None:
        """Stop listening. Requests under way are cut off; `drain` comes first where that matters."""
        self._metrics.draining = True
        self._closed.set()
        self._arrivals.close()
        for caller in self._present():
            caller.cut()
        deadline = time.monotonic() + LAST_WORDS
        while self._present() and time.monotonic() < deadline:
            time.sleep(TICK / 10)

    # --- threads -----------------------------------------------------------------------------

    def _meet(self, arrival: Arrival) -> Steps[None]:
        """Admit a client and give it a thread, or refuse it."""
        if len(self._open) >= MAX_CONNECTIONS:
            told = f"{MAX_CONNECTIONS} connections are open already; lower the clients' threads"
            yield from greeting.refuse(arrival, RefusedError(greeting.FULL, told))
        elif (yield from self._door.admit(arrival)):
            caller = Caller(Connection(arrival.socket, self._limits.stall), self._shared)
            with self._lock:
                self._open.add(caller)
            try:
                threading.Thread(target=self._serve, args=[caller], name="hoploom-client", daemon=True).start()
                arrival.is_admitted = True
            except RuntimeError:  # no thread is left: others may end meanwhile
                self._forget(caller)

    def _serve(self, caller: "Caller") -> None:
        """Answer a client until it leaves."""
        try:
            with self._metrics.stream():
                self._converse(caller)
        except (OSError, EOFError):
            pass  # it has left, or was cut off
        finally:
            self._forget(caller)

    def _forget(self, caller: "Caller") -> None:
        caller.close()
        with self._lock:
            self._open.discard(caller)

    def _converse(self, caller: "Caller") -> None:
        """Requests and their answers, one after the other."""
        while True:
            caller.connection.wait()
            memory = Reservation(self._limits.memory, of="a request")
            try:
                self._exchange(caller, memory)
            finally:
                if self._limits.memory.taken >= TRIM_FROM and self._trim_at == math.inf:
                    self._trim_at = time.monotonic() + TRIM_AFTER
                memory.close()

    def _exchange(self, caller: "Caller", memory: Reservation) -> None:
        """Read a request, once there is memory for it, and answer it."""
        connection, refusal = caller.connection, None
        connection.begin(wire.MAX_HEADER)
        try:
            incoming = Incoming(connection, self._limits.request, None, lambda length: _take(memory, HEADER * length))
            if incoming.num_bytes and incoming.header.get("ask") in WITHOUT_TENSORS:
                raise MalformedError(f"tensors of {incoming.num_bytes} bytes; {incoming.header['ask']} takes none")
            try:
                _take(memory, incoming.widened_bytes)
                request = incoming.into()
            except (BusyError, ConfigError) as error:
                refusal = refusal_of(error)
                incoming.skip()
                request = Message(incoming.header)
        except (MalformedError, BrokenError, BusyError, ConfigError) as error:
            known = isinstance(error, HoploomError)
            wire.write(connection, refusal_of(error if known else ConfigError(f"a request is malformed: {error}")))
            connection.hang_up()
            raise ConnectionAbortedError from error
        self._reply(caller, request, refusal, CallOfClient(caller.shared, memory.taken), incoming.num_bytes)

    def _reply(
        self, caller: "Caller", request: Message, refusal: Message | None, call: "CallOfClient", num_bytes: int
    ) -> None:
        with self._metrics.request(str(request.header.get("ask"))) as count:
            count.received = num_bytes
            caller.free(request.header.pop("freed", None))
            try:
                caller.begin_making(call)
                answer = refusal or self._answer(request, call)
            finally:
                caller.end_making()
            error_name = answer.header.get("error")
            count.outcome = "ok" if error_name in (None, "need") else "failed" if error_name in FAILED else "refused"
            try:
                try:
                    prepared = wire.prepare(answer, caller.shared)
                except Exception as error:  # too large, say
                    count.outcome = "failed"
                    prepared = wire.prepare(refusal_of(error), caller.shared)
                count.sent = self._send(caller, prepared)
            finally:
                if answer.done is not None:
                    answer.done()

    def _send(self, caller: "Caller", prepared: Prepared) -> int:
        """An answer, of which rows may be read while it is sent: where that fails, the conversation cannot go on."""
        try:
            return wire.send(caller.connection, prepared)
        except Exception as error:
            if isinstance(error, OSError | EOFError) and not isinstance(error, HoploomError):
                raise  # of the connection
            wire.write_broken(caller.connection, refusal_of(error).header)
            raise ConnectionAbortedError from error

    def _answer(self, request: Message, call: Call) -> Message:
        if self._metrics.draining:
            return Message({"error": "draining", "message": "the server is stopping; ask another"})
        try:
            return self._service.answer(request, call)
        except CancelledError as error:
            raise ConnectionAbortedError from error
        except Exception as error:  # it belongs to the client, which waits for an answer
            return refusal_of(error)

    def _look_after(self) -> None:
        """Tell clients that their answers are being made, and notice those that have left meanwhile."""
        while not self._closed.wait(min(TICK, self._limits.beat)):
            if self._trim_at <= time.monotonic():
                self._trim_at = math.inf
                ops.pool_trim()
            making = [one for one in self._present() if one.making_since is not None]
            poll = select.poll()
            of_file = {one.connection.fileno(): one for one in making}
            for file in of_file:
                if file >= 0:
                    poll.register(file, LEFT | select.POLLOUT)
            for file, events in poll.poll(0) if making else ():
                if events & ~select.POLLOUT:
                    of_file[file].cancel()
                if events & select.POLLOUT:  # others would wait for one that does not read
                    of_file[file].beat(self._limits.beat)

    def _present(self) -> "list[Caller]":
        with self._lock:
            return list(self._open)


class CallOfClient(Call):
    """One whose answer may be made in memory that its client reads."""

    def __init__(self, shared: SharedAnswers | None, requested: int) -> None:
        super().__init__(is_shared=shared is not None, requested=requested)
        self._shared = shared

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = None if self._shared is None else self._shared.empty(shape, dtype)
        return ops.empty(shape, dtype) if found is None else found


class Caller:
    """One client's connection, and the request of it that is being answered."""

    def __init__(self, connection: Connection, budget: MemoryBudget) -> None:
        self.connection = connection
        self.shared = SharedAnswers(budget) if connection.is_local and is_possible() else None
        self.making_since: float | None = None
        self._told = 0.0  # when the client heard last that its answer is being made
        self._call: CallOfClient | None = None
        self._lock = threading.Lock()  # whoever holds it may write

    def begin_making(self, call: CallOfClient) -> None:
        """An answer is being made: the client hears of it while it lasts."""
        self._call = call
        self._told = self.making_since = time.monotonic()

    def end_making(self) -> None:
        with self._lock:
            self.making_since = self._call = None

    def beat(self, seconds: float) -> None:
        """Tell the client, if the answer takes longer than that."""
        with self._lock, contextlib.suppress(OSError):
            if self.making_since is not None and time.monotonic() - self._told >= seconds:
                self._told = time.monotonic()
                wire.write_made(self.connection)

    def cancel(self) -> None:
        """Its client has left: nothing more has to be made."""
        call = self._call
        if call is not None:
            call.is_cancelled = True

    def free(self, numbers: object) -> None:
        """The client has let these segments go."""
        if self.shared is not None and isinstance(numbers, list):
            self.shared.free(number for number in numbers if type(number) is int)

    def cut(self) -> None:
        self.cancel()
        self.connection.cut()

    def close(self) -> None:
        self.connection.close()
        if self.shared is not None:
            self.shared.close()


FAILED = (PeerError.__name__, BatchError.__name__, StoreError.__name__)


def _take(memory: Reservation, amount: int) -> None:
    if amount > FREE:
        memory.take(amount)


def refusal_of(error: Exception) -> Message:
    """An answer that says why there is none."""
    if isinstance(error, TooLargeError):
        error = BatchError(f"an answer would have {error}; ask for less at once")
    elif not isinstance(error, HoploomError):
        error = BatchError(f"{type(error).__name__}: {error}")
    return Message({"error": type(error).__name__, "message": str(error)[:2000]})


# --- where it listens ----------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket that others reach; ConfigError where nobody could listen."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}; give another address") from error
    if not is_loopback(host) and all(is_loopback(str(one[4][0])) for one in found):
        listener.close()
        raise ConfigError(
            f"{host} is {found[0][4][0]} on this host (/etc/hosts may say so), which no other host reaches; give the "
            "address that others reach it by, or 127.0.0.1 where none is to"
        )
    return listener


def _listen_on_unix() -> tuple[socket.socket, str] | tuple[None, None]:
    """A Unix socket without a file, under a name that nobody guesses, where the system has such."""
    if not is_possible():
        return None, None
    name = f"hoploom-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
    except OSError:  # it is not allowed here: clients come over TCP
        listener.close()
        return None, None
    return listener, name


def _allow_many_files() -> int:
    """Return how many descriptors this process may have, after raising that as far as the system lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed
