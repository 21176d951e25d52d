"""The passes of layer-wise inference, slice by slice of a graph's nodes.

Where a layer projects rows, or normalises them first, that is done once per source and not once per edge: it costs a
pass and a file more.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from hoploom.errors import StoreError
from hoploom.inference.files import Columns, ParquetFile, RowFile, SharedFolder
from hoploom.inference.layered import Layered, ModelPlan, Rows
from hoploom.inference.slices import Slice, Slices, degrees_without_loops
from hoploom.load.assemble import FEATURES
from hoploom.schema import RelationName
from hoploom.store import Store, Wanted
from hoploom.store.format import node_file


@dataclass(frozen=True)
class Share:
    """What one rank works on, and where."""

    store: Store
    cuts: Slices
    slices: Mapping[str, Sequence[Slice]]  # by node type
    rank: int
    folder: SharedFolder
    scratch: Path  # for the rows between layers
    progress: Callable[[int, int], None]


class LayerWise:
    """A rank's share of one model over one store. A context manager: it holds files open."""

    def __init__(self, model: Layered, plan: ModelPlan, share: Share) -> None:
        self._model, self._plan, self._share = model, plan, share
        self._schema = share.store.schema
        self._open = ExitStack()
        self._files: dict[str, RowFile] = {}  # of the rows that the next layer starts from, by node type
        self._degrees: dict[RelationName, Tensor] = {}
        passes = [*(name for name in plan.inputs if self._stored(name) is None), *_passes(plan)]
        self._done, self._total = 0, sum(len(some) for name in passes for some in share.slices[name])

    def write(self, result: Path, columns: Sequence[str], id_field: str) -> None:
        """All passes; the last one writes a file of this rank per node type, in folders below `result`."""
        self._count_degrees()
        x = self._prepare()
        num_between = len(self._plan.layers) - bool(self._plan.outputs)
        for depth in range(num_between):
            x = self._advance(depth, x)
        if not self._plan.outputs:
            self._write(result, columns, id_field, lambda some: {"embedding": x[some.node_type][some.span]})
            return
        with self._sources(num_between, x) as z:
            self._write(result, columns, id_field, lambda some: self._finished(num_between, some, x, z))

    def _write(
        self, result: Path, columns: Sequence[str], id_field: str, give: Callable[[Slice], dict[str, Tensor]]
    ) -> None:
        with self._share.folder.together("writing"):
            for node_type in self._plan.ends:
                path = result / folder_of(node_type) / f"part-{self._share.rank:05d}.parquet"
                ids = self._ids(Slice(node_type, 0, 0, None), id_field)
                with ParquetFile(path, {"id": ids, **_like(self._plan, node_type, columns)}) as file:
                    for some in self._slices([node_type]):
                        found = give(some) | {"id": self._ids(some, id_field)}
                        file.append({name: found[name] for name in ("id", *columns)})
                    file.finish()

    def _count_degrees(self) -> None:
        """In-degrees of all nodes, where a layer asks for those of its sources."""
        keys = sorted(self._plan.with_degrees)
        with self._share.folder.together("counting edges"):
            files = {key: self._file("degrees", key, (), torch.int64) for key in keys}
            for some in self._slices(sorted({key[2] for key in keys})):
                own = [key for key in keys if key[2] == some.node_type]
                for key, edges in self._share.cuts.edges(some, own, {}).items():
                    files[key].write(some.first, degrees_without_loops(edges))
            self._finish(files.values())
        self._degrees = {key: file.read() for key, file in files.items()}

    def _prepare(self) -> Rows:
        """What layer one starts from: features where they are mapped already, if it takes them as they are."""
        stored = {name: rows for name in self._plan.inputs if (rows := self._stored(name)) is not None}
        made = [name for name in self._plan.inputs if name not in stored]
        with self._share.folder.together("reading features"):
            for name in made:
                self._files[name] = self._file("input", name, (self._plan.inputs[name],))
            for some in self._slices(made):
                self._files[some.node_type].write(some.first, self._prepared(some))
            self._finish(self._files[name] for name in made)
        return stored | {name: self._files[name].read() for name in made}

    def _stored(self, node_type: str) -> Tensor | None:
        if node_type not in self._plan.as_stored:
            return None
        tables = [part.tables.get((node_type, FEATURES)) for part in self._share.store.parts]
        num_nodes = self._schema.node_type(node_type).num_nodes
        return next((table.rows for table in tables if table is not None and table.rows.shape[0] == num_nodes), None)

    def _prepared(self, some: Slice) -> Tensor:
        name, ids = some.node_type, some.ids
        given = {}
        if FEATURES in self._schema.node_type(name).fields:
            given[name] = self._share.store.features.gather([Wanted(name, FEATURES, ids)])[0]
        return self._model.prepare(given, {name: ids})[name]

    def _advance(self, depth: int, x: Rows) -> Rows:
        """The rows after a layer."""
        layer = self._plan.layers[depth]
        with self._sources(depth, x) as z, self._share.folder.together(f"computing layer {depth + 1}"):
            files = {name: self._file(f"rows-{depth}", name, (width,)) for name, width in layer.computed.items()}
            for some in self._slices(files):
                files[some.node_type].write(some.first, self._computed(depth, some, x, z))
            self._finish(files.values())
        kept = {name: rows for name, rows in x.items() if name in layer.kept}
        for name in [name for name in self._files if name not in kept]:
            self._files.pop(name).remove()
        self._files |= files
        return kept | {name: file.read() for name, file in files.items()}

    @contextmanager
    def _sources(self, depth: int, x: Rows) -> Iterator[dict[RelationName, Tensor]]:
        """What is aggregated of every relation's sources."""
        layer, stage = self._plan.layers[depth], self._model.stage(depth)
        with self._share.folder.together(f"projecting for layer {depth + 1}"):
            entered = {name: self._file(f"entered-{depth}", name, (width,)) for name, width in layer.entered.items()}
            projected = {key: self._file(f"projected-{depth}", key, (width,)) for key, width in layer.projected.items()}
            for some in self._slices(layer.rewritten):
                rows = self._model.enter(depth, {some.node_type: x[some.node_type][some.span]})[some.node_type]
                if some.node_type in entered:
                    entered[some.node_type].write(some.first, rows)
                for key in projected:
                    if key[0] == some.node_type:
                        projected[key].write(some.first, stage.project(key, rows))
            self._finish((*entered.values(), *projected.values()))
        as_entered = dict(x) | {name: file.read() for name, file in entered.items()}
        as_projected = {key: file.read() for key, file in projected.items()}
        yield {key: as_projected[key] if key in projected else as_entered[key[0]] for key in layer.relations}
        for file in (*entered.values(), *projected.values()):
            file.remove()

    def _computed(self, depth: int, some: Slice, x: Rows, z: Mapping[RelationName, Tensor]) -> Tensor:
        """A layer's rows of a slice."""
        name = some.node_type
        own = {name: x[name][some.span]}
        keys = [key for key in self._plan.layers[depth].relations if key[2] == name]
        edges = self._share.cuts.edges(some, keys, self._degrees)
        try:
            entered = self._model.enter(depth, own)
            rows = self._model.stage(depth).propagate({key: z[key] for key in keys}, entered, edges, None)
        except IndexError as error:
            raise StoreError(
                f"in-edges of {name!r} {some.first} to {some.end - 1}: {error}; run hoploom check"
            ) from error
        return self._model.close(depth, rows, own)[name]

    def _finished(self, depth: int, some: Slice, x: Rows, z: Mapping[RelationName, Tensor]) -> dict[str, Tensor]:
        """The columns that a model can give of a slice."""
        name = some.node_type
        before = x[name][some.span]
        rows = self._computed(depth, some, x, z) if name in self._plan.layers[depth].computed else before
        output = self._model.finish({name: rows})[name]
        embedding = rows if self._plan.has_head else before
        return {"embedding": embedding, "output": output, "prediction": output.argmax(dim=1)}

    def _ids(self, some: Slice, id_field: str) -> Tensor:
        if id_field not in self._schema.node_type(some.node_type).fields:
            return some.ids
        ids = self._share.store.features.gather([Wanted(some.node_type, id_field, some.ids)])[0]
        return ids if ids.dim() > 1 else ids.to(torch.int64)

    def _slices(self, names: Iterable[str]) -> Iterator[Slice]:
        """This rank's slices of some types; counts them as done, and asks whether what they were read from is whole."""
        for name in names:
            for some in self._share.slices[name]:
                self._share.folder.check_peers()
                yield some
                self._share.store.require_whole()
                self._done += len(some)
                self._share.progress(self._done, self._total)
        self._share.store.require_whole()  # the slices were cut by what was read, too: there may be none

    def _file(
        self, kind: str, owner: str | RelationName, row: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> RowFile:
        """A file of a row per node (of a relation's sources), named alike on all ranks."""
        if isinstance(owner, str):
            index, node_type = self._schema.type_index[owner], owner
        else:
            index, node_type = self._schema.relation_index[owner], owner[0]
        shape = (self._schema.node_type(node_type).num_nodes, *row)
        path = self._share.scratch / f"{kind}-{index}.rows"
        return self._open.enter_context(RowFile(path, shape, dtype or self._plan.dtype))

    def _finish(self, files: Iterable[RowFile]) -> None:
        """At the end of a pass, before the ranks meet."""
        for file in files:
            file.finish(synced=self._share.folder.is_shared)

    def __enter__(self) -> "LayerWise":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def folder_of(node_type: str) -> str:
    """A type's folder, named as in a store."""
    return Path(node_file(0, node_type, FEATURES)).parent.name


def _passes(plan: ModelPlan) -> Iterator[str]:
    """The types of every pass over nodes after the features."""
    yield from sorted({key[2] for key in plan.with_degrees})
    for depth, layer in enumerate(plan.layers):
        yield from layer.rewritten
        if depth < len(plan.layers) - bool(plan.outputs):
            yield from layer.computed
    yield from plan.ends


def _like(plan: ModelPlan, node_type: str, columns: Sequence[str]) -> Columns:
    """The columns of a type besides the ids, without rows."""
    embedding = plan.ends[node_type]
    if plan.outputs and not plan.has_head:
        embedding = plan.layers[-1].widths[node_type]
    like = {
        "embedding": torch.empty(0, embedding, dtype=plan.dtype),
        "output": torch.empty(0, plan.outputs.get(node_type, 0), dtype=plan.dtype),
        "prediction": torch.empty(0, dtype=torch.int64),
    }
    return {name: like[name] for name in columns}
