#include "csc.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "threads.h"

namespace hoploom {
namespace {

void check_range(const int64_t* ids, int64_t count, int64_t limit, const char* side) {
  for (int64_t i = 0; i < count; ++i)
    if (uint64_t(ids[i]) >= uint64_t(limit))
      throw std::out_of_range(std::string(side) + " id " + std::to_string(ids[i]) + " of edge " + std::to_string(i) +
                              " is out of range [0, " + std::to_string(limit) + ")");
}

template <typename Id>
void fill(const int64_t* sources, const int64_t* destinations, int64_t num_edges, int64_t from, int64_t to,
          std::vector<int64_t>& cursor, Id* indices, int64_t* permutation) {
  for (int64_t e = 0; e < num_edges; ++e) {
    const int64_t d = destinations[e];
    if (d < from || d >= to) continue;
    const int64_t position = cursor[size_t(d)]++;
    indices[position] = Id(sources[e]);
    if (permutation) permutation[position] = e;
  }
}

}  // namespace

// Each thread owns a range of destinations and reads all edges: reading twice costs less than
// sharing counters.
Csc build_csc(const int64_t* sources, const int64_t* destinations, int64_t num_edges, int64_t num_sources,
              int64_t num_destinations, int threads) {
  threads = std::clamp(threads, 1, 64);
  check_range(sources, num_edges, num_sources, "source");
  check_range(destinations, num_edges, num_destinations, "destination");
  Csc csc;
  csc.wide_ids = num_sources > INT32_MAX;
  csc.is_identity = std::is_sorted(destinations, destinations + num_edges);
  csc.indptr = Buffer(size_t(num_destinations + 1) * 8);
  int64_t* indptr = csc.indptr.as<int64_t>();
  std::memset(indptr, 0, csc.indptr.size());

  const auto first_of = [&](int t) {
    return num_destinations / threads * t + std::min<int64_t>(t, num_destinations % threads);
  };
  on_threads(threads, [&](int t) {
    const int64_t from = first_of(t), to = first_of(t + 1);
    for (int64_t e = 0; e < num_edges; ++e)
      if (destinations[e] >= from && destinations[e] < to) ++indptr[destinations[e] + 1];
  });
  for (int64_t d = 0; d < num_destinations; ++d) indptr[d + 1] += indptr[d];

  csc.indices = Buffer(size_t(num_edges) * (csc.wide_ids ? 8 : 4));
  if (!csc.is_identity) csc.permutation = Buffer(size_t(num_edges) * 8);
  int64_t* permutation = csc.is_identity ? nullptr : csc.permutation.as<int64_t>();
  std::vector<int64_t> cursor(indptr, indptr + num_destinations);
  on_threads(threads, [&](int t) {
    if (csc.wide_ids)
      fill(sources, destinations, num_edges, first_of(t), first_of(t + 1), cursor, csc.indices.as<int64_t>(),
           permutation);
    else
      fill(sources, destinations, num_edges, first_of(t), first_of(t + 1), cursor, csc.indices.as<int32_t>(),
           permutation);
  });
  return csc;
}

namespace {
struct Timed {
  int64_t time, source, edge;
};

template <typename Id>
void order_lists(Csc& csc, int64_t num_destinations, const int64_t* edge_time, const int64_t* source_time) {
  const int64_t* indptr = csc.indptr.as<int64_t>();
  Id* indices = csc.indices.as<Id>();
  int64_t* permutation = csc.permutation.as<int64_t>();
  std::vector<Timed> list;
  for (int64_t d = 0; d < num_destinations; ++d) {
    list.clear();
    for (int64_t p = indptr[d]; p < indptr[d + 1]; ++p)
      list.push_back(
          {edge_time ? edge_time[permutation[p]] : source_time[indices[p]], int64_t(indices[p]), permutation[p]});
    std::stable_sort(list.begin(), list.end(), [](const Timed& a, const Timed& b) { return a.time < b.time; });
    for (int64_t p = indptr[d]; p < indptr[d + 1]; ++p) {
      indices[p] = Id(list[size_t(p - indptr[d])].source);
      permutation[p] = list[size_t(p - indptr[d])].edge;
    }
  }
}
}  // namespace

void order_by_time(Csc& csc, int64_t num_edges, int64_t num_destinations, const int64_t* edge_time,
                   const int64_t* source_time) {
  if (csc.is_identity) {
    csc.permutation = Buffer(size_t(num_edges) * 8);
    for (int64_t e = 0; e < num_edges; ++e) csc.permutation.as<int64_t>()[e] = e;
  }
  if (csc.wide_ids) order_lists<int64_t>(csc, num_destinations, edge_time, source_time);
  else order_lists<int32_t>(csc, num_destinations, edge_time, source_time);
  const int64_t* permutation = csc.permutation.as<int64_t>();
  csc.is_identity = std::is_sorted(permutation, permutation + num_edges);
  if (csc.is_identity) csc.permutation = Buffer();
}

}  // namespace hoploom
