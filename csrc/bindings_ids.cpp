// Ids to rows and to local numbers, for Python: gather.h, travel.h, relabel.h and the maps.
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "budget.h"
#include "buffers.h"
#include "gather.h"
#include "idmap.h"
#include "idranks.h"
#include "relabel.h"
#include "slotmap.h"
#include "travel.h"

namespace hoploom {
namespace {

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

Buffer owned_ids(Ids ids, int64_t first, int64_t size) {
  const Narrowed narrowed = narrowed_of(ids, first);
  nb::gil_scoped_release release;
  return owned(narrowed, size);
}

auto widen_picks(Ids counts, Ids sources, Ids edges, int64_t first_edge) {
  const std::array<Narrowed, 3> columns = {narrowed_of(counts, 0), narrowed_of(sources, 0),
                                           narrowed_of(edges, first_edge)};
  nb::gil_scoped_release release;
  return std::make_tuple(widen(columns[0]), widen(columns[1]), widen(columns[2]));
}

// Per part: places, counts, sources, edges.
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

void require_sum(const Array<int64_t>& counts, int64_t size) {
  int64_t total = 0;
  for (size_t i = 0; i < counts.shape(0); ++i) {
    const int64_t count = counts.data()[i];
    require(count >= 0 && count <= size - total, "counts do not sum to the sources");
    total += count;
  }
  require(total == size, "counts do not sum to the sources");
}

Buffer add_sources(NodeMap& map, Array<int64_t> sources, Array<int64_t> counts, Optional<int64_t> trees) {
  require(!trees || trees->shape(0) == counts.shape(0), "one tree per frontier node is needed");
  nb::gil_scoped_release release;
  require_sum(counts, int64_t(sources.shape(0)));
  return map.add(sources.data(), int64_t(sources.shape(0)), counts.data(), pointer(trees));
}

void add_to_budget(NodeBudget& budget, Array<int64_t> sources, Array<int32_t> local, Array<int64_t> counts) {
  require(local.shape(0) == sources.shape(0), "one local id per source is needed");
  nb::gil_scoped_release release;
  require_sum(counts, int64_t(sources.shape(0)));
  budget.add(sources.data(), local.data(), counts.data(), int64_t(counts.shape(0)));
}

void add_ids(IdMap& map, Array<int64_t> ids, Optional<int64_t> places) {
  nb::gil_scoped_release release;
  const int64_t num_ids = int64_t(ids.shape(0));
  map.add(ids.data(), num_ids, pointer(places), places ? int64_t(places->shape(0)) : num_ids);
}

template <typename Map>
auto find_ids(const Map& map, Array<int64_t> ids, Optional<int64_t> places) {
  nb::gil_scoped_release release;
  const int64_t num_ids = int64_t(ids.shape(0));
  auto found = map.find(ids.data(), num_ids, pointer(places), places ? int64_t(places->shape(0)) : num_ids);
  return std::make_tuple(std::move(found.slots), std::move(found.hits), std::move(found.misses));
}

auto find_slots(SlotMap& map, Array<int64_t> ids, Array<int64_t> places) {
  nb::gil_scoped_release release;
  SlotMap::Found found = map.find(ids.data(), int64_t(ids.shape(0)), places.data(), int64_t(places.shape(0)));
  return std::make_tuple(std::move(found.slots), std::move(found.misses));
}

Buffer add_slots(SlotMap& map, Array<int64_t> ids, Array<int64_t> places, Output<int64_t> slots) {
  require(slots.shape(0) == ids.shape(0), "one slot per id is needed");
  nb::gil_scoped_release release;
  return map.add(ids.data(), int64_t(ids.shape(0)), places.data(), int64_t(places.shape(0)), slots.data());
}

}  // namespace

void bind_ids(nb::module_& m) {
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
          [](NodeMap& map, Array<int64_t> sources, Optional<int64_t> trees) {
            require(!trees || trees->shape(0) == sources.shape(0), "one tree per source is needed");
            nb::gil_scoped_release release;
            return map.find(sources.data(), int64_t(sources.shape(0)), pointer(trees));
          },
          nb::arg("sources").noconvert(), nb::arg("trees").noconvert().none())
      .def("nodes", &NodeMap::copy_nodes, "from"_a)
      .def("trees", &NodeMap::copy_trees, "from"_a)
      .def("take", &NodeMap::take, nb::call_guard<nb::gil_scoped_release>())
      .def("clear", &NodeMap::clear)
      .def("__len__", &NodeMap::size);

  nb::class_<NodeBudget>(m, "NodeBudget")
      .def(nb::init<>())
      .def("add", &add_to_budget, nb::arg("sources").noconvert(), nb::arg("local").noconvert(),
           nb::arg("counts").noconvert())
      .def("draw", &NodeBudget::draw, "key"_a, "stream"_a, "count"_a, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<IdMap>(m, "IdMap")
      .def(nb::init<>())
      .def("reserve", &IdMap::reserve, "count"_a)
      .def("add", &add_ids, nb::arg("ids").noconvert(), nb::arg("places").noconvert().none())
      .def("find", &find_ids<IdMap>, nb::arg("ids").noconvert(), nb::arg("places").noconvert().none())
      .def("ids", &IdMap::copy_ids)
      .def("bytes", &IdMap::bytes)
      .def("__len__", &IdMap::size);

  nb::class_<IdRanks>(m, "IdRanks")
      .def(
          "__init__", [](IdRanks* self, Array<int64_t> ids) { new (self) IdRanks(ids.data(), int64_t(ids.shape(0))); },
          nb::arg("ids").noconvert())
      .def("find", &find_ids<IdRanks>, nb::arg("ids").noconvert(), nb::arg("places").noconvert().none())
      .def("ids", &IdRanks::copy_ids)
      .def("bytes", &IdRanks::bytes)
      .def_static("bytes_of", &IdRanks::bytes_of, "first"_a, "last"_a)
      .def("__len__", &IdRanks::size);

  nb::class_<SlotMap>(m, "SlotMap")
      .def(nb::init<int64_t>(), "num_ids"_a)
      .def("begin", &SlotMap::begin)
      .def("find", &find_slots, nb::arg("ids").noconvert(), nb::arg("places").noconvert())
      .def("add", &add_slots, nb::arg("ids").noconvert(), nb::arg("places").noconvert(), nb::arg("slots").noconvert())
      .def("ids", &SlotMap::copy_ids)
      .def("__len__", &SlotMap::size);

  m.def("gather", &gather_rows, nb::arg("table").noconvert(), nb::arg("ids").noconvert(),
        nb::arg("places").noconvert().none(), "first"_a, nb::arg("out").noconvert());
  m.def("route", &route_ids, nb::arg("ids").noconvert(), nb::arg("bounds").noconvert(),
        nb::arg("places").noconvert().none());
  m.def("scatter", &scatter_rows, nb::arg("rows").noconvert(), nb::arg("places").noconvert(),
        nb::arg("out").noconvert());
  m.def("select", &select_ids, nb::arg("ids").noconvert(), nb::arg("places").noconvert());
  m.def("narrow", &narrow_ids, nb::arg("ids").noconvert(), nb::arg("places").noconvert().none(), "first"_a);
  m.def("owned", &owned_ids, nb::arg("ids").noconvert(), "first"_a, "size"_a);
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
}

}  // namespace hoploom
