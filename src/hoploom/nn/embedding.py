"""Learned rows of nodes: looked up with gradients, and updated sparsely by rules that keep their state beside each row.

The rows of a type are divided over the ranks by id. The ranks of a host map the same memory, which holds the rows of
these ranks, so a look-up is a copy. On several hosts, all ranks look rows up together, and the owners send those of
other hosts. In `step`, each gradient goes to the rank that owns its row. This rank adds up all gradients of a row, in
the order of ranks and look-ups, and changes the row once. If the graph's features are on a GPU, a single process keeps
rows there, too.

The servers that hold the graph's parts could own the rows, but then each look-up on the same host would be a request,
and gradients, which the ranks compute, would go to another process in every step, also of one rank alone.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hoploom import keys, ops
from hoploom.config.values import as_bytes, as_int, as_number
from hoploom.errors import ConfigError, TrainError
from hoploom.nn.row_memory import shared_zeros
from hoploom.nn.row_tables import AT_ONCE, read_row_table, write_rows
from hoploom.ops import RowRule, RowStep
from hoploom.ops.deadline import on_host
from hoploom.ops.device_rows import mixed_words, update_device_rows
from hoploom.ranks import environment
from hoploom.ranks.context import Context, all_or_none, gather_json, init
from hoploom.schema import DTYPES, FEATURES, ORIGINAL_ID, Field, NodeType, holds_text, read_ids
from hoploom.store import Store, Wanted
from hoploom.store.learned_fields import Join, LearnedFeatures, joined_rows
from hoploom.system import memory_limit, require_memory

RowOptimizer = Literal["rowwise_adagrad", "adagrad", "lazy_adam", "sgd"]
RowDtype = Literal["float32", "bfloat16"]
RowInit = Literal["uniform", "normal"]
EPS = {RowRule.adagrad: 1e-10}  # added to the root of the state; else 1e-8. torch.optim has the same values
BETAS = (0.9, 0.999)
MOST_WAITING = 4 * 10**9  # bytes of gradients that wait for a step; at most a quarter of the memory
OF_OTHERS = "take the graph that it was saved with, or export() the rows there and give the file as warm_start"
WAYS_OUT = "give a smaller dim, dtype='bfloat16', or folder= on a fast disk"


class Embedding:
    """Learned rows of a node type, as its features or beside them: [num_nodes, dim], divided over the ranks.

    >>> users = hoploom.Embedding(store, "user", dim=128, lr=0.05)
    >>> loader = hoploom.NeighborLoader(users.store, [10, 5], input_nodes=("item", "train"))
    >>> for batch in loader:  # batch["user"].x are the learned rows
    ...     loss_of(model(batch)).backward()
    ...     optimizer.step(), users.step()

    A second type goes on from there: `items = hoploom.Embedding(users.store, "item", dim=128)`, and `items.store`. In a
    loop of your own, you may also look rows up, for batches of any loader: `users(batch["user"].n_id)`.

    - `optimizer`: "rowwise_adagrad" keeps 4 bytes for each row, "adagrad" and "lazy_adam" keep one or two numbers for
      each value. Only rows that have a gradient change. The count of steps of "lazy_adam" is each row's own. With None,
      rows do not change: they are those of `warm_start` (drawn, for nodes that its file lacks), or zeros until
      `Checkpoint.restore` reads them.
    - `init`: initial values, "uniform" between -1/sqrt(dim) and 1/sqrt(dim), or "normal", as torch.nn.Embedding's.
      They depend on `seed`, the type and the node's original id: a grown graph keeps the rows of its old nodes.
    - `join`: how the rows join features that the type has already: "cat", after them, or "add".
    - `warm_start`: a file of `export`, whose rows its nodes begin with; the optimizer's state begins anew.
    - `context`: what `hoploom.init()` returned, if there are several ranks. All ranks then call `step` together. On
      several hosts, they also look rows up together: in batches of a loader of all ranks, or as many times by hand.
    - `folder`: a folder on a disk, for rows that do not fit in memory.

    If the store is placed with all features in device memory, a single process keeps rows and their state there.
    """

    def __init__(
        self,
        store: Store,
        node_type: str | None = None,
        *,
        dim: int,
        optimizer: RowOptimizer | None = "rowwise_adagrad",
        lr: float = 0.05,
        dtype: RowDtype = "float32",
        init: RowInit = "uniform",
        seed: int = 0,
        join: Join | None = None,
        warm_start: str | Path | None = None,
        context: Context | None = None,
        folder: str | Path | None = None,
    ) -> None:
        if not isinstance(store, Store):
            way_out = "give a store, such as hoploom.open(path) or hoploom.from_pyg(graph)"
            raise ConfigError(f"learned rows are of a store, and this is a {type(store).__name__}; {way_out}")
        self.dim = as_int("dim", dim, 1, "give the width of a row")
        if self.dim >= 1 << 31:
            raise ConfigError(f"dim is {self.dim}; give the width of a row, below 2**31")
        self.lr = as_number("lr", lr, "give a learning rate above 0")
        if self.lr == 0:
            raise ConfigError("lr is 0, so the rows would never change; give a learning rate above 0")
        chosen = (("optimizer", optimizer, RowOptimizer), ("dtype", dtype, RowDtype), ("init", init, RowInit))
        for name, value, known in chosen:
            if value not in get_args(known) and (name, value) != ("optimizer", None):
                raise ConfigError(f"{name} is {value!r:.80}; choose one of {list(get_args(known))}")
        self.is_fixed = optimizer is None
        self.rule = RowRule[optimizer or "sgd"]  # which keeps no state
        self._of = _described(store, node_type)
        if self._of.name in store.learned_types:
            raise ConfigError(f"{self._of.name!r} has learned rows already; give the store that they were made from")
        self.join = _read_join(self._of, self.dim, join)
        self.seed = as_int("seed", seed, 0, "give a number of at least 0")
        self._normal, self._spread = init == "normal", 1.0 if init == "normal" else self.dim**-0.5
        self._context = _own_context(context)
        count, ranks = self._of.num_nodes, self._context
        hosts = gather_json(ranks, ranks.rank_info.host)  # by rank
        ranges = {r: self.range_of(r, len(hosts)) for r, host in enumerate(hosts) if host == hosts[ranks.rank]}
        row_bytes, state_at, record_bytes = record_layout(self.dim, dtype, self.rule)
        num_bytes = sum(map(len, ranges.values())) * record_bytes
        for name, path, kind in (("folder", folder, "folder"), ("warm_start", warm_start, "file")):
            if not isinstance(path, str | Path | None) or path == "":
                raise ConfigError(f"{name} is {path!r:.80}; give the path of a {kind}, or leave it out")
        place = None if folder is None else Path(folder)
        is_alone = folder is None and ranks.world_size == 1  # several ranks read each other's rows, in host memory
        taken = f"the learned rows of {self.node_type!r} take"
        device = store.placed.device_for(num_bytes, taken) if is_alone and store.placed is not None else None
        with all_or_none(ranks, "making learned rows"):
            limit = None if store.budget is None else store.budget.num_bytes
            if device is None and place is None and limit is not None and num_bytes > limit:
                wanted = f"{as_bytes(num_bytes)}, more than the store's memory of {as_bytes(limit)}"
                raise ConfigError(f"{taken} {wanted}; {WAYS_OUT}")
            if device is None and place is None:
                require_memory(num_bytes, taken, WAYS_OUT)
        settings = {"rows of": self.node_type, "num_nodes": count, "dim": dim, "dtype": dtype, "optimizer": optimizer}
        settings |= {"lr": lr, "init": init, "seed": seed, "join": join}
        settings |= {"warm_start": warm_start and str(warm_start), "folder": folder and str(folder)}
        if others := [each for each in gather_json(ranks, settings) if each != settings]:
            raise ConfigError(f"this rank learns rows with {settings}, and another with {others[0]}; give all the same")
        self._is_on_device, self._file = device is not None, -1
        if device is None:
            records, self._file = shared_zeros((count, record_bytes), ranks, ranges, place)  # zeros for other hosts
            self.rows = records[:, :row_bytes].view(DTYPES[dtype])
            self.state = records[:, state_at:].view(torch.float32)
        else:
            self.rows = torch.zeros(count, self.dim, dtype=DTYPES[dtype], device=device)
            self.state = torch.zeros(count, self.rule.state_width(self.dim), dtype=torch.float32, device=device)
        self._far = sorted({*range(len(hosts))} - ranges.keys())  # ranks of other hosts
        self._bounds = torch.tensor(
            [self.range_of(rank, ranks.world_size).start for rank in range(1, ranks.world_size)]
        )
        self.num_steps = 0
        self._anchor = torch.zeros((), requires_grad=not self.is_fixed)  # makes look-ups part of autograd's graph
        self._num_look_ups, self._most_waiting = 0, min(MOST_WAITING, memory_limit() // 4)
        self.zero_grad()
        with all_or_none(ranks, f"drawing the rows of {self.node_type!r}"):  # no rank reads undrawn rows
            of_own = self._draw(store, draws=not self.is_fixed or warm_start is not None)
            given = () if warm_start is None else read_row_table(Path(warm_start), store, self.node_type, self.rows)
            for ids, rows in given:
                are_own = (ids >= self._own.start) & (ids < self._own.stop)
                self.rows[ids[are_own]] = rows[are_own].to(self.rows)
        self._nodes = f"{sum(gather_json(ranks, of_own)) & keys.MASK:016x}"  # the digest of their ids in this order
        self._graph = store  # not the store with the rows: a cycle of references would keep them in memory

    def __repr__(self) -> str:
        rows = f"{self._of.num_nodes:,} of {self.dim} {self._kind['dtype']}"
        how = "fixed" if self.is_fixed else f"{self.rule.name}, lr={self.lr:g}"
        where = f", on {self.rows.device}" if self._is_on_device else ""
        return f"Embedding({self.node_type}: {rows}, {how}{where})"

    @property
    def node_type(self) -> str:
        return self._of.name

    @property
    def store(self) -> Store:
        """The graph with the rows as features of their type."""
        of, features = self._of, self._graph.features
        own = 0 if self.join != "cat" else of.fields[FEATURES].shape[0]
        changed = replace(of, fields={**of.fields, FEATURES: Field("float32", (own + self.dim,))})
        types = tuple(changed if each is of else each for each in self._graph.schema.node_types)
        schema = replace(self._graph.schema, node_types=types)
        return replace(
            self._graph,
            schema=schema,
            features=LearnedFeatures(schema, features, self),
            learned=(*self._graph.learned, self),
            unlearned=self._graph.unlearned or self._graph,
        )

    def range_of(self, rank: int, world_size: int) -> range:
        """Return the ids of the nodes whose rows a rank updates and saves."""
        count = self._of.num_nodes
        return range(count * rank // world_size, count * (rank + 1) // world_size)

    def __call__(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Return the rows of nodes given by their ids in the store: [*ids.shape, dim] float32, on the device of `ids`.

        Gradients of the rows are kept for `step`. On several hosts, all ranks call this equally often, a rank without
        ids with an empty tensor. An id out of range on one rank is then a PeerError on the others.
        """
        try:
            ids = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"ids of {self.node_type!r} are {ids!r:.80}"
            raise ConfigError(f"{what}; give a tensor or a list of integers") from error
        on_cpu = on_host(ids.reshape(-1), "found ids to look up")
        read_ids(f"ids of {self.node_type!r}", on_cpu, self._of.num_nodes, ConfigError)
        return self._look_up(ids)

    def read_alone(self, ids: Tensor) -> Tensor:
        """Return the rows of the nodes `ids` ([n] int64) without gradients: [n, dim] float32."""
        if self._far:
            way_out = "call the Embedding itself on all ranks, under torch.no_grad(), or export the rows"
            raise ConfigError(f"learned rows of {self.node_type!r} are on several hosts; {way_out}")
        return self._read_here(ids)

    def attach(self, batch: Any) -> None:
        """Set `x` of this type in a batch to the rows of its nodes, joined to the features that it has already."""
        storage = batch[self.node_type] if hasattr(batch, "node_types") else batch
        rows = self._look_up(storage.n_id)  # which were checked when they were sampled
        storage.x = rows if self.join is None else joined_rows(storage.x, rows, self.join)

    def attach_nothing(self) -> None:
        """Answer the look-ups of other ranks for one batch that this rank does not have."""
        self._read_together(torch.empty(0, dtype=torch.int64))

    def step(self, scale: float = 1.0) -> None:
        """Update all rows that got gradients since the last call. All ranks call this, also without gradients.

        Gradients are averaged over the ranks, as DDP averages those of a model, and multiplied by `scale`. Raise
        TrainError on all ranks if a row or its state would not be finite; both stay as they are.
        """
        scale = as_number("scale", scale, "give a factor of the gradients, such as 1 / scaler.get_scale()")
        broken = -1
        taken = sorted(self._gradients, key=lambda entry: entry[0])
        self.zero_grad()
        ids, gradients = torch.empty(0, dtype=torch.int64), torch.empty(0, self.dim, dtype=torch.float32)
        if len(taken) == 1:
            _, ids, gradients = taken[0]
        elif taken:
            ids, gradients = torch.cat([ids for _, ids, _ in taken]), torch.cat([rows for _, _, rows in taken])
        if self._context.world_size > 1:
            ids, gradients = self._of_own_rows(ids, gradients)
        if ids.numel():
            own, key = self._own, keys.mix(keys.mix(self._key, keys.ROUNDING), self.num_steps)
            options = RowStep(self.rule, self.lr, scale / self._context.world_size, self._eps, BETAS, key, self._file)
            update = update_device_rows if self._is_on_device else ops.update_rows
            broken = update(self.rows[self._own_slice], own.start, self.state[self._own_slice], ids, gradients, options)
        self.num_steps += 1
        broken = self._context.max(broken)  # after this, no rank reads a row that another is updating
        if broken >= 0:
            raise TrainError(
                f"row {broken} of {self.node_type!r} or its state would not be finite after step {self.num_steps}; "
                f"it stays as it is; lower its learning rate (lr={self.lr:g}), or look at that batch"
            )

    def export(self, path: str | Path) -> None:
        """Write all rows to a Parquet file, with your ids: `hoploom build` reads it as features. All ranks call."""
        wanted = slice(None) if self._context.is_main else slice(0)
        pieces = ((ids, self._read_together(ids[wanted])) for ids in _pieces(range(self._of.num_nodes)))
        with all_or_none(self._context, f"writing {path}"):
            try:
                if self._context.is_main:
                    write_rows(Path(path), self._graph, self.node_type, self.dim, pieces)
            finally:
                deque(pieces if self._far else (), maxlen=0)  # ranks of all hosts send rows

    @contextmanager
    def all_rows(self, share: Callable[[int, Tensor, int], Tensor], world_size: int) -> Iterator[None]:
        """A context manager in which `read_alone` also has rows of other hosts, from the tensor that `share` returns.

        `share(first, rows, count)` gets the id of this rank's first row, its rows, and the number of all rows. All
        ranks call; `world_size` is how many there are for the caller.
        """
        before = self.rows, self._file, self._far
        if self._far:
            if world_size != self._context.world_size:
                way_out = "call infer on all ranks, and write_best; or export the rows"
                raise ConfigError(f"learned rows of {self.node_type!r} are on several hosts; {way_out}")
            rows = share(self._own.start, self.rows[self._own_slice], self._of.num_nodes)
            self.rows, self._file, self._far = rows, -1, []
        try:
            yield
        finally:
            self.rows, self._file, self._far = before

    def zero_grad(self) -> None:
        """Forget the gradients since the last step."""
        self._gradients: list[tuple[int, Tensor, Tensor]] = []  # look-up, ids, gradients
        self._waiting = 0  # bytes of gradients

    def state_dict(self, *given: Any) -> dict[str, Any]:
        """Raise ConfigError: a state would have to hold the rows, which are divided over the ranks."""
        way_out = "save it as a part of a Checkpoint, or export() the rows and give the file as warm_start"
        raise ConfigError(f"the learned rows of {self.node_type!r} do not fit in a state_dict; {way_out}")

    load_state_dict = state_dict

    def kept_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the rows."""
        return {"num_nodes": self._of.num_nodes, "nodes": self._nodes, **self._kind, "num_steps": self.num_steps}

    def load_kept_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; raise ConfigError if it does not fit. `Checkpoint.restore` reads the rows."""
        if (before := state.get("num_nodes")) != self._of.num_nodes:
            raise ConfigError(f"num_nodes was {before}, and is {self._of.num_nodes} here; {OF_OTHERS}")
        if state.get("nodes") != self._nodes:
            raise ConfigError(f"its nodes are others, or in another order, as after partitioning; {OF_OTHERS}")
        for name, mine in self._kind.items():
            if state.get(name) != mine and not (self.is_fixed and name == "optimizer"):
                raise ConfigError(f"{name} was {state.get(name)}, and is {mine} here; make the Embedding as it was")
        self.num_steps = as_int("num_steps", state.get("num_steps"), 0, "take another checkpoint")

    def own_rows(self) -> dict[str, Tensor]:
        """Return views of this rank's rows and their optimizer state, for a checkpoint to read or write."""
        views = {"rows": self.rows, "state": self.state}
        return {kind: of[self._own_slice] for kind, of in views.items() if of.shape[1]}

    @property
    def _kind(self) -> dict[str, Any]:
        optimizer = None if self.is_fixed else self.rule.name
        return {"dim": self.dim, "dtype": str(self.rows.dtype).removeprefix("torch."), "optimizer": optimizer}

    @property
    def _own(self) -> range:
        return self.range_of(self._context.rank, self._context.world_size)

    @property
    def _own_slice(self) -> slice:
        return slice(self._own.start, self._own.stop)

    @property
    def _eps(self) -> float:
        return EPS.get(self.rule, 1e-8)

    @property
    def _key(self) -> int:
        """The key of this type's random numbers."""
        digest = hashlib.sha256(self.node_type.encode()).digest()
        return keys.mix(keys.mix(keys.LEARNED, self.seed), int.from_bytes(digest[:8], "little"))

    def _keep(self, number: int, ids: Tensor, gradients: Tensor) -> None:
        """Keep gradients for `step`; raise ConfigError if nobody seems to call it."""
        self._gradients.append((number, ids, gradients))
        self._waiting += gradients.nbytes
        if self._waiting > self._most_waiting:
            taken = f"{self.node_type!r} take more than {as_bytes(self._most_waiting)}"
            raise ConfigError(
                f"gradients of {len(self._gradients)} look-ups of {taken}; call step() after backward(), or zero_grad()"
                ", or lower train.accumulate (fit steps the rows of its loader's store alone)"
            )

    def _draw(self, store: Store, *, draws: bool) -> int:
        """Write the initial values of this rank's rows if it `draws` them. Return its share of the nodes' digest.

        The digest is the sum of a word of each node, from its place and its id, so that it is that of any ranks.
        """
        digest = 0
        for ids in _pieces(self._own):
            identities = _identities(store, self._of, ids)
            digest += int(mixed_words(mixed_words(torch.zeros_like(ids), ids), identities).sum())
            if not draws:
                continue
            rows = self.rows[int(ids[0]) : int(ids[-1]) + 1]
            drawn = rows.cpu()  # `rows`, unless they are on a GPU
            ops.draw_rows(drawn, identities, self._key, normal=self._normal, spread=self._spread)
            rows.copy_(drawn)
        return digest

    def _look_up(self, ids: Tensor) -> Tensor:
        found: Tensor = _LookUp.apply(self._anchor, self, ids)  # type: ignore[no-untyped-call]
        return found

    def _read_here(self, ids: Tensor) -> Tensor:
        if self._is_on_device:
            return self.rows.index_select(0, ids.to(self.rows.device)).float().to(ids.device)
        return ops.look_up_rows(self.rows, ids.cpu(), self._file).to(ids.device)

    def _read_together(self, ids: Tensor) -> Tensor:
        """Return the rows of the nodes `ids` ([n] int64): [n, dim] float32. Ranks of several hosts call together."""
        if not self._far:
            return self._read_here(ids)
        routed = ops.route(ids, self._bounds)
        asked = ops.joined([routed[rank] for rank in self._far])
        here = ops.joined([places for rank, places in enumerate(routed) if rank not in self._far])
        counts = [places.numel() if rank in self._far else 0 for rank, places in enumerate(routed)]
        doing = f"looking up rows of {self.node_type!r}"
        answers = self._context.exchange(ops.select(ids, asked), counts, doing, self._read_here)
        found = torch.empty(ids.numel(), self.dim, dtype=torch.float32)
        found[here], found[asked] = self._read_here(ops.select(ids, here)), answers
        return found

    def _of_own_rows(self, ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Send gradients to the ranks that own their rows; return the ids of own rows, and the gradients sent here."""
        routed = ops.route(ids, self._bounds)
        order = ops.joined(routed)
        sent = ops.empty((ids.numel(), self.dim + 2), torch.float32)  # an id takes the place of two numbers
        sent[:, :2] = ops.select(ids, order).view(torch.float32).view(-1, 2)
        torch.index_select(gradients, 0, order, out=sent[:, 2:])
        doing = f"exchanging gradients of {self.node_type!r}"
        received = self._context.exchange(sent, [positions.numel() for positions in routed], doing)
        return received[:, :2].reshape(-1).clone().view(torch.int64), received[:, 2:]


class _LookUp(torch.autograd.Function):
    """Rows by id. Backward keeps their gradients in the embedding."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embedding: Embedding, ids: Tensor) -> Tensor:
        own = ids.reshape(-1) if embedding._is_on_device else on_host(ids.reshape(-1), "sampled the batch")
        own = own.to(embedding.rows.device, torch.int64, copy=True)  # the caller may write to `ids`
        flat = own.contiguous()
        ctx.embedding, ctx.ids, ctx.number = embedding, flat, embedding._num_look_ups
        embedding._num_look_ups += 1
        rows = embedding._read_together(flat).to(ids.device)
        return rows if ids.dim() == 1 else rows.view(*ids.shape, embedding.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        rows = gradient.detach().reshape(-1, ctx.embedding.dim)
        if not ctx.embedding._is_on_device:
            rows = on_host(rows, "computed the gradients of learned rows")
        rows = rows.to(ctx.ids.device, torch.float32).contiguous()
        ctx.embedding._keep(ctx.number, ctx.ids, rows)
        return None, None, None


def record_layout(dim: int, dtype: RowDtype, rule: RowRule) -> tuple[int, int, int]:
    """Return the bytes of a row, where its state begins, and the bytes of both, which are on one page of a disk."""
    row_bytes = dim * DTYPES[dtype].itemsize
    state_at = -(-row_bytes // 4) * 4
    return row_bytes, state_at, state_at + 4 * rule.state_width(dim)


def _described(store: Store, name: str | None) -> NodeType:
    """Return the node type `name`, or the only one of the graph."""
    if name is None and len(store.schema.node_types) > 1:
        raise ConfigError(f"the graph has several node types; name one of {list(store.schema.type_index)}")
    if not isinstance(name, str | None):
        raise ConfigError(f"node_type is {name!r:.80}; name one of {list(store.schema.type_index)}")
    return store.schema.node_type(store.schema.node_types[0].name if name is None else name)


def _read_join(of: NodeType, dim: int, join: Join | None) -> Join | None:
    """Return how learned rows join the features of a type, None if it has none; raise ConfigError if they cannot."""
    if FEATURES not in of.fields:
        if join is not None:
            raise ConfigError(f"join is {join!r:.80}, but {of.name!r} has no features; leave it out")
        return None
    field = of.fields[FEATURES]
    if join not in get_args(Join):
        raise ConfigError(
            f"{of.name!r} has features already ({field.dtype} {list(field.shape)}); say how learned rows join them: "
            "join='cat', after them, or join='add'"
        )
    if len(field.shape) != 1 or (join == "add" and field.shape[0] != dim):
        raise ConfigError(f"features {list(field.shape)} of {of.name!r} cannot be joined to rows of {dim} by {join!r}")
    return join


def _own_context(context: Context | None) -> Context:
    """Return the context, or that of a single process; raise ConfigError if there are several ranks."""
    if context is None:
        if dist.is_initialized() or environment.read_rank().world_size > 1:
            raise ConfigError("there are several ranks; give context=, which hoploom.init() returned")
        return init(device="cpu")
    if not isinstance(context, Context):
        raise ConfigError(f"context is {context!r:.80}; give what hoploom.init() returned, or leave it out")
    return context


def _pieces(ids: range) -> Iterator[Tensor]:
    for begin in range(ids.start, ids.stop, AT_ONCE):
        yield torch.arange(begin, min(begin + AT_ONCE, ids.stop))


def _identities(store: Store, of: NodeType, ids: Tensor) -> Tensor:
    """Return a number for each node that does not change when the graph grows: [n] int64, of its original id."""
    if ORIGINAL_ID not in of.fields:
        return ids
    (found,) = store.features.gather([Wanted(of.name, ORIGINAL_ID, ids)])
    if not holds_text(of.fields[ORIGINAL_ID]):
        return found.to(torch.int64)
    texts = [bytes(text).rstrip(b"\0") for text in found.numpy()]  # padded to the longest, which may grow
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return torch.from_numpy(np.frombuffer(digests, np.int64).copy())
