// With bindings_aggregate.cpp the only file that knows Python. Checks types and lengths, releases the GIL, calls the
// core.
#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

#include "buffers.h"
#include "csc.h"
#include "gather.h"
#include "idmap.h"
#include "mapped_file.h"
#include "order.h"
#include "relabel.h"
#include "sample.h"
#include "slotmap.h"
#include "travel.h"

using namespace hoploom;

namespace {

int buffer_get(PyObject* self, Py_buffer* view, int flags) {
  Buffer* buffer = nb::inst_ptr<Buffer>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, buffer->as<void>(), Py_ssize_t(buffer->size()), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(buffer_get)}, {0, nullptr}};

int mapped_get(PyObject* self, Py_buffer* view, int flags) {
  MappedFile* file = nb::inst_ptr<MappedFile>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, file->bytes(), Py_ssize_t(file->size()), 0, flags);
}

PyType_Slot mapped_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(mapped_get)}, {0, nullptr}};

void map_file(MappedFile* self, int descriptor, size_t size, std::string path) {
  try {
    new (self) MappedFile(descriptor, size, std::move(path));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

// The arrays of one relation, held by reference so that a call passes one object.
struct Lists {
  Array<int64_t> indptr;
  nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu> indices;
  Optional<float> weight;
  Optional<int64_t> edge_time, source_time;
  Adjacency adjacency;
  EdgeColumns columns;

  std::array<const void*, 5> arrays() const {
    return {adjacency.indptr, adjacency.indices, columns.weight, columns.edge_time, columns.source_time};
  }
};

void make_lists(Lists* self, Array<int64_t> indptr,
                nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu> indices, int64_t first_node,
                int64_t first_edge, Optional<float> weight, Optional<int64_t> edge_time,
                Optional<int64_t> source_time) {
  require(indptr.shape(0) >= 1, "indptr is empty");
  const bool wide = indices.dtype() == nb::dtype<int64_t>();
  require(wide || indices.dtype() == nb::dtype<int32_t>(), "indices must be int32 or int64");
  const int64_t num_edges = int64_t(indices.shape(0));
  require(!weight || int64_t(weight->shape(0)) == num_edges, "one weight per edge is needed");
  require(!edge_time || int64_t(edge_time->shape(0)) == num_edges, "one time per edge is needed");
  new (self) Lists{indptr, indices, weight, edge_time, source_time, {}, {}};
  self->adjacency = {indptr.data(), indices.data(), wide,      int64_t(indptr.shape(0)) - 1,
                     num_edges,     first_node,     first_edge};
  self->columns = {pointer(weight), pointer(edge_time), pointer(source_time),
                   source_time ? int64_t(source_time->shape(0)) : 0};
}

auto sample_lists(const Lists& lists, Array<int64_t> nodes, Optional<int64_t> trees, Optional<int64_t> times,
                  uint64_t key, uint32_t stream, int64_t fanout, bool replace, bool last, bool labor, bool weighted,
                  bool positions_only) {
  const int64_t size = int64_t(nodes.shape(0));
  require(!trees || int64_t(trees->shape(0)) == size, "one tree per frontier node is needed");
  require(!times || int64_t(times->shape(0)) == size, "one time per frontier node is needed");
  const Frontier frontier{nodes.data(), size, pointer(trees), pointer(times)};
  EdgeColumns columns = lists.columns;
  if (!weighted) columns.weight = nullptr;
  Adjacency adjacency = lists.adjacency;
  if (positions_only) adjacency.indices = nullptr;
  require(!positions_only || !(labor || columns.weight || times), "these picks depend on more than positions");
  Picks picks;
  {
    nb::gil_scoped_release release;
    read_maps(lists.arrays(),
              [&] { picks = sample(adjacency, columns, frontier, Rule{key, stream, fanout, replace, last, labor}); });
  }
  return std::make_tuple(std::move(picks.counts), std::move(picks.sources), std::move(picks.edges));
}

Buffer add_sources(NodeMap& map, Array<int64_t> sources, Array<int64_t> counts, Optional<int64_t> trees) {
  require(!trees || trees->shape(0) == counts.shape(0), "one tree per frontier node is needed");
  nb::gil_scoped_release release;
  int64_t total = 0;
  for (size_t i = 0; i < counts.shape(0); ++i) {
    const int64_t count = counts.data()[i];
    require(count >= 0 && count <= int64_t(sources.shape(0)) - total, "counts do not sum to the sources");
    total += count;
  }
  require(total == int64_t(sources.shape(0)), "counts do not sum to the sources");
  return map.add(sources.data(), int64_t(sources.shape(0)), counts.data(), pointer(trees), int64_t(counts.shape(0)));
}

// Rows of any dtype and shape, as bytes.
using AnyRows = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using AnyOutput = nb::ndarray<nb::c_contig, nb::device::cpu>;

template <typename Tensor>
int64_t row_bytes_of(const Tensor& rows) {
  require(rows.ndim() >= 1, "rows have at least one dimension");
  int64_t bytes = int64_t(rows.itemsize());
  for (size_t d = 1; d < rows.ndim(); ++d) bytes *= int64_t(rows.shape(d));
  return bytes;
}

void gather_rows(AnyRows table, Array<int64_t> ids, Optional<int64_t> places, int64_t first, AnyOutput out) {
  const int64_t row_bytes = row_bytes_of(table), num_ids = int64_t(ids.shape(0));
  require(row_bytes_of(out) == row_bytes && out.shape(0) == ids.shape(0), "the output has another shape");
  nb::gil_scoped_release release;
  const auto* from = static_cast<const uint8_t*>(table.data());
  auto* to = static_cast<uint8_t*>(out.data());
  read_maps(arrays_of(table, ids), [&] {
    if (places)
      gather_at(from, int64_t(table.shape(0)), row_bytes, ids.data(), num_ids, places->data(),
                int64_t(places->shape(0)), first, to);
    else gather(from, int64_t(table.shape(0)), row_bytes, ids.data(), num_ids, first, to);
  });
}

auto route_ids(Array<int64_t> ids, Array<int64_t> bounds, Optional<int64_t> places) {
  nb::gil_scoped_release release;
  const int64_t num_ids = int64_t(ids.shape(0)), num_bounds = int64_t(bounds.shape(0));
  const int64_t count = places ? int64_t(places->shape(0)) : num_ids;
  Buffer routed(size_t(count) * 8), counts(size_t(num_bounds + 1) * 8);
  if (places)
    route_at(ids.data(), num_ids, places->data(), count, bounds.data(), num_bounds, routed.as<int64_t>(),
             counts.as<int64_t>());
  else route(ids.data(), num_ids, bounds.data(), num_bounds, routed.as<int64_t>(), counts.as<int64_t>());
  return std::make_tuple(std::move(routed), std::move(counts));
}

// For arrays that somebody else than the core has read.
void require_whole_at(uintptr_t address) {
  const void* array = reinterpret_cast<const void*>(address);
  require_whole({&array, 1});
}

void add_ids(IdMap& map, Array<int64_t> ids, Optional<int64_t> places) {
  nb::gil_scoped_release release;
  const int64_t num_ids = int64_t(ids.shape(0));
  map.add(ids.data(), num_ids, pointer(places), places ? int64_t(places->shape(0)) : num_ids);
}

auto find_ids(const IdMap& map, Array<int64_t> ids, Optional<int64_t> places) {
  nb::gil_scoped_release release;
  const int64_t num_ids = int64_t(ids.shape(0));
  IdMap::Found found = map.find(ids.data(), num_ids, pointer(places), places ? int64_t(places->shape(0)) : num_ids);
  return std::make_tuple(std::move(found.slots), std::move(found.hits), std::move(found.misses));
}

auto find_slots(SlotMap& map, Array<int64_t> ids, Array<int64_t> places) {
  nb::gil_scoped_release release;
  SlotMap::Found found =
      map.find(ids.data(), int64_t(ids.shape(0)), places.data(), int64_t(places.shape(0)));
  return std::make_tuple(std::move(found.slots), std::move(found.misses));
}

Buffer add_slots(SlotMap& map, Array<int64_t> ids, Array<int64_t> places, Output<int64_t> slots) {
  require(slots.shape(0) == ids.shape(0), "one slot per id is needed");
  nb::gil_scoped_release release;
  return map.add(ids.data(), int64_t(ids.shape(0)), places.data(), int64_t(places.shape(0)), slots.data());
}

void scatter_rows(AnyRows rows, Array<int64_t> places, AnyOutput out) {
  const int64_t row_bytes = row_bytes_of(out);
  require(rows.shape(0) == places.shape(0) && row_bytes_of(rows) == row_bytes, "the output has another shape");
  nb::gil_scoped_release release;
  scatter(static_cast<const uint8_t*>(rows.data()), row_bytes, places.data(), int64_t(places.shape(0)),
          int64_t(out.shape(0)), static_cast<uint8_t*>(out.data()));
}

Buffer select_ids(Array<int64_t> ids, Array<int64_t> places) {
  nb::gil_scoped_release release;
  return select(ids.data(), int64_t(ids.shape(0)), places.data(), int64_t(places.shape(0)));
}

Buffer narrow_ids(Array<int64_t> ids, Optional<int64_t> places, int64_t first) {
  nb::gil_scoped_release release;
  const int64_t num_ids = int64_t(ids.shape(0));
  return narrow(ids.data(), num_ids, pointer(places), places ? int64_t(places->shape(0)) : num_ids, first);
}

using Ids = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;  // int32 or int64

Narrowed narrowed_of(const Ids& ids, int64_t first) {
  const bool is_narrow = ids.dtype() == nb::dtype<int32_t>();
  require(is_narrow || ids.dtype() == nb::dtype<int64_t>(), "ids must be int32 or int64");
  return {ids.data(), is_narrow, int64_t(ids.shape(0)), first};
}

Buffer widen_ids(Ids ids, int64_t first) {
  const Narrowed narrowed = narrowed_of(ids, first);
  nb::gil_scoped_release release;
  return widen(narrowed);
}

auto widen_picks(Ids counts, Ids sources, Ids edges, int64_t first_edge) {
  const std::array<Narrowed, 3> columns = {narrowed_of(counts, 0), narrowed_of(sources, 0),
                                           narrowed_of(edges, first_edge)};
  nb::gil_scoped_release release;
  return std::make_tuple(widen(columns[0]), widen(columns[1]), widen(columns[2]));
}

// Of every part: places, counts, sources, edges.
using PartColumns = std::tuple<Array<int64_t>, Array<int64_t>, Array<int64_t>, Array<int64_t>>;

auto stitch_picks(const std::vector<PartColumns>& columns, int64_t frontier_size) {
  require(frontier_size >= 0, "a frontier has a size");
  std::vector<PartPicks> parts;
  for (const auto& [places, counts, sources, edges] : columns) {
    require(places.shape(0) == counts.shape(0) && sources.shape(0) == edges.shape(0), "columns differ in length");
    parts.push_back({places.data(), counts.data(), int64_t(places.shape(0)), sources.data(), edges.data(),
                     int64_t(sources.shape(0))});
  }
  Stitched out;
  {
    nb::gil_scoped_release release;
    out = stitch(parts, frontier_size);
  }
  return std::make_tuple(std::move(out.counts), std::move(out.sources), std::move(out.edges));
}

void fill_edges(Array<int32_t> local, Array<int64_t> counts, int64_t first, int64_t offset, Rows<int64_t> out) {
  const int64_t picks = int64_t(local.shape(0)), width = int64_t(out.shape(1));
  require(out.shape(0) == 2 && offset >= 0 && picks <= width && offset <= width - picks,
          "the edges do not fit the output");
  nb::gil_scoped_release release;
  edge_rows(local.data(), picks, counts.data(), int64_t(counts.shape(0)), first, out.data() + offset,
            out.data() + width + offset);
}

auto make_csc(Array<int64_t> sources, Array<int64_t> destinations, int64_t num_sources, int64_t num_destinations,
              int threads, Optional<int64_t> edge_time, Optional<int64_t> source_time) {
  const int64_t num_edges = int64_t(sources.shape(0));
  require(int64_t(destinations.shape(0)) == num_edges, "sources and destinations differ in length");
  require(!edge_time || int64_t(edge_time->shape(0)) == num_edges, "one time per edge is needed");
  require(!source_time || int64_t(source_time->shape(0)) == num_sources, "one time per source is needed");
  Csc csc;
  {
    nb::gil_scoped_release release;
    const std::array<const void*, 4> arrays = {sources.data(), destinations.data(), pointer(edge_time),
                                               pointer(source_time)};
    read_maps(arrays, [&] {
      csc = build_csc(sources.data(), destinations.data(), num_edges, num_sources, num_destinations, threads);
      if (edge_time || source_time)
        order_by_time(csc, num_edges, num_destinations, pointer(edge_time), pointer(source_time));
    });
  }
  std::optional<Buffer> permutation;
  if (!csc.is_identity) permutation = std::move(csc.permutation);
  return std::make_tuple(std::move(csc.indptr), std::move(csc.indices), std::move(permutation), csc.wide_ids);
}

Buffer permute(uint64_t key, uint64_t size, uint64_t from, uint64_t to) {
  require(from <= to && to <= size && to - from <= PTRDIFF_MAX / 16, "the range exceeds the permutation");
  nb::gil_scoped_release release;
  const Permutation permutation(key, size);
  Buffer out((to - from) * 8);
  for (uint64_t i = from; i < to; ++i) out.as<int64_t>()[i - from] = int64_t(permutation.at(i));
  return out;
}

// One integer in [0, bound) per id, from 64 bits of its block.
Buffer draw_bounded(uint64_t key, Array<int64_t> ids, uint32_t stream, uint32_t draw, uint64_t bound) {
  nb::gil_scoped_release release;
  Buffer out(ids.shape(0) * 8);
  for (size_t i = 0; i < ids.shape(0); ++i)
    out.as<int64_t>()[i] = int64_t(Draws(key, ids.data()[i], stream).bounded(draw, bound, true));
  return out;
}

// Four words per id: for weighted negatives and synthetic graphs.
Buffer draw_words(uint64_t key, Array<int64_t> ids, uint32_t stream, uint32_t block) {
  nb::gil_scoped_release release;
  Buffer out(ids.shape(0) * 16);
  for (size_t i = 0; i < ids.shape(0); ++i) {
    const uint64_t id = uint64_t(ids.data()[i]);
    philox(key, uint32_t(id), uint32_t(id >> 32), stream, block, out.as<uint32_t>() + 4 * i);
  }
  return out;
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // tensors held until the interpreter ends are no leak
  nb::class_<Buffer>(m, "Buffer", nb::type_slots(buffer_slots))
      .def(
          "__init__", [](Buffer* self, size_t size) { new (self) Buffer(size); }, "size"_a)
      .def("__len__", &Buffer::size);
  nb::class_<MappedFile>(m, "MappedFile", nb::type_slots(mapped_slots))
      .def("__init__", &map_file, "descriptor"_a, "size"_a, "path"_a = "a mapped file")
      .def("read_scattered", &MappedFile::read_scattered);
  m.def(
      "read_soon", [](uintptr_t begin, size_t bytes) { read_soon(reinterpret_cast<const void*>(begin), bytes); },
      "begin"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("any_damaged", &any_damaged);
  m.def("require_whole", &require_whole_at, "address"_a);
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const DamagedFile& error) {
      PyErr_SetString(nb::module_::import_("hoploom.errors").attr("StoreError").ptr(), error.what());
    }
  });
  m.def("pool_use", [] {
    const PoolUse use = pool_use();
    return std::make_tuple(use.idle_bytes, use.live_bytes);
  });
  m.def("pool_trim", &pool_trim);
  m.def("pool_keep_at_most", &pool_keep_at_most, "bytes"_a);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("give_back_freed_memory", &give_back_freed_memory);

  nb::class_<Lists>(m, "Lists")
      .def("__init__", &make_lists, nb::arg("indptr").noconvert(), nb::arg("indices").noconvert(), "first_node"_a,
           "first_edge"_a, nb::arg("weight").noconvert().none(), nb::arg("edge_time").noconvert().none(),
           nb::arg("source_time").noconvert().none());
  m.def("sample", &sample_lists, "lists"_a, nb::arg("nodes").noconvert(), nb::arg("trees").noconvert().none(),
        nb::arg("times").noconvert().none(), "key"_a, "stream"_a, "fanout"_a, "replace"_a, "last"_a, "labor"_a,
        "weighted"_a, "positions_only"_a = false);

  nb::class_<NodeMap>(m, "NodeMap")
      .def(nb::init<int64_t, int64_t>(), "num_nodes"_a, "budget"_a)
      .def(
          "add_seeds",
          [](NodeMap& map, Array<int64_t> nodes, Optional<int64_t> trees) {
            require(!trees || trees->shape(0) == nodes.shape(0), "one tree per seed is needed");
            nb::gil_scoped_release release;
            map.add_seeds(nodes.data(), pointer(trees), int64_t(nodes.shape(0)));
          },
          nb::arg("nodes").noconvert(), nb::arg("trees").noconvert().none())
      .def("add", &add_sources, nb::arg("sources").noconvert(), nb::arg("counts").noconvert(),
           nb::arg("trees").noconvert().none())
      .def(
          "find",
          [](NodeMap& map, Array<int64_t> sources) {
            nb::gil_scoped_release release;
            return map.find(sources.data(), int64_t(sources.shape(0)));
          },
          nb::arg("sources").noconvert())
      .def("nodes", &NodeMap::copy_nodes, "from"_a)
      .def("trees", &NodeMap::copy_trees, "from"_a)
      .def("take", &NodeMap::take, nb::call_guard<nb::gil_scoped_release>())
      .def("clear", &NodeMap::clear)
      .def("__len__", &NodeMap::size);

  nb::class_<IdMap>(m, "IdMap")
      .def(nb::init<>())
      .def("reserve", &IdMap::reserve, "count"_a)
      .def("add", &add_ids, nb::arg("ids").noconvert(), nb::arg("places").noconvert().none())
      .def("find", &find_ids, nb::arg("ids").noconvert(), nb::arg("places").noconvert().none())
      .def("ids", &IdMap::copy_ids)
      .def("bytes", &IdMap::bytes)
      .def("__len__", &IdMap::size);

  nb::class_<SlotMap>(m, "SlotMap")
      .def(nb::init<>())
      .def("begin", &SlotMap::begin)
      .def("find", &find_slots, nb::arg("ids").noconvert(), nb::arg("places").noconvert())
      .def("add", &add_slots, nb::arg("ids").noconvert(), nb::arg("places").noconvert(), nb::arg("slots").noconvert())
      .def("ids", &SlotMap::copy_ids)
      .def("num_needed", &SlotMap::num_needed)
      .def("__len__", &SlotMap::size);

  m.def("gather", &gather_rows, nb::arg("table").noconvert(), nb::arg("ids").noconvert(),
        nb::arg("places").noconvert().none(), "first"_a, nb::arg("out").noconvert());
  m.def("route", &route_ids, nb::arg("ids").noconvert(), nb::arg("bounds").noconvert(),
        nb::arg("places").noconvert().none());
  m.def("scatter", &scatter_rows, nb::arg("rows").noconvert(), nb::arg("places").noconvert(),
        nb::arg("out").noconvert());
  m.def("select", &select_ids, nb::arg("ids").noconvert(), nb::arg("places").noconvert());
  m.def("narrow", &narrow_ids, nb::arg("ids").noconvert(), nb::arg("places").noconvert().none(), "first"_a);
  m.def("widen", &widen_ids, nb::arg("ids").noconvert(), "first"_a);
  m.def("widen_picks", &widen_picks, nb::arg("counts").noconvert(), nb::arg("sources").noconvert(),
        nb::arg("edges").noconvert(), "first_edge"_a);
  m.def(
      "is_counting",
      [](Array<int64_t> places) {
        nb::gil_scoped_release release;
        return is_counting(places.data(), int64_t(places.shape(0)));
      },
      nb::arg("places").noconvert());
  m.def("stitch", &stitch_picks, nb::arg("parts").noconvert(), "frontier_size"_a);
  m.def("fill_edges", &fill_edges, nb::arg("local").noconvert(), nb::arg("counts").noconvert(), "first"_a, "offset"_a,
        nb::arg("out").noconvert());
  m.def("build_csc", &make_csc, nb::arg("sources").noconvert(), nb::arg("destinations").noconvert(), "num_sources"_a,
        "num_destinations"_a, "threads"_a, nb::arg("edge_time").noconvert().none(),
        nb::arg("source_time").noconvert().none());
  bind_aggregates(m);
  bind_spool(m);
  bind_disk(m);
  bind_partitioning(m);
  m.def("mix", &mix, "state"_a, "value"_a);
  m.def("permute", &permute, "key"_a, "size"_a, "from"_a, "to"_a);
  m.def("draw_bounded", &draw_bounded, "key"_a, nb::arg("ids").noconvert(), "stream"_a, "draw"_a, "bound"_a);
  m.def("draw_words", &draw_words, "key"_a, nb::arg("ids").noconvert(), "stream"_a, "block"_a);
}
