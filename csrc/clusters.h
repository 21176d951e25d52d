// Placing clusters on parts: the graph of clusters fits in memory; it is coarsened, placed, and refined level by level.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hoploom {

// Limits and current loads of parts, per kind: nodes of each type, edges, seeds.
struct Loads {
  int64_t num_parts, num_kinds;
  std::vector<int64_t> most;  // [num_kinds] limit of a part
  std::vector<int64_t> held;  // [num_parts, num_kinds] current load

  bool has_room(int64_t part, const int64_t* load) const {
    const int64_t* own = &held[size_t(part * num_kinds)];
    for (int64_t k = 0; k < num_kinds; ++k)
      if (load[k] > 0 && own[k] + load[k] > most[size_t(k)]) return false;
    return true;
  }
  // Returns whether the part exceeds a limit of a kind that this load contains.
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
  // Returns the largest share of a limit that the part reaches with this load.
  double fullness(int64_t part, const int64_t* load) const;
};

// A link of `weight` edges between clusters a < b.
struct Link {
  uint32_t a, b;
  int32_t weight;
};

struct ClusterGraph {
  int64_t num_clusters, num_kinds;
  std::vector<int64_t> loads;    // [num_clusters, num_kinds]
  std::vector<int64_t> sizes;    // [num_clusters]: the load of all kinds as one number
  std::vector<int64_t> indptr;   // [num_clusters + 1]; a link is stored in both directions
  std::vector<uint32_t> ends;    // [2 * num_links]
  std::vector<int32_t> weights;  // [2 * num_links]
};

// Sorts links and merges those of the same pair.
void merge_links(std::vector<Link>& links);

// Builds the graph from links in any order, with repeats. The links are consumed.
ClusterGraph cluster_graph(std::vector<int64_t> loads, std::vector<int64_t> sizes, int64_t num_kinds,
                           std::vector<Link>& links);

// Returns the part of each cluster: few links between parts, loads within limits. `limits` comes without loads.
std::vector<uint16_t> place_clusters(ClusterGraph graph, const Loads& limits, uint64_t key);

}  // namespace hoploom
