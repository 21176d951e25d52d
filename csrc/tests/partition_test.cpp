// assign_parts and count_cut: communities found, parts balanced, nothing out of range read.
#include "../partition.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <string>

#include "check.h"
#include "graphs.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr int64_t kCommunities = 8;

InLists lists_of(const Graph& graph, bool wide, int64_t num_sources) {
  const void* indices = wide ? static_cast<const void*>(graph.sources.data()) : graph.narrow_sources.data();
  return {graph.indptr.data(), indices, wide,    graph.num_nodes(), graph.num_edges(), graph.first_node, 0,
          num_sources,         0,       "a to b"};
}

Topology topology_of(const Graph& graph, bool wide = false) {
  return {{0, graph.num_nodes()}, {lists_of(graph, wide, graph.num_nodes())}};
}

// Of a node's in-edges four in five come from its community, v % kCommunities.
Graph planted(int64_t num_nodes, int64_t degree) {
  Graph graph;
  for (int64_t v = 0; v < num_nodes; ++v) {
    std::vector<int64_t> list;
    for (int64_t i = 0; i < degree; ++i) {
      const int64_t any = int64_t(mix(uint64_t(v), uint64_t(i)) % uint64_t(num_nodes));
      list.push_back(i % 5 == 0 ? any : any / kCommunities * kCommunities + v % kCommunities);
    }
    graph.append(list);
  }
  return graph;
}

std::vector<int16_t> assigned(const Topology& topology, int64_t num_parts, int threads) {
  std::vector<int16_t> parts(size_t(topology.num_nodes()));
  assign_parts(topology, nullptr, {num_parts, 5, 0.05, threads, 1}, parts.data());
  return parts;
}

int64_t cut_of(const Topology& topology, const std::vector<int16_t>& parts, int threads) {
  int64_t cut = 0;
  count_cut(topology, parts.data(), threads, &cut);
  return cut;
}

}  // namespace

TEST(planted_communities_are_found_by_any_number_of_threads) {
  const Graph graph = planted(2400, 15);
  const auto parts = assigned(topology_of(graph), 4, 1);
  for (int threads : {2, 5}) CHECK_EQUAL(assigned(topology_of(graph), 4, threads), parts);
  CHECK_EQUAL(assigned(topology_of(graph, true), 4, 1), parts);
  const int64_t cut = cut_of(topology_of(graph), parts, 3);
  CHECK_BETWEEN(int64_t(0), cut, graph.num_edges() / 5);  // at best 3 of 20
  std::vector<int64_t> counts(4);
  for (int16_t part : parts) ++counts[size_t(part)];
  CHECK_BETWEEN(int64_t(500), *std::max_element(counts.begin(), counts.end()), int64_t(630));
}

TEST(a_ring_cut_in_two_counts_its_edges) {
  const Graph graph = ring(10);  // v + 1 and v + 2 lead to v
  std::vector<int16_t> parts(10, 0);
  std::fill(parts.begin() + 5, parts.end(), int16_t(1));
  for (int threads : {1, 4}) CHECK_EQUAL(cut_of(topology_of(graph), parts, threads), int64_t(6));
}

TEST(every_part_of_a_tiny_graph_gets_a_node) {
  for (int64_t num_nodes : {1, 2, 5, 17})
    for (int64_t num_parts = 1; num_parts <= num_nodes; ++num_parts) {
      auto parts = assigned(topology_of(ring(num_nodes)), num_parts, 2);
      std::sort(parts.begin(), parts.end());
      parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
      CHECK_EQUAL(int64_t(parts.size()), num_parts);
    }
}

TEST(sources_of_another_type_follow_their_edges) {
  Graph graph;  // 40 nodes of type b, each linked from two of the 20 nodes of type a
  for (int64_t v = 0; v < 40; ++v) graph.append({v % 20, v % 20});
  graph.first_node = 20;
  const Topology topology{{0, 20, 60}, {lists_of(graph, false, 20)}};
  const auto parts = assigned(topology, 2, 2);
  CHECK_BETWEEN(int64_t(0), cut_of(topology, parts, 1), int64_t(20));
  CHECK_BETWEEN(int64_t(8), int64_t(std::count(parts.begin(), parts.begin() + 20, int16_t(0))), int64_t(12));
}

TEST(what_is_out_of_range_throws) {
  for (bool wide : {false, true})
    for (int64_t bad : {int64_t(-1), int64_t(100), int64_t(INT32_MAX)}) {
      Graph graph = planted(100, 12);
      graph.sources[700] = bad;
      graph.narrow_sources[700] = int32_t(bad);
      CHECK_THROWS(assigned(topology_of(graph, wide), 3, 2));
      CHECK_THROWS(cut_of(topology_of(graph, wide), std::vector<int16_t>(100), 2));
    }
  for (int64_t bad : {int64_t(-5), int64_t(1) << 60}) {
    Graph graph = planted(100, 12);
    graph.indptr[40] = bad;
    CHECK_THROWS(
        assigned({{0, 100}, {{graph.indptr.data(), graph.sources.data(), true, 100, 1200, 0, 0, 100, 0, "x"}}}, 3, 2));
  }
  Graph graph = ring(10);
  Topology beyond = topology_of(graph);
  beyond.lists[0].first_node = 1;
  CHECK_THROWS(assigned(beyond, 2, 1));
  beyond = topology_of(graph);
  beyond.lists[0].num_sources = 11;
  CHECK_THROWS(assigned(beyond, 2, 1));
}

TEST(what_a_thread_throws_reaches_the_caller) {
  for (int thrower : {0, 1, 3}) {
    std::atomic<int> done{0};
    std::string caught;
    try {
      on_threads(4, [&](int thread) {
        if (thread == thrower) throw std::length_error("too much");
        ++done;
      });
    } catch (const std::length_error& error) {
      caught = error.what();
    }
    CHECK_EQUAL(caught, std::string("too much"));
    CHECK_EQUAL(done.load(), 3);  // the others were waited for
  }
}
