"""How fast do rows of another process arrive, against a bare Flight stream of the same bytes, and how soon a few?

Over loopback, one client. The bare stream sends rows that are already gathered, in pieces of the same size, and its
client only reads them: what Flight itself takes.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cluster
import graph
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import report
import torch
from measure import take_turns
from report import Report, Row, Target

import hoploom
from hoploom.serve.wire import PIECE, SCHEMA
from hoploom.store import Wanted

NUM_ROWS = 250_000  # about what a batch of 15-10-5 around 1024 seeds has
ROW_BYTES = 400
FEW = 100
ROUND_TRIPS = 500


class Bare(flight.FlightServerBase):  # type: ignore[misc]
    """Sends the same bytes again and again."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._rows = pa.py_buffer(np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8))

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        pieces = (self._rows.slice(at, min(PIECE, self._rows.size - at)) for at in range(0, self._rows.size, PIECE))
        return flight.GeneratorStream(SCHEMA, map(record, pieces))

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answers every message with as many bytes as FEW rows have."""
        writer.begin(SCHEMA)
        rows = record(self._rows.slice(0, FEW * ROW_BYTES))
        try:
            while True:
                reader.read_chunk()
                writer.write_with_metadata(rows, b"{}")
        except StopIteration:
            return


def record(piece: pa.Buffer) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.uint8(), piece.size, [None, piece])], schema=SCHEMA)


def measure(tiny: bool) -> Report:
    """Ours and the bare stream take turns, each with a server in a process of its own."""
    path = graph.path_of(cluster.SHAPE, tiny)
    num_rows = NUM_ROWS // 100 if tiny else NUM_ROWS
    bare = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "bare", str(num_rows * ROW_BYTES)], stdout=subprocess.PIPE, text=True
    )
    assert bare.stdout is not None
    try:
        port = int(bare.stdout.readline())
        with cluster.serving(path, [[]]) as addresses, hoploom.connect(addresses, made="here") as store:
            return Report([_throughput(store, port, num_rows), _round_trip(store, port)])
    finally:
        bare.kill()
        bare.wait()


def _throughput(store: Any, port: int, num_rows: int) -> Row:
    ids = torch.randint(0, store.schema.node_types[0].num_nodes, (num_rows,))
    client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
    size = num_rows * ROW_BYTES

    def ours(number: int) -> float:
        begin = time.perf_counter()
        store.features.gather([Wanted("node", "x", ids)])
        return size / (time.perf_counter() - begin) / 1e9

    def theirs(number: int) -> float:
        begin = time.perf_counter()
        got = sum(chunk.data.num_rows for chunk in client.do_get(flight.Ticket(b"")))
        assert got == size
        return size / (time.perf_counter() - begin) / 1e9

    found = take_turns({"ours": ours, "theirs": theirs}, repetitions=15)
    ratio = found["ours"].median / found["theirs"].median
    question = f"rows of {ROW_BYTES} bytes from another process"
    return Row(
        question, "GB/s", found["ours"], "bare Flight stream", found["theirs"], ratio, Target("ratio", ">=", 0.7)
    )


def _round_trip(store: Any, port: int) -> Row:
    ids = torch.randint(0, store.schema.node_types[0].num_nodes, (FEW,))
    client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""))
    writer.begin(SCHEMA)
    asked = record(pa.py_buffer(ids.numpy()))

    def theirs() -> None:
        writer.write_with_metadata(asked, b"{}")
        reader.read_chunk()

    def timed(call: Any) -> float:
        trips = []
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            call()
            trips.append(time.perf_counter() - begin)
        return float(np.median(trips)) * 1e6

    sides = {
        "ours": lambda number: timed(lambda: store.features.gather([Wanted("node", "x", ids)])),
        "theirs": lambda number: timed(theirs),
    }
    found = take_turns(sides)
    ratio = found["ours"].median / found["theirs"].median
    question = f"round trip for {FEW} rows"
    return Row(question, "us", found["ours"], "bare Flight exchange", found["theirs"], ratio, Target("ours", "<", 300))


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        server = Bare(int(sys.argv[2]))
        print(server.port, flush=True)
        server.serve()
    else:
        report.main(measure)
