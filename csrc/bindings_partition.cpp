// Partitioning for Python: checks types and lengths, releases the GIL, calls the core.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <vector>

#include "bindings.h"
#include "partition.h"

namespace hoploom {
namespace {

using Ids = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;  // int32 or int64

// Lists are (indptr, indices, first node, first source, number of sources, relation, its name, whether both are maps of
// files that nobody wrote to).
Topology topology_of(nb::list lists, Array<int64_t> bounds, int64_t num_relations,
                     std::vector<std::pair<Array<int64_t>, Ids>>& kept) {
  Topology topology{{bounds.data(), bounds.data() + bounds.shape(0)}, {}};
  require(!topology.bounds.empty() && topology.bounds[0] == 0 &&
              std::is_sorted(topology.bounds.begin(), topology.bounds.end()),
          "the types' bounds must ascend from 0");
  require(topology.num_nodes() <= kMostNodes, "too many nodes");
  for (nb::handle held : lists) {
    kept.emplace_back(nb::cast<Array<int64_t>>(held[0], false), nb::cast<Ids>(held[1], false));
    const auto& [indptr, indices] = kept.back();
    const bool wide = indices.dtype() == nb::dtype<int64_t>();
    require(indptr.shape(0) >= 1, "indptr is empty");
    require(wide || indices.dtype() == nb::dtype<int32_t>(), "indices must be int32 or int64");
    const InLists in{indptr.data(),
                     indices.data(),
                     wide,
                     int64_t(indptr.shape(0)) - 1,
                     int64_t(indices.shape(0)),
                     nb::cast<int64_t>(held[2]),
                     nb::cast<int64_t>(held[3]),
                     nb::cast<int64_t>(held[4]),
                     nb::cast<int64_t>(held[5]),
                     nb::cast<std::string>(held[6]),
                     nb::cast<bool>(held[7])};
    require(in.relation >= 0 && in.relation < num_relations, "no such relation");
    topology.lists.push_back(in);
  }
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

void assign(nb::list lists, Array<int64_t> bounds, Optional<uint8_t> is_seed, int64_t num_parts, int passes,
            double imbalance, int threads, uint64_t key, Output<int16_t> out) {
  std::vector<std::pair<Array<int64_t>, Ids>> kept;
  const Topology topology = topology_of(lists, bounds, INT64_MAX, kept);
  require(int64_t(out.shape(0)) == topology.num_nodes() && (!is_seed || is_seed->shape(0) == out.shape(0)),
          "one part and one mark per node are needed");
  require(num_parts >= 1 && num_parts <= kMostParts && imbalance >= 0 && passes >= 1 && threads >= 1,
          "a number is out of range");
  nb::gil_scoped_release release;
  read_maps(arrays_of(topology), [&] {
    assign_parts(topology, pointer(is_seed), {num_parts, passes, imbalance, threads, key}, out.data());
  });
}

void cut(nb::list lists, Array<int64_t> bounds, Array<int16_t> parts, int threads, Output<int64_t> out) {
  std::vector<std::pair<Array<int64_t>, Ids>> kept;
  const Topology topology = topology_of(lists, bounds, int64_t(out.shape(0)), kept);
  require(int64_t(parts.shape(0)) == topology.num_nodes() && threads >= 1, "one part per node is needed");
  nb::gil_scoped_release release;
  read_maps(arrays_of(topology), [&] { count_cut(topology, parts.data(), threads, out.data()); });
}

// Whole pages of an array that is a map of a file to which nobody wrote; they come back from the file when read.
void drop_pages(nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> mapped) {
  drop(mapped.data(), 0, int64_t(mapped.nbytes()));
}

}  // namespace

void bind_partitioning(nb::module_& m) {
  m.def("assign_parts", &assign, "lists"_a, nb::arg("bounds").noconvert(), nb::arg("is_seed").noconvert().none(),
        "num_parts"_a, "passes"_a, "imbalance"_a, "threads"_a, "key"_a, nb::arg("out").noconvert());
  m.def("count_cut", &cut, "lists"_a, nb::arg("bounds").noconvert(), nb::arg("parts").noconvert(), "threads"_a,
        nb::arg("out").noconvert());
  m.def("drop_pages", &drop_pages, nb::arg("mapped").noconvert());
}

}  // namespace hoploom
