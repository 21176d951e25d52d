// Partitioning for Python: checks types and lengths, releases the GIL, calls the core.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <vector>

#include "bindings.h"
#include "partition.h"

namespace hoploom {
namespace {

using Ids = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;  // int32 or int64

// A list is (indptr, indices, first node, first source, number of sources, relation, its name, number of lists, number
// of edges, whether indices are int64); both arrays are None if `read` reads them.
Topology topology_of(nb::list lists, Array<int64_t> bounds, int64_t num_relations, nb::object read,
                     std::vector<std::pair<Array<int64_t>, Ids>>& kept) {
  Topology topology{{bounds.data(), bounds.data() + bounds.shape(0)}, {}, {}};
  require(!topology.bounds.empty() && topology.bounds[0] == 0 &&
              std::is_sorted(topology.bounds.begin(), topology.bounds.end()),
          "the types' bounds must ascend from 0");
  require(topology.num_nodes() <= kMostNodes, "too many nodes");
  for (nb::handle held : lists) {
    InLists in{nullptr,
               nullptr,
               nb::cast<bool>(held[9]),
               nb::cast<int64_t>(held[7]),
               nb::cast<int64_t>(held[8]),
               nb::cast<int64_t>(held[2]),
               nb::cast<int64_t>(held[3]),
               nb::cast<int64_t>(held[4]),
               nb::cast<int64_t>(held[5]),
               nb::cast<std::string>(held[6])};
    if (!nb::object(held[0]).is_none()) {
      kept.emplace_back(nb::cast<Array<int64_t>>(held[0], false), nb::cast<Ids>(held[1], false));
      const auto& [indptr, indices] = kept.back();
      const nb::dlpack::dtype ids = in.wide ? nb::dtype<int64_t>() : nb::dtype<int32_t>();
      require(indices.dtype() == ids, "indices must be int32, or int64 if they are wide");
      require(int64_t(indptr.shape(0)) == in.num_lists + 1 && int64_t(indices.shape(0)) == in.num_edges,
              "there are other lists than it says");
      in.indptr = indptr.data();
      in.indices = indices.data();
    } else {
      require(!read.is_none(), "nothing reads the lists");
    }
    require(in.relation >= 0 && in.relation < num_relations, "no such relation");
    topology.lists.push_back(in);
  }
  if (!read.is_none())
    topology.read = [read](int64_t array, int64_t begin, int64_t count, void* into) {
      nb::gil_scoped_acquire acquire;
      read(array, begin, nb::steal(PyMemoryView_FromMemory(static_cast<char*>(into), count, PyBUF_WRITE)));
    };
  return topology;
}

std::vector<const void*> arrays_of(const Topology& topology) {
  std::vector<const void*> arrays;
  for (const InLists& lists : topology.lists) {
    arrays.push_back(lists.indptr);
    arrays.push_back(lists.indices);
  }
  return arrays;
}

void assign(nb::list lists, Array<int64_t> bounds, nb::object read, Optional<uint8_t> seed_bits, int64_t num_parts,
            int passes, double imbalance, int threads, uint64_t key, bool wide_ids, Output<int16_t> out) {
  std::vector<std::pair<Array<int64_t>, Ids>> kept;
  const Topology topology = topology_of(lists, bounds, INT64_MAX, read, kept);
  require(int64_t(out.shape(0)) == topology.num_nodes() &&
              (!seed_bits || int64_t(seed_bits->shape(0)) == topology.num_nodes() / 8 + 1),
          "one part and one bit per node are needed");
  require(num_parts >= 1 && num_parts <= kMostParts && imbalance >= 0 && passes >= 1 && threads >= 1,
          "a number is out of range");
  nb::gil_scoped_release release;
  read_maps(arrays_of(topology), [&] {
    assign_parts(topology, pointer(seed_bits), {num_parts, passes, imbalance, threads, key, wide_ids}, out.data());
  });
}

void cut(nb::list lists, Array<int64_t> bounds, nb::object read, Array<int16_t> parts, int threads,
         Output<int64_t> out) {
  std::vector<std::pair<Array<int64_t>, Ids>> kept;
  const Topology topology = topology_of(lists, bounds, int64_t(out.shape(0)), read, kept);
  require(int64_t(parts.shape(0)) == topology.num_nodes() && threads >= 1, "one part per node is needed");
  nb::gil_scoped_release release;
  read_maps(arrays_of(topology), [&] { count_cut(topology, parts.data(), threads, out.data()); });
}

void spread(nb::list lists, Array<int64_t> bounds, nb::object read, Array<float> new_visits, Array<int64_t> fanouts,
            int threads, Output<int64_t> visits) {
  std::vector<std::pair<Array<int64_t>, Ids>> kept;
  const Topology topology = topology_of(lists, bounds, int64_t(fanouts.shape(0)), read, kept);
  require(int64_t(visits.shape(0)) == topology.num_nodes() && visits.shape(0) == new_visits.shape(0) && threads >= 1,
          "one sum of visits per node is needed");
  nb::gil_scoped_release release;
  read_maps(arrays_of(topology),
            [&] { spread_visits(topology, new_visits.data(), fanouts.data(), threads, visits.data()); });
}

// Drops whole pages of an array in a mapped file that nothing has written to; they are read again from the file.
void drop_pages(nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> mapped) {
  drop(mapped.data(), 0, int64_t(mapped.nbytes()));
}

}  // namespace

void bind_partitioning(nb::module_& m) {
  m.def("assign_parts", &assign, "lists"_a, nb::arg("bounds").noconvert(), "read"_a.none(),
        nb::arg("seed_bits").noconvert().none(), "num_parts"_a, "passes"_a, "imbalance"_a, "threads"_a, "key"_a,
        "wide_ids"_a, nb::arg("out").noconvert());
  m.def("count_cut", &cut, "lists"_a, nb::arg("bounds").noconvert(), "read"_a.none(), nb::arg("parts").noconvert(),
        "threads"_a, nb::arg("out").noconvert());
  m.def("spread_visits", &spread, "lists"_a, nb::arg("bounds").noconvert(), "read"_a.none(),
        nb::arg("new_visits").noconvert(), nb::arg("fanouts").noconvert(), "threads"_a, nb::arg("visits").noconvert());
  m.def("drop_pages", &drop_pages, nb::arg("mapped").noconvert());
}

}  // namespace hoploom
