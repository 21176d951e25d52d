// Only this file and others named bindings know Python. They check types and lengths, release the GIL, call the core.
#include "bindings.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

#include "buffers.h"
#include "csc.h"
#include "mapped_file.h"
#include "order.h"
#include "readable.h"
#include "sample.h"

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

// The arrays of one relation; kept as one object, so that a call passes one argument.
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
                  int64_t window, Optional<int64_t> excluded, bool positions_only) {
  const int64_t size = int64_t(nodes.shape(0));
  require(!trees || int64_t(trees->shape(0)) == size, "one tree per frontier node is needed");
  require(!times || int64_t(times->shape(0)) == size, "one time per frontier node is needed");
  const Frontier frontier{nodes.data(), size, pointer(trees), pointer(times)};
  EdgeColumns columns = lists.columns;
  if (!weighted) columns.weight = nullptr;
  Adjacency adjacency = lists.adjacency;
  if (positions_only) adjacency.indices = nullptr;
  require(!positions_only || !(labor || columns.weight || times), "these picks depend on more than positions");
  const int64_t num_excluded = excluded ? int64_t(excluded->shape(0)) : 0;
  const Rule rule{key, stream, fanout, replace, last, labor, window, pointer(excluded), num_excluded};
  Picks picks;
  {
    nb::gil_scoped_release release;
    read_maps(lists.arrays(), [&] { picks = sample(adjacency, columns, frontier, rule); });
  }
  return std::make_tuple(std::move(picks.counts), std::move(picks.sources), std::move(picks.edges));
}

// For arrays that were read outside the core.
void require_whole_at(uintptr_t address) {
  const void* array = reinterpret_cast<const void*>(address);
  require_whole({&array, 1});
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

// Returns one integer in [0, bound) per id, from 64 bits of its block.
Buffer draw_bounded(uint64_t key, Array<int64_t> ids, uint32_t stream, uint32_t draw, uint64_t bound) {
  nb::gil_scoped_release release;
  Buffer out(ids.shape(0) * 8);
  for (size_t i = 0; i < ids.shape(0); ++i)
    out.as<int64_t>()[i] = int64_t(Draws(key, ids.data()[i], stream).bounded(draw, bound, true));
  return out;
}

// Returns four words per id: for weighted negatives and synthetic graphs.
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
  nb::set_leak_warnings(false);  // tensors alive at interpreter exit are no leak
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
  m.def("wait_readable", &wait_readable, "descriptor"_a, "microseconds"_a, nb::call_guard<nb::gil_scoped_release>());
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
        "weighted"_a, "window"_a = -1, nb::arg("excluded").noconvert().none() = nb::none(), "positions_only"_a = false);

  m.def("build_csc", &make_csc, nb::arg("sources").noconvert(), nb::arg("destinations").noconvert(), "num_sources"_a,
        "num_destinations"_a, "threads"_a, nb::arg("edge_time").noconvert().none(),
        nb::arg("source_time").noconvert().none());
  bind_ids(m);
  bind_aggregates(m);
  bind_messages(m);
  bind_spool(m);
  bind_disk(m);
  bind_partitioning(m);
  m.def("mix", &mix, "state"_a, "value"_a);
  m.def("permute", &permute, "key"_a, "size"_a, "from"_a, "to"_a);
  m.def("draw_bounded", &draw_bounded, "key"_a, nb::arg("ids").noconvert(), "stream"_a, "draw"_a, "bound"_a);
  m.def("draw_words", &draw_words, "key"_a, nb::arg("ids").noconvert(), "stream"_a, "block"_a);
}
