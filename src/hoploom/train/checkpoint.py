"""Checkpoints: the state of a run's parts as one safetensors file, written by rank 0 and read whole by every rank.

Learned rows and their optimizer's state are in files beside it, one of each kind for each rank. Their names contain a
random tag, which the checkpoint holds, too.

Any safetensors reader sees the tensors. The structure around them is JSON in the file's metadata, which keeps keys of
any scalar type, tuples, NaN and infinity. Tensors that share memory are written twice. A checksum covers the whole
state, which costs one more pass over the bytes.

This module does not import PyG, because that takes seconds and a program may only save checkpoints.
"""

import json
import math
import numbers
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hoploom.errors import ConfigError, HoploomError, StoreError, TrainError
from hoploom.ops.deadline import on_host
from hoploom.ranks.context import Context, all_or_none, unwrap
from hoploom.store import Store
from hoploom.store.format import regular, write_whole

FORMAT = 1
LEARNED = "Embedding"  # the kind of parts that are learned rows
MINUTES = 5.0  # between two checkpoints
PIECE = 1 << 24  # bytes of learned rows that are copied at once, or whose checksum is computed
COST = 0.01  # the largest share of the time that writing checkpoints may take
MALFORMED = (ValueError, RuntimeError, LookupError, TypeError, AttributeError)  # raised for states of wrong types
DEPTH_LIMIT = 64  # the deepest nesting of a state that can be saved
DTYPES = {"BOOL": torch.bool, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
DTYPES |= {"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64}
DTYPES |= {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stateful(Protocol):
    """An object that can be saved: a model, an optimizer, a scheduler, a loader, ..."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@runtime_checkable
class DividedRows(Protocol):
    """A part whose rows are divided over the ranks: hoploom.Embedding. Each rank saves and restores its own."""

    def kept_state(self) -> Mapping[str, Any]: ...  # the state beside the rows
    def load_kept_state(self, state: Any, /) -> None: ...
    def range_of(self, rank: int, world_size: int) -> range: ...
    def own_rows(self) -> Mapping[str, Tensor]: ...  # by kind, "rows" and "state"; `restore` writes to them


def learned_parts(store: Store) -> dict[str, Any]:
    """Return the learned rows of a store as parts of a checkpoint."""
    return {f"rows of {learned.node_type}": learned for learned in store.learned}


class Checkpoint:
    """The checkpoints of a run, in a folder that all ranks can read.

    >>> checkpoint = Checkpoint("runs/papers", context)
    >>> checkpoint.save("last", {"model": model, "optimizer": optimizer, "loader": loader}, epoch=3)
    >>> extra = checkpoint.restore("last", {"model": model, "optimizer": optimizer, "loader": loader})
    """

    def __init__(self, folder: str | Path, context: Context) -> None:
        self.folder, self._context = Path(folder), context

    def path(self, name: str) -> Path:
        """Return the path of the checkpoint with this name; the file need not exist."""
        if name != Path(name).name or name.startswith(".") or not name:
            raise ConfigError(f"a checkpoint cannot be called {name!r}; give a plain name, e.g. 'last'")
        return self.folder / f"{name}.safetensors"

    def save(self, name: str | tuple[str, str], parts: Mapping[str, Stateful], **extra: Any) -> None:
        """Save the state of the parts, and `extra`. All ranks call. The old file stays until the new one is ready.

        `name` may be a pair of names: both files get the same content, so that damage to one leaves the other intact.
        """
        path, *second = map(self.path, (name,) if isinstance(name, str) else name)
        random = {"cpu": self._context.gather(torch.get_rng_state())}
        if self._context.device.type == "cuda":
            random["cuda"] = self._context.gather(torch.cuda.get_rng_state(self._context.device))
        try:
            tag = self._save_rows(parts, [*second, path])
            with all_or_none(self._context, f"writing {path}"):
                for owner in parts.values():
                    if isinstance(owner, nn.Module):
                        check_whole(owner)
                if self._context.is_main:
                    states = {part: dict(_state_of(owner)) for part, owner in parts.items()}
                    kinds = {part: _kind(owner) for part, owner in parts.items()}
                    state = {"format": FORMAT, "parts": states, "kinds": kinds, "extra": extra, "random": random}
                    write_state(path, state | {"rows": tag}, first=second[0] if second else None)
        finally:
            if self._context.is_main:
                for each in (*second, path):
                    self._remove_rows(each)

    def _save_rows(self, parts: Mapping[str, Stateful], paths: Sequence[Path]) -> str:
        """Write this rank's learned rows beside each of `paths`; return the tag in the names of the new files."""
        divided = {part: owner for part, owner in parts.items() if isinstance(owner, DividedRows)}
        if not divided:
            return ""
        tag = bytes(self._context.broadcast(torch.tensor([*os.urandom(4)], dtype=torch.uint8)).tolist()).hex()
        with all_or_none(self._context, f"writing learned rows beside {paths[0]}"):
            for part, owner in divided.items():
                for kind, rows in owner.own_rows().items():
                    *first, last = (_rows_file(path, tag, part, self._context.rank, kind) for path in paths)
                    write_state(last, {kind: rows}, first=first[0] if first else None)
        return tag

    def _remove_rows(self, path: Path) -> None:
        """Remove row files that the checkpoint at `path` does not name.

        They are left by the save before, a failed save, or a killed process.
        """
        with suppress(OSError, HoploomError, SafetensorError, *MALFORMED):  # then the next save removes them
            tag = _structure(path).get("rows") if path.exists() else None
            names = rf"\.?{re.escape(path.stem)}\.(?!{tag or 'no'}-)[0-9a-f]{{8}}-[0-9a-f]{{8}}-\d+\.(rows|state)"
            old = re.compile(rf"{names}(\.partial)?")
            for file in self.folder.iterdir():
                if old.fullmatch(file.name):
                    file.unlink(missing_ok=True)

    def _restore_rows(self, path: Path, tag: str, num_ranks: int, part: str, owner: DividedRows) -> None:
        """Read this rank's learned rows from the files of the ranks that saved them."""
        own = owner.range_of(self._context.rank, self._context.world_size)
        for rank in range(num_ranks):
            saved = owner.range_of(rank, num_ranks)
            begin, end = max(own.start, saved.start), min(own.stop, saved.stop)
            for kind, rows in owner.own_rows().items() if begin < end else ():
                file, out = _rows_file(path, tag, part, rank, kind), rows[begin - own.start : end - own.start]
                _read_rows(file, kind, out, begin - saved.start)

    def restore(self, name: str, parts: Mapping[str, Stateful | None]) -> dict[str, Any] | None:
        """Restore the parts and return `extra`; None if there is no such checkpoint. All ranks call.

        Parts of the checkpoint that are not named are left out, but learned rows only if their part is None.

        The state of torch's random generators is restored too, if the number of ranks is the same.
        """
        path = self.path(name)
        num_found = int(self._context.sum(float(path.exists())))
        if num_found == 0:
            return None
        if num_found < self._context.world_size:
            raise StoreError(
                f"{path} is there for {num_found} of {self._context.world_size} ranks; "
                "put the folder on a file system that all ranks share"
            )
        with all_or_none(self._context, f"reading {path}"):
            state = read_state(path)
            try:
                if state["format"] > FORMAT:
                    found = f"format {state['format']}, this Hoploom reads up to {FORMAT}"
                    raise StoreError(f"{path} has {found}; update Hoploom")
                for part, kind in state["kinds"].items():
                    if kind == LEARNED and part not in parts:
                        way_out = f"restore it with an Embedding as {part!r}, or give None to leave it out"
                        raise ConfigError(
                            f"{path} holds learned rows as {part!r}, and no part has this name; {way_out}"
                        )
                parts = {part: owner for part, owner in parts.items() if owner is not None}
                for part, owner in parts.items():
                    if part not in state["parts"]:
                        found = f"holds no {part!r}, only {sorted(state['parts'])}"
                        raise ConfigError(f"{path} {found}; leave it out, or start anew")
                    if (kind := state["kinds"].get(part)) != _kind(_unwrapped(owner)):
                        found = f"holds a {kind or 'model'} as {part!r}, this run has a {type(owner).__name__}"
                        raise ConfigError(f"{path} {found}; use the same one")
                    if isinstance(owner, nn.Module):
                        _check_model(path, unwrap(owner).state_dict(), state["parts"][part])
                for part, owner in parts.items():
                    way_out = "use the same settings as when it was saved"
                    try:
                        load = (
                            owner.load_kept_state
                            if isinstance(owner, DividedRows)
                            else _unwrapped(owner).load_state_dict
                        )
                        load(state["parts"][part])
                    except HoploomError as error:
                        raise type(error)(f"{path} does not fit this run's {part}: {error}") from error
                    except MALFORMED as error:
                        raise ConfigError(f"{path} does not fit this run's {part}: {error}; {way_out}") from error
                for part, owner in parts.items():
                    if isinstance(owner, DividedRows):
                        self._restore_rows(path, state["rows"], len(state["random"]["cpu"]), part, owner)
                random, rank, device = state["random"], self._context.rank, self._context.device
                if len(random["cpu"]) == self._context.world_size:
                    torch.set_rng_state(random["cpu"][rank])
                    if device.type == "cuda" and "cuda" in random:
                        torch.cuda.set_rng_state(random["cuda"][rank], device)
            except HoploomError:
                raise
            except MALFORMED as error:
                raise StoreError(f"{path} holds what no checkpoint does: {error}; take another checkpoint") from error
        extra: dict[str, Any] = state["extra"]
        return extra


def _rows_file(path: Path, tag: str, part: str, rank: int, kind: str) -> Path:
    """Return the path of one rank's learned rows of a checkpoint, or of their state."""
    return path.with_name(f"{path.stem}.{tag}-{zlib.crc32(part.encode()):08x}-{rank}.{kind}")


def _structure(path: Path) -> Any:
    """Return the state in a file with empty tensors, from the header alone."""
    with safe_open(regular(path), "pt") as file:
        return _decoded(json.loads(file.metadata()["tree"]), dict.fromkeys(file.offset_keys(), torch.empty(0)))


def last_good(path: Path | None) -> str:
    """Return a text for error messages that names the checkpoint to continue from, with its epoch and step."""
    if path is None:
        return "there is no checkpoint"
    with suppress(OSError, HoploomError, SafetensorError, *MALFORMED):
        saved = _structure(path)["parts"]["standing"]
        epoch, step = int(saved["epoch"]) + (int(saved["rows"]) > 0), int(saved["steps"])
        return f"the last good checkpoint is {path}, of epoch {epoch}, step {step}"
    return "there is no checkpoint"


class SaveClock:
    """A clock for checkpoints within an epoch: one after the first step, then every `minutes`; none if `minutes` is 0.

    If writing a checkpoint takes long, the next one comes later, so that writing takes at most 1 % of the time.
    """

    def __init__(self, minutes: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause, self._clock = 60 * minutes, clock
        self._next = -math.inf if minutes else math.inf

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long this `with` block takes to write a checkpoint, and set the time of the next checkpoint."""
        began = self._clock()
        yield
        ended = self._clock()
        if self._pause:
            self._next = ended + max(self._pause, (ended - began) / COST)


def _state_of(part: Any) -> Mapping[str, Any]:
    state: Mapping[str, Any] = part.kept_state() if isinstance(part, DividedRows) else _unwrapped(part).state_dict()
    return state


def _unwrapped(part: Any) -> Any:
    return unwrap(part) if isinstance(part, nn.Module) else part


def _kind(part: Any) -> str:
    """Return a part's class name for `restore` to compare; empty for a model, because its parameters are compared."""
    return "" if isinstance(part, nn.Module) else type(part).__name__


def _check_model(path: Path, mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name, value in mine.items():
        if name not in saved:
            raise ConfigError(f"{path} is of another model: it has no {name!r}; build the model as it was")
        if isinstance(value, Tensor) and value.shape != saved[name].shape:
            raise ConfigError(
                f"{path} is of another model: its {name!r} has shape {tuple(saved[name].shape)}, this one "
                f"{tuple(value.shape)}; build the model as it was"
            )
    for name in saved:
        if name not in mine:
            raise ConfigError(f"{path} is of another model: this one has no {name!r}; build the model as it was")
    for name, other in zip(mine, saved, strict=True):
        if name != other:  # an optimizer's state is matched by position
            raise ConfigError(
                f"{path} lists {other!r} where this model has {name!r}; build its parts in the same order"
            )


def check_whole(model: nn.Module) -> None:
    """Raise ConfigError for a model whose parameters are sharded over the ranks, e.g. by FSDP."""
    is_cut = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())  # a DTensor
    if is_cut or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "the model is cut over the ranks, by fully_shard or FullyShardedDataParallel; fit, evaluate and Checkpoint "
            "take whole models: use context.wrap(model), or train in a loop of your own"
        )


# --- the file ------------------------------------------------------------------------------------


def write_state(path: Path, state: Any, *, first: Path | None = None) -> None:
    """Write a nested state with tensors; the old file stays until the new one is complete and on the disk.

    `first` is a second path, which gets the same bytes before `path` does: damage to one file leaves the other intact.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encoded(state, (), tensors), separators=(",", ":"))
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"the state holds a tensor of {tensor.dtype} at {name!r}; convert it, e.g. to float64")
    entries = _entries(tensors)
    metadata = {"tree": text, "crc32": _checksum(text, entries, _raw(tensors))}
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the data begin at a multiple of eight bytes
    for file in filter(None, (first, path)):
        write_whole(file, chain((len(header).to_bytes(8, "little"), header), _raw(tensors)))


def read_state(path: Path) -> Any:
    """Return the state in a file; raise StoreError if the file is missing or damaged, or was not written by Hoploom."""
    with _reading(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
        if not set(DTYPE_NAMES).issuperset(tensor.dtype for tensor in tensors.values()):
            raise StoreError("it holds tensors of a dtype that Hoploom does not write")
        _check_sum(file.metadata(), _entries(tensors), _raw(tensors))
        return _decoded(json.loads(file.metadata()["tree"]), tensors)


def _read_rows(path: Path, name: str, out: Tensor, first: int) -> None:
    """Read rows from number `first` on into `out`, from a file whose only tensor is `name`, if its checksum matches."""
    with _reading(path) as header, path.open("rb") as file:
        saved = header.get_slice(name)
        whole = torch.empty(saved.get_shape(), dtype=DTYPES[saved.get_dtype()], device="meta")
        if whole.shape[1:] != out.shape[1:] or whole.dtype != out.dtype or whole.shape[0] < first + out.shape[0]:
            raise StoreError(f"it has {list(whole.shape)} numbers of {whole.dtype}, it is of another checkpoint")
        begin = file.seek(-whole.nbytes, os.SEEK_END)
        _check_sum(header.metadata(), _entries({name: whole}), iter(partial(file.read, PIECE), b""))  # may be large
        file.seek(begin + first * whole[:1].nbytes)
        for rows in _cut(out):
            read = torch.empty(rows.shape, dtype=rows.dtype)
            file.readinto(_bytes_of(read))
            rows.copy_(read)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Open a file that `write_state` wrote; turn errors of this block into a StoreError with the way out."""
    try:
        with safe_open(regular(path), framework="pt", backend="pread") as file:
            if not {"tree", "crc32"} <= set(file.metadata() or {}):
                raise StoreError("its header holds no state, it is not from Hoploom")
            yield file
    except (StoreError, SafetensorError, *MALFORMED) as error:
        raise StoreError(f"{path} is damaged: {error}; take another checkpoint, or copy it again") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}; take another checkpoint, or copy it again") from error


def _check_sum(metadata: Mapping[str, str], entries: dict[str, Any], raw: Iterable[bytes | memoryview]) -> None:
    if _checksum(metadata["tree"], entries, raw) != metadata["crc32"]:
        raise StoreError("its checksum does not match")


def _entries(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the entries of a safetensors header for these tensors: dtype, shape and byte range of each."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    return entries


def _checksum(tree: str, entries: dict[str, Any], raw: Iterable[bytes | memoryview]) -> str:
    """Return one checksum of the state's structure, the entries of the file's header, and the tensors' bytes."""
    checksum = zlib.crc32(json.dumps([tree, entries], sort_keys=True).encode())
    for piece in raw:
        checksum = zlib.crc32(piece, checksum)
    return f"{checksum:08x}"


def _raw(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of CPU tensors; of learned rows, which have their state between them, a piece at a time."""
    for tensor in tensors.values():
        for piece in (tensor,) if tensor.is_contiguous() else _cut(tensor):
            yield _bytes_of(piece.contiguous())


def _cut(rows: Tensor) -> Sequence[Tensor]:
    return torch.split(rows, max(1, PIECE // rows[:1].nbytes))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _encoded(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """Return `value`, found at `path` in the state, as JSON values; put its tensors into `tensors`, named by path."""
    at = "/".join(path)
    if len(path) > DEPTH_LIMIT:
        raise ConfigError(f"the state is nested more than {DEPTH_LIMIT} deep at {at!r:.80}; make it flatter")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise ConfigError(f"the state holds a tensor of {value.dtype}, {value.layout} at {at!r}; convert it")
        while at in tensors or at == "__metadata__":
            at += "'"  # a key "a/b" beside a key "a" that holds "b"
        try:
            on_host(torch.empty(0, device=value.device), f"computed {at!r}")
        except TimeoutError as error:
            raise TrainError(f"the checkpoint is not written: {error}") from error
        tensors[at] = value.detach().cpu().resolve_conj().resolve_neg()
        return {"tensor": at}
    if isinstance(value, list | tuple):
        entries = [_encoded(entry, (*path, str(i)), tensors) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"tuple": entries}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"  # MultiStepLR keeps its milestones in one
        return {kind: [[_key(key, at), _encoded(entry, (*path, str(key)), tensors)] for key, entry in value.items()]}
    raise ConfigError(
        f"the state holds a {type(value).__name__} at {at!r}; "
        "only tensors, numbers, strings, lists, tuples and dictionaries can be saved"
    )


def _key(key: Any, at: str) -> Any:
    if key is None or isinstance(key, str | numbers.Real):
        return _encoded(key, (), {})
    raise ConfigError(f"the state has the key {key!r:.80} at {at!r}; keys are numbers or strings")


def _decoded(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `_encoded`: return the state from its JSON values `node` and its tensors by name."""
    if isinstance(node, list):
        return [_decoded(entry, tensors) for entry in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_decoded(entry, tensors) for entry in content)
    if kind in ("dict", "counter"):
        entries = {_decoded(key, tensors): _decoded(value, tensors) for key, value in content}
        return Counter(entries) if kind == "counter" else entries
    raise StoreError(f"its state has an entry {node!r:.80} that no version of Hoploom wrote")
