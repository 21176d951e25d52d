// A graph of clusters, small enough for memory, is coarsened, placed on parts and refined level by level.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hoploom {

// What a part may hold of every kind: nodes of each type, edges, seeds.
struct Loads {
  int64_t num_parts, num_kinds;
  std::vector<int64_t> most;  // [num_kinds]
  std::vector<int64_t> held;  // [num_parts, num_kinds]

  bool has_room(int64_t part, const int64_t* load) const {
    const int64_t* own = &held[size_t(part * num_kinds)];
    for (int64_t k = 0; k < num_kinds; ++k)
      if (load[k] > 0 && own[k] + load[k] > most[size_t(k)]) return false;
    return true;
  }
  // Whether it holds too much of what this load is made of.
  bool is_over(int64_t part, const int64_t* load) const {
    const int64_t* own = &held[size_t(part * num_kinds)];
    for (int64_t k = 0; k < num_kinds; ++k)
      if (load[k] > 0 && own[k] > most[size_t(k)]) return true;
    return false;
  }
  void add(int64_t part, const int64_t* load, int64_t sign = 1) {
    int64_t* own = &held[size_t(part * num_kinds)];
    for (int64_t k = 0; k < num_kinds; ++k) own[k] += sign * load[k];
  }
  // The fullest kind of a part that also takes this load, as a share of what it may hold.
  double fullness(int64_t part, const int64_t* load) const;
};

// `weight` edges between two clusters, a < b.
struct Link {
  uint32_t a, b;
  int32_t weight;
};

struct ClusterGraph {
  int64_t num_clusters, num_kinds;
  std::vector<int64_t> loads;    // [num_clusters, num_kinds]
  std::vector<int64_t> sizes;    // [num_clusters]: all kinds in one number
  std::vector<int64_t> indptr;   // [num_clusters + 1], both directions of every link
  std::vector<uint32_t> ends;    // [2 * num_links]
  std::vector<int32_t> weights;  // [2 * num_links]
};

// Sorts links and adds up those of the same pair.
void merge_links(std::vector<Link>& links);

// Links in any order, the same pair any number of times; they are consumed.
ClusterGraph cluster_graph(std::vector<int64_t> loads, std::vector<int64_t> sizes, int64_t num_kinds,
                           std::vector<Link>& links);

// [num_clusters] parts: few links between parts, none too full. `limits` is empty of loads.
std::vector<uint16_t> place_clusters(ClusterGraph graph, const Loads& limits, uint64_t key);

}  // namespace hoploom
