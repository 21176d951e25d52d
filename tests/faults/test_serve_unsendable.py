"""Requests and answers that cannot be sent are errors that say so: to ask again, or another server, helps nobody."""

import pytest
import torch
from support.services import answering, at_once

from hoploom import BatchError, ConfigError
from hoploom.serve import wire
from hoploom.serve.client import read_message
from hoploom.serve.memory_budget import RequestContext
from hoploom.serve.wire import Message, StreamedTensor, TensorSpec

INFO = Message({"ask": "info"})


def test_a_request_that_no_server_takes_is_refused_before_it_is_sent() -> None:
    with answering(at_once) as (_, peer):
        with pytest.raises(ConfigError, match="a header of 2000023 bytes; at most 1048576; ask for less at once"):
            peer.send(Message({"ask": "x" * 2_000_000}))
        with pytest.raises(ConfigError, match="a request has tensors of 268435464 bytes; at most 268435456; ask for"):
            peer.send(Message({"ask": "x"}, [torch.empty(wire.MAX_REQUEST // 8 + 1, dtype=torch.int64)]))
        with pytest.raises(ConfigError, match="a request has 4097 tensors; at most 4096"):
            peer.send(Message({"ask": "x"}, [torch.empty(0)] * 4097))
        assert peer.request(INFO, read_message).header == {}


def fail(request: Message, call: RequestContext) -> Message:
    """Answer with a header that is too long, or break off with an error that nobody foresaw."""
    if request.header["ask"] == "long":
        return Message({"told": "x" * 2_000_000})
    if request.header["ask"] == "told":
        return Message({"told": {1, 2}})

    def fill(row: int, out: torch.Tensor) -> None:
        if row:
            raise ZeroDivisionError("row by row")

    return Message({}, [StreamedTensor(TensorSpec(torch.int64, (10,)), fill, 8)])


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        ("long", "an answer would have a header of 2000024 bytes"),
        ("rows", "ZeroDivisionError: row by row"),
        ("told", "TypeError: Object of type set is not JSON"),
    ],
)
def test_an_answer_that_cannot_be_sent_says_why(ask: str, told: str) -> None:
    """It is an error of this request: to ask again, or another, helps nobody."""
    with answering(fail) as (server, peer):
        for _ in range(2):
            with pytest.raises(BatchError, match=told):
                peer.request(Message({"ask": ask}), read_message)
    assert server._metrics.value("hoploom_requests_total", kind="other", outcome="failed") == 2
