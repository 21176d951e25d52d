"""The passes of layer-wise inference over a graph's nodes, slice by slice.

If a layer projects rows, or normalises them first, it does so once per source: that costs another pass and file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom import ops
from hoploom.closing import Closing
from hoploom.errors import StoreError
from hoploom.inference.files import Columns, ParquetFile, RowFile, SharedFolder
from hoploom.inference.layered import Layered, ModelPlan, Rows
from hoploom.inference.slices import Slice, Slices, degrees_without_loops, sources_of
from hoploom.inference.source_rows import FarTable, SourceRows, gathering
from hoploom.load.assemble import FEATURES
from hoploom.schema import Owner, RelationName
from hoploom.store import Store, Wanted
from hoploom.store.format import node_file

Progress = Callable[[int, int], None]  # (rows done, rows in all)
Sources = Mapping[RelationName, Tensor | SourceRows]  # what relations aggregate: mapped, or read from the disk
Predict = Callable[[Tensor], Tensor]  # outputs become predictions, row by row


class LayerWise(Closing):
    """A rank's share of one model over one store; holds files open until close()."""

    def __init__(
        self, model: Layered, plan: ModelPlan, cuts: Slices, folder: SharedFolder, scratch: Path, progress: Progress
    ) -> None:
        self._model, self._plan, self._cuts = model, plan, cuts
        self._folder, self._scratch, self._progress = folder, scratch, progress
        self._store, self._schema = cuts.store, cuts.store.schema
        ranks = folder.context
        self._own = {name: list(cuts.of(name, ranks.rank, ranks.world_size)) for name in plan.inputs}
        self._open = ExitStack()
        self._files: dict[str, RowFile] = {}  # of the rows that the next layer starts from, by node type
        self._degrees: dict[RelationName, Tensor] = {}
        passes = [*(name for name in plan.inputs if self._stored(name) is None), *_passes(plan)]
        self._done, self._total = 0, sum(len(some) for name in passes for some in self._own[name])

    def write(self, result: Path, columns: Sequence[str], id_field: str, predict: Predict | None) -> None:
        """Run all passes; the last one writes a file of this rank per node type, in folders below `result`."""
        self._count_degrees()
        x = self._prepare()
        num_between = len(self._plan.layers) - bool(self._plan.outputs)
        for depth in range(num_between):
            x = self._advance(depth, x)
        if not self._plan.outputs:
            self._write(result, columns, id_field, lambda some: {"embedding": x[some.node_type][some.span]})
            return
        with self._sources(num_between, x) as z:
            self._write(result, columns, id_field, lambda some: self._finished(num_between, some, x, z), predict)

    def _write(
        self,
        result: Path,
        columns: Sequence[str],
        id_field: str,
        give: Callable[[Slice], dict[str, Tensor]],
        predict: Predict | None = None,
    ) -> None:
        with self._folder.together("writing"):
            for node_type in self._plan.ends:
                path = result / folder_of(node_type) / f"part-{self._folder.context.rank:05d}.parquet"
                ids = self._ids(Slice(node_type, 0, 0, None), id_field)
                with ParquetFile(path, {"id": ids, **_like(self._plan, node_type, columns, predict)}) as file:
                    for some in self._slices([node_type]):
                        found = give(some) | {"id": self._ids(some, id_field)}
                        if predict is not None:
                            found["prediction"] = predict(found["output"])
                        file.append({name: found[name] for name in ("id", *columns)})
                    file.finish()

    def _pass(
        self,
        name: str,
        doing: str,
        widths: Mapping[Any, int | None],  # by node type, or by relation: of its sources; None: an integer each
        types: Iterable[str],
        compute: Callable[[Slice], Mapping[Any, Tensor]],
    ) -> dict[Any, RowFile]:
        """Write files with a row per node, which all ranks compute slice by slice."""
        with self._folder.together(doing):
            files = {owner: self._file(name, owner, width) for owner, width in widths.items()}
            for some in self._slices(types):
                for owner, rows in compute(some).items():
                    files[owner].write(some.first, rows)
            for file in files.values():
                file.finish(synced=self._folder.is_shared)
        return files

    def _count_degrees(self) -> None:
        """Count the in-degrees of all nodes, if a layer reads those of its sources."""
        keys = sorted(self._plan.with_degrees)

        def count(some: Slice) -> dict[RelationName, Tensor]:
            own = [key for key in keys if key[2] == some.node_type]
            edges = self._cuts.edges(some, own, {})
            return {key: degrees_without_loops(found) for key, found in edges.items()}

        types = sorted({key[2] for key in keys})
        files = self._pass("degrees", "counting edges", dict.fromkeys(keys), types, count)
        self._degrees = {key: file.read() for key, file in files.items()}

    def _prepare(self) -> Rows:
        """Return the first layer's input rows: mapped features if usable unchanged, else rows computed into files."""
        stored = {name: rows for name in self._plan.inputs if (rows := self._stored(name)) is not None}
        made = {name: width for name, width in self._plan.inputs.items() if name not in stored}
        self._files = self._pass("input", "reading features", made, made, self._prepared)
        return stored | {name: file.read() for name, file in self._files.items()}

    def _stored(self, node_type: str) -> Tensor | None:
        if node_type not in self._plan.as_stored:
            return None
        tables = [part.tables.get((node_type, FEATURES)) for part in self._store.parts]
        num_nodes = self._schema.node_type(node_type).num_nodes
        return next((table.rows for table in tables if table is not None and table.rows.shape[0] == num_nodes), None)

    def _prepared(self, some: Slice) -> dict[str, Tensor]:
        name, ids = some.node_type, some.ids
        given = {}
        if FEATURES in self._schema.node_type(name).fields:
            given[name] = self._store.features.gather([Wanted(name, FEATURES, ids)])[0]
        return {name: self._model.prepare(given, {name: ids})[name]}

    def _advance(self, depth: int, x: Rows) -> Rows:
        """Return the rows after a layer."""
        layer = self._plan.layers[depth]
        with self._sources(depth, x) as z:
            compute = partial(self._computed, depth, x, z)
            files = self._pass(f"rows-{depth}", f"computing layer {depth + 1}", layer.computed, layer.computed, compute)
        kept = {name: rows for name, rows in x.items() if name in layer.kept}
        for name in [name for name in self._files if name not in kept]:
            self._files.pop(name).remove()
        self._files |= files
        return kept | {name: file.read() for name, file in files.items()}

    @contextmanager
    def _sources(self, depth: int, x: Rows) -> Iterator[Sources]:
        """Yield the rows that the layer aggregates, by relation."""
        layer, stage = self._plan.layers[depth], self._model.stage(depth)

        def rewritten(some: Slice) -> dict[Any, Tensor]:
            name = some.node_type
            rows = self._model.enter(depth, {name: self._own_rows(x, some)})[name]
            made: dict[Any, Tensor] = {name: rows} if name in layer.entered else {}
            return made | {key: stage.project(key, rows) for key in layer.projected if key[0] == name}

        doing, widths = f"projecting for layer {depth + 1}", dict[Any, int](layer.entered) | dict(layer.projected)
        files = self._pass(f"sources-{depth}", doing, widths, layer.rewritten, rewritten)
        rows = dict[Any, Tensor](x) | {owner: file.read() for owner, file in files.items()}
        z = {key: rows[key if key in files else key[0]] for key in layer.relations}
        made = {key: files.get(key, files.get(key[0], self._files.get(key[0]))) for key in layer.relations}
        yield {key: self._far(depth, x, key, z[key], made[key]) or z[key] for key in layer.relations}
        for file in files.values():
            file.remove()

    def _far(self, depth: int, x: Rows, key: RelationName, rows: Tensor, file: RowFile | None) -> SourceRows | None:
        """Return what reads a relation's sources from the disk; None if they fit the memory budget."""
        reads, layer = self._store.reads, self._plan.layers[depth]
        if reads is None:
            return None
        if depth == 0 and key[0] in self._plan.as_stored and rows is x[key[0]] and self._cuts.are_far(key[0]):
            table = FarTable(partial(self._cuts.gather_features, key[0]), rows)
        elif file is not None and self._cuts.exceed_memory(layer.num_sent_bytes(self._schema, self._plan.dtype)):
            table = FarTable(gathering(file.read_far(), reads), rows)
        else:
            return None
        memory, share = self._cuts.memory, 1 / self._folder.context.world_size

        def others(some: Slice) -> Tensor:
            return sources_of(some, key, self._cuts.edges(some, [key], {})[key]).others

        return SourceRows(table, self._own[key[2]], others, memory, self._scratch, share, reads)

    def _own_rows(self, x: Rows, some: Slice) -> Tensor:
        """Return a slice's rows before a layer."""
        name = some.node_type
        if name not in self._files and self._cuts.are_far(name):  # features
            return self._cuts.gather(name, some.ids)
        rows = x[name][some.span]
        ops.read_soon(rows)
        return rows

    def _computed(self, depth: int, x: Rows, z: Sources, some: Slice) -> dict[str, Tensor]:
        """Return a layer's rows of a slice."""
        name = some.node_type
        keys = [key for key in self._plan.layers[depth].relations if key[2] == name]
        for rows in map(z.__getitem__, keys):
            if isinstance(rows, SourceRows):
                rows.prepare(some, self._folder.check_peers)
        edges = self._cuts.edges(some, keys, self._degrees)
        given, own = {}, None
        for key in keys:
            if isinstance(rows := z[key], SourceRows):
                sources = sources_of(some, key, edges[key])
                given[key], edges[key] = rows.of(some, sources.own, sources.others), sources.edges
                own = given[key][: len(some)] if rows.table.mapped is x[name] else own
            else:
                given[key] = rows
        own_rows = {name: self._own_rows(x, some) if own is None else own}
        try:
            entered = self._model.enter(depth, own_rows)
            after = self._model.stage(depth).propagate(given, entered, edges, None)
        except IndexError as error:
            raise StoreError(
                f"in-edges of {name!r} {some.first} to {some.end - 1}: {error}; run hoploom check"
            ) from error
        return {name: self._model.close(depth, after, own_rows)[name]}

    def _finished(self, depth: int, some: Slice, x: Rows, z: Sources) -> dict[str, Tensor]:
        """Return the embedding and output of a slice."""
        name = some.node_type
        computed = self._computed(depth, x, z, some)[name] if name in self._plan.layers[depth].computed else None
        embedding = self._own_rows(x, some) if computed is None or not self._plan.has_head else computed
        output = self._model.finish({name: embedding if computed is None else computed})[name]
        return {"embedding": embedding, "output": output}

    def _ids(self, some: Slice, id_field: str) -> Tensor:
        return ids_of(self._store, some.node_type, some.ids, id_field)

    def _slices(self, names: Iterable[str]) -> Iterator[Slice]:
        """Yield this rank's slices of some types, and count them; raise StoreError if a mapped file is unreadable."""
        for name in names:
            for some in self._own[name]:
                self._folder.check_peers()
                yield some
                self._store.require_whole()
                self._done += len(some)
                self._progress(self._done, self._total)
        self._store.require_whole()  # the slices were cut by what was read, too: there may be none

    def _file(self, name: str, owner: Owner, width: int | None) -> RowFile:
        """Open a file of rows, by the name that all ranks give it."""
        if isinstance(owner, str):
            node_type, number = owner, self._schema.type_index[owner]
        else:
            node_type, number = owner[0], len(self._schema.node_types) + self._schema.relation_index[owner]
        count, path = self._schema.node_type(node_type).num_nodes, self._scratch / f"{name}-{number}.rows"
        shape, dtype = ((count,), torch.int64) if width is None else ((count, width), self._plan.dtype)
        return self._open.enter_context(RowFile(path, shape, dtype))

    def close(self) -> None:
        self._open.close()


def ids_of(store: Store, node_type: str, nodes: Tensor, id_field: str) -> Tensor:
    """Return the nodes' ids of a field, or the store's if the type has no such field."""
    if id_field not in store.schema.node_type(node_type).fields:
        return nodes
    ids = store.features.gather([Wanted(node_type, id_field, nodes)])[0]
    return ids if ids.dim() > 1 else ids.to(torch.int64)


def folder_of(node_type: str) -> str:
    """Return the name of a node type's folder, which is that in a store."""
    return Path(node_file(0, node_type, FEATURES)).parent.name


def _passes(plan: ModelPlan) -> Iterator[str]:
    """Yield the node types of every pass after that over the features."""
    yield from sorted({key[2] for key in plan.with_degrees})
    for depth, layer in enumerate(plan.layers):
        yield from layer.rewritten
        if depth < len(plan.layers) - bool(plan.outputs):
            yield from layer.computed
    yield from plan.ends


def _like(plan: ModelPlan, node_type: str, columns: Sequence[str], predict: Predict | None) -> Columns:
    """Return empty columns of a type, without the ids."""
    embedding = plan.ends[node_type]
    if plan.outputs and not plan.has_head:
        embedding = plan.layers[-1].widths[node_type]
    like = {
        "embedding": torch.empty(0, embedding, dtype=plan.dtype),
        "output": torch.empty(0, plan.outputs.get(node_type, 0), dtype=plan.dtype),
    }
    if predict is not None:
        like["prediction"] = predict(like["output"])
    return {name: like[name] for name in columns}
