"""Inside of this no operation is begun that would make the host wait for a GPU, wherever the tensors are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAIT = {  # their results' shapes, or Python numbers, hang on values
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.masked_select",
    "aten.bincount",
    "aten.equal",
    "aten.is_nonzero",
    "aten.item",
}
FROM_NUMBERS = ("aten.lift_fresh",)  # a tensor of Python's numbers: on its way to a GPU a copy that is waited for


class NoWaiting(TorchDispatchMode):
    """Operations whose shapes or answers hang on values raise; on a GPU torch itself checks copies too."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        super().__init__()
        self._wait = {*WAIT, *more}

    def __enter__(self) -> "NoWaiting":
        self._mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(self._mode)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        by_mask = name in ("aten.index", "aten.index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        unsized = name == "aten.repeat_interleave" and (kwargs or {}).get("output_size") is None
        assert name not in self._wait, f"{name} waits for the device"
        assert not by_mask, "indexing by a mask waits for the device"
        assert not unsized, "repeat_interleave without output_size waits for the device"
        return func(*args, **(kwargs or {}))
