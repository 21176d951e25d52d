"""Clients of their own process for the fault tests: ranks that lose a server, a client that is killed.

python fault_workers.py SERVERS NUM_IDS is the client.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import torch

import hoploom
from hoploom.serve import wire
from hoploom.serve.wire import Message
from hoploom.train import Context
from support.fleets import WORKER, connect, loader
from support.wires import over_tcp


def lose_a_server(context: Context, servers: str, path: str, victims: str, folder: str) -> None:
    done = 0
    with connect(WORKER, servers.split(","), Path(path), timeout=6) as store:
        for _ in range(1000):
            for _ in loader(store, rank=context.rank, world_size=context.world_size):
                done += 1
                Path(folder, str(context.rank)).write_text(f"{os.getpid()} {done}")
                context.max(done)  # together, step by step
                if done == 3 and context.is_main:
                    Path(folder, "killed").touch()
                    for victim in victims.split(","):
                        os.kill(int(victim), signal.SIGKILL)


def hold_streams(servers: str, num_ids: int) -> None:
    """A loop that has begun, and a stream whose answer is not read to its end; then nothing, until killed."""
    connection = over_tcp(servers)
    ids = torch.arange(num_ids) % 1000
    wire.write_message(connection, Message({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [ids]))
    connection.wait()
    with hoploom.connect(servers) as store:
        for batch in loader(store):
            print(batch.batch_size, flush=True)
            threading.Event().wait(120)


if __name__ == "__main__":
    hold_streams(sys.argv[1], int(sys.argv[2]))
