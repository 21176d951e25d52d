"""A small training in every rank, for the tests of hosts: python host_workers.py STORE FOLDER SERVERS TOKEN_FILE.

Rank k maps part k and asks servers for the rest, then all of it again with batches that servers make, and at last every
rank opens the whole store. Rank 0 tells every epoch's loss, in all its bits, in a file.
"""

import gc
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

import hoploom
from hoploom.nn import GraphSAGE
from hoploom.train import Context

EPOCHS, CUT_BEFORE = 3, 1  # epochs, and which of them begins with a wire pulled
NUM_CLASSES = 4


def train(context: Context, store: hoploom.Store, name: str, folder: Path) -> None:
    torch.manual_seed(1)
    model = context.wrap(GraphSAGE(5, hidden_channels=8, num_layers=2, out_channels=NUM_CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    share = {"rank": context.rank, "world_size": context.world_size}
    loader = hoploom.NeighborLoader(store, [4, 3], "train", batch_size=32, shuffle=True, num_workers=2, **share)
    losses = []
    for epoch in range(EPOCHS):
        if epoch == CUT_BEFORE and name != "alone":
            await_cut(context, name, folder)
        summed = torch.zeros(())
        for batch in loader:
            optimizer.zero_grad()
            expected = batch.n_id[: batch.batch_size] % NUM_CLASSES
            found = F.cross_entropy(model(batch)[: batch.batch_size], expected, reduction="none")
            context.mean_loss(found).backward()
            optimizer.step()
            summed += found.detach().sum()
        losses.append(context.sum(summed).item().hex())
    if context.is_main:
        (folder / f"{name}.losses").write_text(" ".join(losses))


def await_cut(context: Context, name: str, folder: Path) -> None:
    """Go on only when the test has pulled a wire, so that it is pulled in the middle of the training."""
    context.barrier()
    (folder / f"{name}.ready.{context.rank}").touch()
    deadline = time.monotonic() + 60
    while not (folder / f"{name}.cut").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def main(path: str, folder: Path, servers: str, token_file: str) -> None:
    with hoploom.init(timeout=60) as context:
        common = {"servers": servers, "token_file": token_file, "timeout": 60}
        train(
            context,
            hoploom.open(path, context=context, parts=[context.rank], topology="parted", **common),
            "worker",
            folder,
        )
        train(context, hoploom.open(context=context, **common), "client", folder)
        train(context, hoploom.open(path, context=context, serve=False), "alone", folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    gc.freeze()  # what ends now needs no collection
