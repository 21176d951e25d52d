// Reads of cold rows and lists for Python: checks shapes, releases the GIL, calls the core.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <chrono>
#include <system_error>

#include "bindings.h"
#include "disk.h"
#include "sample.h"
#include "sparse_array.h"

namespace hoploom {
namespace {

// A table in a file: row `first` begins at `offset`.
struct FileRows {
  const DiskFile* file;
  int64_t offset, num_rows, row_bytes, first;
};

struct Request {
  FileRows rows;
  const int64_t* ids;
  int64_t num_ids;
  const int64_t* places;
  int64_t num_places;
  uint8_t* out;
};

using Want = std::tuple<const DiskFile*, int64_t, int64_t, int64_t, Array<int64_t>, Array<int64_t>, Rows<uint8_t>>;

void add_pieces(const Request& want, std::vector<Piece>& pieces) {
  const FileRows& rows = want.rows;
  for (int64_t i = 0; i < want.num_places; ++i) {
    const int64_t place = want.places[i];
    if (uint64_t(place) >= uint64_t(want.num_ids)) throw std::out_of_range("a place is out of range");
    const int64_t row = want.ids[place] - rows.first;
    if (uint64_t(row) >= uint64_t(rows.num_rows))
      throw std::out_of_range("id " + std::to_string(want.ids[place]) + " is not in this part");
    pieces.push_back(
        {rows.file, rows.offset + row * rows.row_bytes, rows.row_bytes, want.out + place * rows.row_bytes});
  }
}

auto timed_read(std::vector<Piece>& pieces, const ReadPlan& plan) {
  const auto begun = std::chrono::steady_clock::now();
  const ReadTally tally = read_pieces(pieces, plan);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  return std::make_tuple(tally.requests, tally.bytes, seconds);
}

// Each request is (file, offset, num_rows, first, ids, places, out): out[places] = the rows of ids[places].
auto read_rows(const std::vector<Want>& wants, int64_t gap, int depth, bool by_threads) {
  std::vector<Request> requests;
  for (const auto& [file, offset, num_rows, first, ids, places, out] : wants) {
    require(out.shape(0) == ids.shape(0), "one row per id is needed");
    requests.push_back({{file, offset, num_rows, int64_t(out.shape(1)), first},
                        ids.data(),
                        int64_t(ids.shape(0)),
                        places.data(),
                        int64_t(places.shape(0)),
                        out.data()});
  }
  nb::gil_scoped_release release;
  std::vector<Piece> pieces;
  size_t count = 0;
  for (const Request& want : requests) count += size_t(want.num_places);
  pieces.reserve(count);
  for (const Request& want : requests) add_pieces(want, pieces);
  return timed_read(pieces, {gap, depth, by_threads});
}

// Reads the lists of these nodes in every column: columns are (file, offset, bytes per entry, array).
using ListColumn = std::tuple<const DiskFile*, int64_t, int64_t, SparseArray*>;

auto read_lists(const std::vector<ListColumn>& columns, Array<int64_t> indptr, int64_t first_node, Array<int64_t> nodes,
                int64_t gap, int depth, bool by_threads) {
  require(indptr.shape(0) >= 1, "indptr is empty");
  nb::gil_scoped_release release;
  const int64_t num_nodes = int64_t(indptr.shape(0)) - 1;
  const Adjacency lists{indptr.data(), nullptr, false, num_nodes, indptr.data()[num_nodes], first_node, 0};
  std::vector<Piece> pieces;
  pieces.reserve(nodes.shape(0) * columns.size());
  for (const auto& [file, offset, item_bytes, array] : columns)
    for (size_t i = 0; i < nodes.shape(0); ++i) {
      const Extent list = extent(lists, nodes.data()[i]);
      const int64_t at = list.begin * item_bytes, bytes = list.degree * item_bytes;
      if (bytes > int64_t(array->size()) - at) throw std::out_of_range("the lists exceed their column");
      if (bytes) pieces.push_back({file, offset + at, bytes, array->bytes() + at});
    }
  return timed_read(pieces, {gap, depth, by_threads});
}

int sparse_get(PyObject* self, Py_buffer* view, int flags) {
  SparseArray* array = nb::inst_ptr<SparseArray>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, array->bytes(), Py_ssize_t(array->size()), 0, flags);
}

PyType_Slot sparse_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(sparse_get)}, {0, nullptr}};

void open_file(DiskFile* self, std::string path) {
  try {
    new (self) DiskFile(std::move(path));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

}  // namespace

void bind_disk(nb::module_& m) {
  nb::class_<DiskFile>(m, "DiskFile")
      .def("__init__", &open_file, "path"_a)
      .def_prop_ro("path", &DiskFile::path)
      .def_prop_ro("size", &DiskFile::size)
      .def_prop_ro("is_direct", &DiskFile::is_direct);
  nb::class_<SparseArray>(m, "SparseArray", nb::type_slots(sparse_slots))
      .def(nb::init<size_t>(), "size"_a)
      .def("forget", &SparseArray::forget);
  // Arguments: the file, the offset, the error.
  static nb::object disk_error = nb::steal(PyErr_NewException("hoploom._core.DiskError", PyExc_RuntimeError, nullptr));
  m.attr("DiskError") = disk_error;
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const DiskError& error) {
      PyErr_SetObject(disk_error.ptr(), nb::make_tuple(error.path, error.at, error.what()).ptr());
    }
  });
  m.def("has_read_queue", &has_read_queue);
  m.def("read_rows", &read_rows, "wants"_a, "gap"_a, "depth"_a, "by_threads"_a);
  m.def("read_lists", &read_lists, "columns"_a, nb::arg("indptr").noconvert(), "first_node"_a,
        nb::arg("nodes").noconvert(), "gap"_a, "depth"_a, "by_threads"_a);
}

}  // namespace hoploom
