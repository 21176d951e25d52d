// Weighted, temporal, LABOR and disjoint picks.
#include <algorithm>
#include <limits>
#include <set>

#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

PickLists picks_of(const Graph& graph, const EdgeColumns& columns, const std::vector<int64_t>& nodes,
                   const Rule& rule) {
  return lists_of(sample(graph.adjacency(), columns, frontier_of(nodes), rule));
}

std::vector<float> weights_from(int64_t count, const std::vector<float>& menu) {
  std::vector<float> weights;
  for (int64_t choice : scattered(count, int64_t(menu.size()), 21)) weights.push_back(menu[size_t(choice)]);
  return weights;
}

// Times of each list ascend in steps of 0, 1 or 2.
std::vector<int64_t> ascending_times(const Graph& graph) {
  std::vector<int64_t> times = scattered(graph.num_edges(), 3, 99);
  for (size_t v = 0; v + 1 < graph.indptr.size(); ++v)
    for (int64_t p = graph.indptr[v] + 1; p < graph.indptr[v + 1]; ++p) times[size_t(p)] += times[size_t(p) - 1];
  return times;
}

// Sources of each list ascend, so that a source's id can be its time.
Graph graph_by_time(const std::vector<int64_t>& degrees, int64_t num_sources) {
  const Graph drawn = graph_of_degrees(degrees, num_sources);
  Graph graph;
  for (size_t v = 0; v < degrees.size(); ++v) {
    std::vector<int64_t> list(drawn.sources.begin() + drawn.indptr[v], drawn.sources.begin() + drawn.indptr[v + 1]);
    std::sort(list.begin(), list.end());
    graph.append(list);
  }
  return graph;
}

// Whether each edge is picked (how often) by `num_nodes` nodes with the same list of weights.
std::vector<int> frequencies(const std::vector<float>& list, int64_t num_nodes, const Rule& rule) {
  const auto degree = int64_t(list.size());
  const Graph graph = graph_of_equal_degrees(num_nodes, degree, 1000);
  std::vector<float> weights;
  for (int64_t v = 0; v < num_nodes; ++v) weights.insert(weights.end(), list.begin(), list.end());
  std::vector<int> seen(list.size());
  for (int64_t edge : picks_of(graph, {.weight = weights.data()}, counting(num_nodes), rule).edges)
    ++seen[size_t(edge % degree)];
  return seen;
}

}  // namespace

TEST(weighted_picks_equal_the_reference) {
  const Graph graph = graph_of_degrees({0, 1, 2, 5, 10, 64, 65, 66, 500, 3000}, 1000);
  for (const std::vector<float>& menu : {std::vector<float>{1},
                                         {1, 2, 3, 4},
                                         {0, 1},
                                         {0, 0, 0, 0, 0, 0, 0, 5},
                                         {0, -1, kNan, 2.5f, 1e-30f},
                                         {1e30f, 1e-45f}}) {
    const auto weights = weights_from(graph.num_edges(), menu);
    const EdgeColumns columns{.weight = weights.data()};
    const auto nodes = counting(graph.num_nodes());
    for (int64_t fanout : {-1, 0, 1, 5, 64, 65, 200})
      for (bool replace : {false, true}) {
        const Rule rule = rule_of(fanout, replace);
        CHECK_EQUAL(picks_of(graph, columns, nodes, rule),
                    naive_sample(graph.adjacency(), columns, frontier_of(nodes), rule));
      }
  }
}

// Of 20000 nodes some have two races that a logarithm off by 1e-4 would swap.
TEST(races_are_run_with_an_exact_logarithm) {
  const Graph graph = graph_of_equal_degrees(20000, 20, 1000);
  std::vector<float> weights;
  for (int64_t weight : scattered(graph.num_edges(), 1000)) weights.push_back(float(1 + weight));
  const EdgeColumns columns{.weight = weights.data()};
  const auto nodes = counting(20000);
  CHECK_EQUAL(picks_of(graph, columns, nodes, rule_of(10)),
              naive_sample(graph.adjacency(), columns, frontier_of(nodes), rule_of(10)));
}

TEST(a_weight_that_is_not_positive_is_never_drawn) {
  const std::vector<float> list = {0, -3, 2, kNan, 0, 1, -kInfinity, 4, -0.0f};
  for (int64_t fanout : {-1, 1, 2, 3, 5, 70})
    for (bool replace : {false, true}) {
      const auto seen = frequencies(list, 500, rule_of(fanout, replace));
      for (size_t i = 0; i < list.size(); ++i) CHECK(list[i] > 0 || seen[i] == 0);
    }
}

TEST(weights_that_are_all_zero_give_no_picks) {
  const Graph graph = graph_of_equal_degrees(20, 10, 100);
  const std::vector<float> weights(200, 0.0f);
  for (int64_t fanout : {-1, 0, 3, 70})
    for (bool replace : {false, true}) {
      const PickLists picks = picks_of(graph, {.weight = weights.data()}, counting(20), rule_of(fanout, replace));
      CHECK_EQUAL(picks.counts, std::vector<int64_t>(20, 0));
      CHECK(picks.sources.empty() && picks.edges.empty());
    }
}

TEST(fewer_positive_weights_than_the_fanout_are_all_picked_in_order) {
  const Graph graph = graph_of_equal_degrees(1, 6, 100);
  const std::vector<float> weights = {0, 1, 0, 2, 3, 0};
  CHECK_EQUAL(picks_of(graph, {.weight = weights.data()}, {0}, rule_of(3)).edges, (std::vector<int64_t>{1, 3, 4}));
  CHECK_EQUAL(picks_of(graph, {.weight = weights.data()}, {0}, rule_of(70, true)).counts, (std::vector<int64_t>{70}));
}

TEST(an_infinite_weight_wins_over_finite_ones) {
  CHECK_EQUAL(frequencies({1, kInfinity, 5}, 100, rule_of(2, true)), (std::vector<int>{0, 200, 0}));
  CHECK_EQUAL(frequencies({1, kInfinity, 5}, 100, rule_of(1)), (std::vector<int>{0, 100, 0}));
}

// 20000 draws at 1:2:3:4; five standard deviations are at most 347.
TEST(frequencies_follow_the_weights) {
  for (bool replace : {false, true}) {
    const auto seen = frequencies({1, 2, 0, 3, 4}, 20000, rule_of(1, replace));
    CHECK_BETWEEN(1780, seen[0], 2220);
    CHECK_BETWEEN(3700, seen[1], 4300);
    CHECK_EQUAL(seen[2], 0);
    CHECK_BETWEEN(5650, seen[3], 6350);
    CHECK_BETWEEN(7650, seen[4], 8350);
  }
}

// Two of weights 1, 1, 2 without replacement: the last is left out with (1/4)(1/3) twice = 1/6.
TEST(the_second_pick_follows_the_weights_that_are_left) {
  const auto seen = frequencies({1, 1, 2}, 12000, rule_of(2));
  CHECK_BETWEEN(9790, seen[2], 10210);  // 10000, standard deviation 41
  CHECK_EQUAL(seen[0] + seen[1] + seen[2], 24000);
}

// The edges of a list have times 0, 1, 2, ...: at time t, t + 1 of them are seen.
TEST(nothing_later_than_the_seed_time_is_picked) {
  const Graph graph = graph_of_equal_degrees(30, 20, 100);
  std::vector<int64_t> edge_time = counting(graph.num_edges()), times = counting(30, -3);
  for (int64_t& time : edge_time) time %= 20;
  for (int64_t fanout : {-1, 4, 64, 100}) {
    const auto nodes = counting(30);
    const PickLists picks = lists_of(sample(graph.adjacency(), {.edge_time = edge_time.data()},
                                            frontier_of(nodes, nullptr, &times), rule_of(fanout)));
    size_t at = 0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const int64_t seen = std::clamp<int64_t>(times[i] + 1, 0, 20);
      CHECK_EQUAL(picks.counts[i], fanout < 0 ? seen : std::min(seen, fanout));
      for (int64_t k = 0; k < picks.counts[i]; ++k) CHECK(edge_time[size_t(picks.edges[at++])] <= times[i]);
    }
  }
}

TEST(the_last_picks_are_the_most_recent_ones) {
  const Graph graph = graph_of_equal_degrees(1, 10, 100);
  const auto edge_time = counting(10);
  const std::vector<int64_t> times = {6, 1, -1, 50}, nodes = {0, 0, 0, 0};
  Rule rule = rule_of(3);
  rule.last = true;
  const PickLists picks =
      lists_of(sample(graph.adjacency(), {.edge_time = edge_time.data()}, frontier_of(nodes, nullptr, &times), rule));
  CHECK_EQUAL(picks.counts, (std::vector<int64_t>{3, 2, 0, 3}));
  CHECK_EQUAL(picks.edges, (std::vector<int64_t>{4, 5, 6, 0, 1, 7, 8, 9}));
}

TEST(times_of_sources_pick_as_the_same_times_on_edges_do) {
  const Graph graph = graph_by_time({0, 1, 5, 30, 100, 70000}, 2000);
  const auto source_time = counting(2000);
  const std::vector<int64_t> nodes = {0, 1, 2, 3, 4, 5, 5}, times = {5, 900, 1000, 700, 1500, 1900, -1};
  for (bool wide_ids : {false, true})
    for (bool last : {false, true})
      for (int64_t fanout : {-1, 5, 64, 65}) {
        Rule rule = rule_of(fanout);
        rule.last = last;
        const Frontier frontier = frontier_of(nodes, nullptr, &times);
        const EdgeColumns by_edge{.edge_time = graph.sources.data()};
        const EdgeColumns by_source{.source_time = source_time.data(), .num_sources = 2000};
        CHECK_EQUAL(lists_of(sample(graph.adjacency(wide_ids), by_source, frontier, rule)),
                    lists_of(sample(graph.adjacency(wide_ids), by_edge, frontier, rule)));
      }
}

TEST(a_source_without_a_time_throws) {
  Graph graph;
  graph.append({1, 2, -5, 3});
  graph.append({1, 2, 90, 3});
  const auto source_time = counting(10);
  const std::vector<int64_t> times = {5};
  for (int64_t node : {0, 1}) {
    const std::vector<int64_t> nodes = {node};
    CHECK_THROWS(sample(graph.adjacency(), {.source_time = source_time.data(), .num_sources = 10},
                        frontier_of(nodes, nullptr, &times), rule_of(2)));
  }
}

TEST(labor_picks_the_same_sources_for_every_destination_of_a_list) {
  Graph graph;
  for (int v = 0; v < 5; ++v) graph.append(counting(50, 300));
  Rule rule = rule_of(7);
  rule.labor = true;
  const PickLists picks = picks_of(graph, {}, counting(5), rule);
  for (size_t i = 7; i < picks.sources.size(); ++i) CHECK_EQUAL(picks.sources[i], picks.sources[i - 7]);
  rule.key += 1;
  CHECK(!(picks_of(graph, {}, counting(5), rule).sources == picks.sources));
}

// What one destination picks, another that lists it too leaves out only for lower ranks.
TEST(labor_needs_fewer_sources_than_uniform_picks) {
  const Graph graph = graph_of_equal_degrees(200, 50, 400);
  Rule rule = rule_of(5);
  const auto num_distinct = [&] {
    const PickLists picks = picks_of(graph, {}, counting(200), rule);
    CHECK_EQUAL(picks.counts, std::vector<int64_t>(200, 5));
    return int(std::set<int64_t>(picks.sources.begin(), picks.sources.end()).size());
  };
  const int uniform = num_distinct();
  rule.labor = true;
  CHECK_BETWEEN(5, num_distinct(), uniform / 2);
}

TEST(trees_pick_independently) {
  const Graph graph = graph_of_equal_degrees(1, 60, 1000);
  const auto trees = counting(1000);
  const std::vector<int64_t> nodes(1000, 0);
  const PickLists picks = lists_of(sample(graph.adjacency(), {}, frontier_of(nodes, &trees), rule_of(1)));
  std::vector<int> seen(60);
  for (int64_t edge : picks.edges) ++seen[size_t(edge)];
  for (int count : seen) CHECK_BETWEEN(1, count, 40);  // 17 are expected, standard deviation 4
}

TEST(all_strategies_together_equal_the_reference) {
  const Graph graph = graph_by_time({0, 1, 3, 10, 64, 65, 300}, 500);
  const auto weights = weights_from(graph.num_edges(), {0, 1, 2, 0.5f});
  const auto edge_time = ascending_times(graph), source_time = counting(500);
  const auto nodes = scattered(60, graph.num_nodes()), trees = scattered(60, 4), times = scattered(60, 400);
  std::vector<int64_t> excluded;
  for (int64_t position : {0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 60, 77, 78, 79, 140, 143, 144, 300, 442})
    excluded.push_back(graph.first_edge + position);
  for (int flags = 0; flags < 1 << 9; ++flags)
    for (int64_t fanout : {-1, 0, 3, 64, 66}) {
      const auto flag = [&](int bit) { return (flags >> bit & 1) != 0; };
      EdgeColumns columns;
      if (flag(0)) columns.weight = weights.data();
      if (flag(1)) columns.edge_time = edge_time.data();
      if (flag(2)) columns.source_time = source_time.data(), columns.num_sources = 500;
      Rule rule = rule_of(fanout, flag(3));
      rule.last = flag(4);
      rule.labor = flag(5);
      if (flag(7)) rule.window = 60;
      if (flag(8)) rule.excluded = excluded.data(), rule.num_excluded = int64_t(excluded.size());
      const Frontier frontier = frontier_of(nodes, flag(6) ? &trees : nullptr, flag(1) || flag(2) ? &times : nullptr);
      CHECK_EQUAL(lists_of(sample(graph.adjacency(), columns, frontier, rule)),
                  naive_sample(graph.adjacency(), columns, frontier, rule));
    }
}

TEST(a_damaged_indptr_throws_for_every_strategy) {
  const std::vector<float> weights(80, 1.0f);
  const auto edge_time = counting(80), times = counting(20), nodes = counting(20);
  for (int strategy = 0; strategy < 4; ++strategy)
    for (int64_t damage : {int64_t(-1), int64_t(81), INT64_MAX, INT64_MIN}) {
      Graph graph = graph_of_equal_degrees(20, 4, 100);
      graph.indptr[7] = damage;
      Rule rule = rule_of(2);
      rule.labor = strategy == 0;
      rule.last = strategy == 1;
      EdgeColumns columns;
      if (strategy == 2) columns.weight = weights.data();
      columns.edge_time = edge_time.data();
      CHECK_THROWS(
          sample(graph.adjacency(), columns, frontier_of(nodes, nullptr, strategy == 0 ? nullptr : &times), rule));
    }
}
