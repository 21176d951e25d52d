// Uniform picks: both paths against the reference, their frequencies, and damaged lists.
#include <algorithm>
#include <map>
#include <set>

#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

const std::vector<int64_t> kFanouts = {-1, 0, 1, 2, 3, 4, 5, 10, 15, 25, 63, 64, 65, 100, 1000};

// Picks of one node at a time, which LABOR needs.
PickLists sample_alone(const Adjacency& adjacency, const std::vector<int64_t>& nodes, Rule rule) {
  rule.labor = true;
  return lists_of(sample(adjacency, {}, frontier_of(nodes), rule));
}

void check_all_paths(const Graph& graph, const std::vector<int64_t>& nodes, int64_t fanout, bool replace) {
  const Rule rule = rule_of(fanout, replace);
  for (bool wide_ids : {false, true}) {
    const Adjacency adjacency = graph.adjacency(wide_ids);
    const PickLists wanted = naive_sample(adjacency, {}, frontier_of(nodes), rule);
    CHECK_EQUAL(lists_of(sample(adjacency, {}, frontier_of(nodes), rule)), wanted);
    if (fanout <= kVectorFanout) CHECK_EQUAL(lists_of(sample_vector(adjacency, {}, frontier_of(nodes), rule)), wanted);
  }
}

Graph graph_of_many_degrees() {
  Graph graph = graph_of_degrees(
      {0, 1, 2, 3, 4, 5, 9, 10, 11, 14, 15, 16, 17, 31, 63, 64, 65, 66, 100, 999, 1000, 1001, 0}, 5000);
  graph.first_node = 40;
  graph.first_edge = int64_t(1) << 33;
  return graph;
}

}  // namespace

TEST(uniform_picks_equal_the_reference_for_every_degree_and_fanout) {
  const Graph graph = graph_of_many_degrees();
  const auto nodes = counting(graph.num_nodes(), graph.first_node);
  for (int64_t fanout : kFanouts)
    for (bool replace : {false, true}) check_all_paths(graph, nodes, fanout, replace);
}

TEST(uniform_picks_equal_the_reference_for_every_frontier_size) {
  const Graph graph = graph_of_many_degrees();
  for (int64_t size : {0, 1, 2, 15, 16, 17, 31, 32, 33, 112, 127, 128, 129, 143, 145, 300}) {
    auto nodes = scattered(size, graph.num_nodes(), uint64_t(size));
    for (int64_t& node : nodes) node += graph.first_node;
    for (int64_t fanout : {-1, 5, 64, 70}) check_all_paths(graph, nodes, fanout, false);
    check_all_paths(graph, nodes, 5, true);
  }
}

// Above 65536 neighbours a draw takes two words.
TEST(uniform_picks_equal_the_reference_for_wide_degrees) {
  const Graph graph = graph_of_degrees({65535, 3, 65536, 65537, 0, 70001}, 1 << 20);
  const std::vector<int64_t> nodes = {0, 1, 2, 3, 4, 5, 3, 2};
  for (int64_t fanout : {0, 1, 5, 64, 65, 1000})
    for (bool replace : {false, true}) check_all_paths(graph, nodes, fanout, replace);
  for (int64_t fanout : {-1, 65536}) check_all_paths(graph, {5, 3}, fanout, false);
}

TEST(pick_uniform_gives_the_offsets_of_sample_vector) {
  const Graph graph = graph_of_many_degrees();
  Scratch scratch;
  for (int64_t node = graph.first_node; node < graph.first_node + graph.num_nodes(); ++node)
    for (int64_t fanout : {-1, 0, 1, 7, 64})
      for (bool replace : {false, true}) {
        const Rule rule = rule_of(fanout, replace);
        const std::vector<int64_t> nodes = {node};
        const PickLists picks = lists_of(sample_vector(graph.adjacency(), {}, frontier_of(nodes), rule));
        pick_uniform(rule.key, node, rule.stream, graph.degree(node), fanout, replace, scratch);
        auto edges = scratch.offsets;
        for (int64_t& edge : edges) edge += graph.first_edge + graph.indptr[size_t(node - graph.first_node)];
        CHECK_EQUAL(picks.edges, edges);
      }
}

TEST(a_tree_is_only_another_key) {
  const Graph graph = graph_of_many_degrees();
  const auto nodes = counting(graph.num_nodes(), graph.first_node);
  for (int64_t fanout : {-1, 5, 64}) {
    const std::vector<int64_t> trees(nodes.size(), 12);
    Rule rule = rule_of(fanout);
    const PickLists disjoint = lists_of(sample(graph.adjacency(), {}, frontier_of(nodes, &trees), rule));
    rule.key = mix(rule.key, 12);
    CHECK_EQUAL(disjoint, lists_of(sample_vector(graph.adjacency(), {}, frontier_of(nodes), rule)));
  }
}

TEST(node_v_of_a_ring_picks_v_plus_one_and_v_plus_two) {
  const Graph graph = ring(100);
  const PickLists picks = lists_of(sample(graph.adjacency(), {}, frontier_of({98, 7}), rule_of(2)));
  CHECK_EQUAL(picks.counts, (std::vector<int64_t>{2, 2}));
  CHECK_EQUAL(picks.sources, (std::vector<int64_t>{99, 0, 8, 9}));
  CHECK_EQUAL(picks.edges, (std::vector<int64_t>{196, 197, 14, 15}));
}

TEST(picks_without_replacement_never_repeat) {
  const Graph graph = graph_of_equal_degrees(300, 70, 1 << 20);
  const auto nodes = counting(300);
  for (int64_t fanout : {10, 64, 65, 69}) {
    const PickLists picks = lists_of(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(fanout)));
    CHECK_EQUAL(std::set<int64_t>(picks.edges.begin(), picks.edges.end()).size(), size_t(300 * fanout));
  }
}

TEST(a_huge_fanout_without_replacement_picks_all) {
  const Graph graph = graph_of_many_degrees();
  const auto nodes = counting(graph.num_nodes(), graph.first_node);
  CHECK_EQUAL(lists_of(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(INT64_MAX))),
              lists_of(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(-1))));
}

TEST(the_place_in_the_frontier_changes_nothing) {
  const Graph graph = graph_of_equal_degrees(50, 40, 1000);
  auto nodes = counting(50);
  const PickLists forward = lists_of(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(8)));
  std::reverse(nodes.begin(), nodes.end());
  const PickLists backward = lists_of(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(8)));
  for (size_t node = 0; node < 50; ++node)
    for (size_t i = 0; i < 8; ++i) CHECK_EQUAL(forward.edges[node * 8 + i], backward.edges[(49 - node) * 8 + i]);
}

TEST(two_parts_make_the_same_picks_as_one) {
  const Graph whole = graph_of_equal_degrees(60, 30, 1000);
  Graph low, high;
  for (size_t v = 0; v < 60; ++v)
    (v < 25 ? low : high)
        .append({whole.sources.begin() + int64_t(v) * 30, whole.sources.begin() + int64_t(v) * 30 + 30});
  high.first_node = 25;
  high.first_edge = low.num_edges();
  for (int64_t fanout : {-1, 7, 64}) {
    const PickLists wanted = lists_of(sample(whole.adjacency(), {}, frontier_of(counting(60)), rule_of(fanout)));
    PickLists both = lists_of(sample(low.adjacency(), {}, frontier_of(counting(25)), rule_of(fanout)));
    const PickLists rest = lists_of(sample(high.adjacency(), {}, frontier_of(counting(35, 25)), rule_of(fanout)));
    both.counts.insert(both.counts.end(), rest.counts.begin(), rest.counts.end());
    both.sources.insert(both.sources.end(), rest.sources.begin(), rest.sources.end());
    both.edges.insert(both.edges.end(), rest.edges.begin(), rest.edges.end());
    CHECK_EQUAL(both, wanted);
  }
}

// Each of the 10 pairs of 5 neighbours: 20000 nodes give 2000 each, standard deviation 42.
TEST(every_subset_is_equally_likely) {
  const Graph graph = graph_of_equal_degrees(20000, 5, 1 << 20);
  const auto nodes = counting(20000);
  const PickLists picks = lists_of(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(2)));
  std::map<std::pair<int64_t, int64_t>, int> pairs;
  for (size_t i = 0; i < picks.edges.size(); i += 2) ++pairs[std::minmax({picks.edges[i] % 5, picks.edges[i + 1] % 5})];
  CHECK_EQUAL(pairs.size(), size_t(10));
  for (const auto& [_, count] : pairs) CHECK_BETWEEN(1790, count, 2210);
}

// 20000 nodes, three draws of ten with replacement: 6000 each, standard deviation 73.
TEST(every_position_is_equally_likely_with_replacement) {
  const Graph graph = graph_of_equal_degrees(20000, 10, 1 << 20);
  const auto nodes = counting(20000);
  const PickLists picks = lists_of(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(3, true)));
  std::vector<int> seen(10);
  for (int64_t edge : picks.edges) ++seen[size_t(edge % 10)];
  for (int count : seen) CHECK_BETWEEN(5635, count, 6365);
}

// Two picks of 60 agree in one place of 1000 for 1000 / 60 = 17 nodes, standard deviation 4.
TEST(key_and_stream_and_high_half_of_the_node_change_the_picks) {
  Graph graph = graph_of_equal_degrees(1000, 60, 1 << 20);
  Rule rule = rule_of(1);
  const auto offsets = [&] {
    auto nodes = counting(1000, graph.first_node);
    return lists_of(sample(graph.adjacency(), {}, frontier_of(nodes), rule)).edges;
  };
  const auto check_differs = [&](const std::vector<int64_t>& wanted) {
    const auto seen = offsets();
    int equal = 0;
    for (size_t i = 0; i < 1000; ++i) equal += seen[i] == wanted[i];
    CHECK_BETWEEN(0, equal, 40);
  };
  const auto before = offsets();
  rule.key += uint64_t(1) << 40;
  check_differs(before);
  rule = rule_of(1);
  rule.stream += 1;
  check_differs(before);
  rule = rule_of(1);
  graph.first_node = int64_t(1) << 32;
  check_differs(before);
  graph.first_node = 0;
  CHECK_EQUAL(offsets(), before);
}

TEST(a_node_outside_the_part_throws_on_both_paths) {
  Graph graph = graph_of_equal_degrees(30, 4, 100);
  graph.first_node = 10;
  for (int64_t node : {int64_t(9), int64_t(40), int64_t(-1), INT64_MAX, INT64_MIN})
    for (int64_t fanout : {-1, 3, 65}) {
      std::vector<int64_t> nodes = counting(20, 10);
      nodes[17] = node;
      CHECK_THROWS(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(fanout)));
      CHECK_THROWS(sample_alone(graph.adjacency(), nodes, rule_of(fanout)));
    }
}

TEST(a_damaged_indptr_throws_on_both_paths) {
  for (int64_t damage : {int64_t(-1), int64_t(81), INT64_MAX, INT64_MIN, int64_t(1) << 40})
    for (size_t at : {size_t(0), size_t(7), size_t(20)})
      for (int64_t fanout : {-1, 3, 64, 65}) {
        Graph graph = graph_of_equal_degrees(20, 4, 100);
        graph.indptr[at] = damage;
        const auto nodes = counting(20);
        CHECK_THROWS(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(fanout)));
        CHECK_THROWS(sample_alone(graph.adjacency(), nodes, rule_of(fanout)));
      }
}

TEST(a_decreasing_indptr_throws_and_its_sound_lists_are_still_read) {
  Graph graph = graph_of_equal_degrees(20, 4, 100);
  graph.indptr[7] = 20;  // node 6 is [24, 20)
  const auto sound = counting(6), damaged = counting(7);
  CHECK_EQUAL(lists_of(sample(graph.adjacency(), {}, frontier_of(sound), rule_of(-1))).sources.size(), size_t(24));
  CHECK_THROWS(sample(graph.adjacency(), {}, frontier_of(damaged), rule_of(-1)));
  CHECK_THROWS(sample_alone(graph.adjacency(), damaged, rule_of(3)));
}

TEST(most_picks_bounds_the_picks) {
  const Graph graph = graph_of_many_degrees();
  const auto nodes = counting(graph.num_nodes(), graph.first_node);
  for (int64_t fanout : kFanouts)
    for (bool replace : {false, true}) {
      const Rule rule = rule_of(fanout, replace);
      const Picks picks = sample(graph.adjacency(), {}, frontier_of(nodes), rule);
      CHECK_BETWEEN(int64_t(picks.sources.size() / 8), most_picks(graph.adjacency(), frontier_of(nodes), rule),
                    std::max<int64_t>(graph.num_edges(), fanout * graph.num_nodes()));
    }
}
