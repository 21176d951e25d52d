"""Tensors in .pt files. The one place that loads them: weights only, so nothing but tensors is ever made of a file."""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import DataError


def read_tensor(path: Path) -> Tensor:
    """The tensor in a .pt or .npy file, mapped into memory where its format allows."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the path of a tensor that torch.save wrote")
    if path.suffix == ".npy":
        return _read_npy(path)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises what its unpickler, its reader or the system do
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        if "weights only" in reason.lower() or type(error).__name__ == "UnpicklingError":
            what = "cannot be read without unpickling, which Hoploom never does"
            raise DataError(f"{path} {what}; save a plain tensor with torch.save ({reason:.100})") from error
        raise DataError(f"{path} is cut short or damaged ({reason:.100}); get it again") from error
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise DataError(f"{path} holds a {type(value).__name__}; save a plain tensor with torch.save")
    return value.detach()


def _read_npy(path: Path) -> Tensor:
    try:
        values = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); save a plain array with numpy.save") from error
    return torch.from_numpy(values)
