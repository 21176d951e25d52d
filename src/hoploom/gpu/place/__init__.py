"""Copy a store to memory that kernels read: device memory, host memory, the memory of several GPUs."""

from dataclasses import replace

import torch

from hoploom.gpu.place.peer_memory import PlacingRanks
from hoploom.gpu.place.request import read
from hoploom.store import Store


def place(
    store: Store,
    topology: str | torch.device | None = None,
    features: str | float | torch.device | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    among: PlacingRanks | None = None,
) -> Store:
    """Return the store with its edges and features in memory that a GPU reads. Batches stay the same.

    >>> store = hoploom.place(hoploom.open("papers.store"), topology="cuda", features="20%")
    >>> print(store.placed)

    `topology` is "cuda" (device memory), "host" (pinned host memory, one copy for all processes of the host) or
    "auto" (as free memory allows, topology first). `features` take these too, or a share ("20%", 0.2) or bytes
    ("4GB") of them: the first rows of every part go to the device, the hottest ones in a store that `partition`
    wrote. "spread" shares the rows out among the GPUs of this host's ranks (`among=context`; all ranks call).

    `dtype` ("int8" with a scale per row, "float16", "bfloat16") keeps float features narrower, and rounds them. Close
    the store after its last batch, on all ranks.
    """
    request = read(topology, features, dtype, device)
    from hoploom.gpu.batches.loading import OnDevice  # imports Triton, which `read` has found installed
    from hoploom.gpu.place.placing import copy_store

    placed = copy_store(store, request, among)
    before = store.deployment
    on_device = OnDevice(placed=placed, before=before, homes=before.homes, look_ahead=before.look_ahead)
    return replace(store, deployment=on_device)
