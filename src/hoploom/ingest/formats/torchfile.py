"""Tensors in .pt files. The one place that loads them: weights only, so nothing but tensors is ever made of a file."""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import DataError

COMPUTED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # torch hardly computes with other integers


def read_tensor(path: Path) -> Tensor:
    """The rows in a .pt or .npy file, mapped into memory where its format allows."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the path of a tensor that torch.save wrote")
    rows = _read_npy(path) if path.suffix == ".npy" else _read_pt(path)
    if rows.dim() == 0:
        raise DataError(f"{path} holds a single value; rows were expected, so save a tensor with one per node or edge")
    return rows


def read_ids(path: Path) -> Tensor:
    """The ids in a .pt or .npy file, [n]: integers, in a list or in one column."""
    ids = read_tensor(path)
    if ids.dim() != 1 and ids.shape[1:] != (1,):
        raise DataError(f"{path} has shape {tuple(ids.shape)}; a list of ids was expected")
    if ids.numel() and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex()):
        raise DataError(f"{path} has dtype {ids.dtype}; ids are integers, so save it as int64")
    return (ids if ids.dtype in COMPUTED else ids.to(torch.int64)).reshape(-1)


def _read_pt(path: Path) -> Tensor:
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
        if not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        return torch.from_numpy(values)
    except (TypeError, ValueError, OSError, EOFError) as error:
        reason = str(error).split(". ", 1)[0]
        raise DataError(f"{path} cannot be read ({reason}); save an array of plain numbers with numpy.save") from error
