"""A longer line: TCP that arrives so much later, in both directions, with no limit on what is on its way.

For kernels without netem. What comes is held in pipes and not copied (splice), so a byte costs the cores little; how
much, the process says when it is asked.

>>> python benchmarks/delaying.py 127.0.0.1:7100=10.0.0.2:7000
{"delay": 0.0005}
"""

import ctypes
import fcntl
import json
import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

AT_ONCE = 1 << 20  # bytes of a pipe
MOST = 64  # pipes of one direction: what may be on its way
PR_SET_TIMERSLACK = 29
FLAGS = 3  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK


class Direction:
    """One direction of a connection: pipes that hold what has come, each with the time when it is to arrive."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.free: list[tuple[int, int]] = []
        self.held: deque[tuple[float, tuple[int, int], int]] = deque()  # when, where and how many bytes; 0: the end
        self.num_pipes = 0
        self.is_ended = self.is_full = False

    @property
    def reads(self) -> bool:
        return not self.is_ended and (bool(self.free) or self.num_pipes < MOST)

    def take(self, delay: float) -> None:
        """What has come."""
        if not self.free:
            made = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.fcntl(made[1], fcntl.F_SETPIPE_SZ, AT_ONCE)
            self.num_pipes += 1
            self.free.append(made)
        with suppress(BlockingIOError):
            try:
                count = os.splice(self.source.fileno(), self.free[-1][1], AT_ONCE, flags=FLAGS)
            except ConnectionError:
                count = 0
            self.is_ended = count == 0
            self.held.append((time.perf_counter() + delay, self.free.pop(), count))

    def give(self, now: float) -> None:
        """What is due."""
        self.is_full = False
        while self.held and self.held[0][0] <= now and not self.is_full:
            due, pipe, count = self.held.popleft()
            left = self._pass(pipe, count)
            if left:
                self.held.appendleft((due, pipe, left))
                self.is_full = left == count
            else:
                self.free.append(pipe)

    def _pass(self, pipe: tuple[int, int], count: int) -> int:
        """Bytes to the other side; how many it did not take yet."""
        try:
            if count:
                return count - os.splice(pipe[0], self.sink.fileno(), count, flags=FLAGS)
            self.sink.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return count
        except OSError:  # the other side is gone: this one hears of it
            self.is_ended = True
            with suppress(OSError):
                self.source.shutdown(socket.SHUT_RDWR)
        return 0

    @property
    def is_over(self) -> bool:
        return self.is_ended and not self.held

    def close(self) -> None:
        for end in (end for pipe in self.free for end in pipe):
            os.close(end)
        self.sink.close()


class Line:
    """All that is on its way, in one thread."""

    def __init__(self, ways: list[str]) -> None:
        self.delay = 0.0
        self.targets: dict[socket.socket, tuple[str, int]] = {}
        self.pairs: list[tuple[Direction, Direction]] = []
        for way in ways:
            near, far = ([*end.rpartition(":")] for end in way.split("="))
            self.targets[socket.create_server((near[0], int(near[2])))] = far[0], int(far[2])

    def join(self, listening: socket.socket) -> None:
        near, _ = listening.accept()
        far = socket.create_connection(self.targets[listening], 5.0)
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)
        self.pairs.append((Direction(near, far), Direction(far, near)))

    def step(self) -> bool:
        """Wait until something happens, and do it; False when there are no more commands."""
        now = time.perf_counter()
        for one in (one for pair in self.pairs for one in pair):
            one.give(now)
        for pair in [pair for pair in self.pairs if pair[0].is_over and pair[1].is_over]:
            self.pairs.remove(pair)
            pair[0].close()
            pair[1].close()
        directions = [one for pair in self.pairs for one in pair]
        due = min((one.held[0][0] for one in directions if one.held and not one.is_full), default=now + 1.0)
        sources = {one.source: one for one in directions if one.reads}
        sinks = [one.sink for one in directions if one.is_full]
        wait = max(0.0, due - time.perf_counter())
        ready, _, _ = select.select([sys.stdin, *self.targets, *sources], sinks, [], wait)
        for one in ready:
            if one is sys.stdin:
                if not self.obey():
                    return False
            elif one in self.targets:
                self.join(one)
            else:
                sources[one].take(self.delay)
        return True

    def obey(self) -> bool:
        """Another delay; the answer is what this process has had of the cores so far."""
        line = sys.stdin.readline()
        if line:
            self.delay = float(json.loads(line).get("delay", self.delay))
            print(json.dumps({"cores": time.process_time()}), flush=True)
        return bool(line)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds that the kernel may wake us later
    line = Line(sys.argv[1:])
    while line.step():
        pass


if __name__ == "__main__":
    main()
