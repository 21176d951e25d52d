// Calls that a caller should not make: each must throw, none may hang or touch foreign memory.
#include <thread>

#include "../gather.h"
#include "../idmap.h"
#include "../relabel.h"
#include "../travel.h"
#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

TEST(the_lowest_id_is_out_of_range_and_overflows_nothing) {
  Graph graph = graph_of_equal_degrees(30, 4, 100);
  graph.first_node = 10;
  const std::vector<int64_t> nodes = {10, INT64_MIN}, times = {0, 0};
  CHECK_THROWS(sample(graph.adjacency(), {}, frontier_of(nodes), rule_of(3)));
  CHECK_THROWS(sample(graph.adjacency(), {}, frontier_of(nodes, nullptr, &times), rule_of(3)));
  const std::vector<uint8_t> table(100, 0);
  std::vector<uint8_t> rows(2);
  CHECK_THROWS(gather(table.data(), 100, 1, nodes.data(), 2, 10, rows.data()));
}

// fanout * 8 bytes is a multiple of 2^64: outputs of no size for 100 picks.
TEST(a_fanout_whose_bytes_overflow_throws_or_picks_all) {
  const Graph graph = graph_of_equal_degrees(1, 100, 1000);
  const std::vector<int64_t> nodes = {0}, times = {0};
  for (int64_t fanout : {int64_t(1) << 61, int64_t(1) << 62})
    for (bool labor : {false, true}) {
      Rule rule = rule_of(fanout, true);
      rule.labor = labor;
      rule.last = !labor;
      std::vector<int64_t> edges;
      const std::string error = thrown_by(
          [&] { edges = lists_of(sample(graph.adjacency(), {}, frontier_of(nodes, nullptr, &times), rule)).edges; });
      CHECK(!error.empty() || edges == counting(100));
    }
}

TEST(a_buffer_beyond_all_memory_throws_and_is_not_counted) {
  const size_t live = pool_use().live_bytes;
  for (size_t size : {size_t(1) << 60, (size_t(1) << 63) + 1, ~size_t(0)}) {
    CHECK_THROWS(Buffer(size));
    CHECK_EQUAL(pool_use().live_bytes, live);
  }
}

TEST(an_untouched_map_finds_nobody) {
  for (int64_t budget : {0, 1000}) {
    const NodeMap map(100, budget);
    const std::vector<int64_t> nodes = {87, 0, 99};
    CHECK_EQUAL(values_of<int32_t>(map.find(nodes.data(), 3)), (std::vector<int32_t>{-1, -1, -1}));
  }
}

TEST(the_trees_of_a_batch_without_trees_cannot_be_copied) {
  for (int64_t budget : {0, 1000}) {
    NodeMap map(100, budget);
    const std::vector<int64_t> seeds = {1, 2, 3};
    map.add_seeds(seeds.data(), nullptr, 3);
    CHECK_THROWS(map.copy_trees(0));
  }
}

TEST(empty_arrays_may_be_null) {
  const std::vector<int64_t> zeros = {0, 0};
  scatter(nullptr, 0, zeros.data(), 1, 1, nullptr);
  gather(nullptr, 1, 0, zeros.data(), 1, 0, nullptr);
  stitch({{zeros.data(), zeros.data(), 1, nullptr, nullptr, 0}}, 1);
  stitch({}, 0);
  select(nullptr, 0, nullptr, 0);
  narrow(nullptr, 0, nullptr, 0, 7);
  widen({nullptr, true, 0, 7});
  widen({nullptr, false, 0, 7});
  edge_rows(nullptr, 0, zeros.data(), 2, 0, nullptr, nullptr);
}

// Each call of two threads ends as if it were alone, or in an error that says what to do.
TEST(a_map_that_two_threads_use_at_once_says_so) {
  const auto nodes = scattered(20000, 100000, 5);
  const std::vector<int64_t> one_list = {20000};
  NodeMap nodes_map(100000, 0);
  IdMap ids_map;
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (std::string& error : errors)
    threads.emplace_back([&] {
      const auto note = [&](const std::string& thrown) {
        if (!thrown.empty()) error = thrown;
      };
      for (int round = 0; round < 100 && error.empty(); ++round) {
        note(thrown_by([&] { nodes_map.add(nodes.data(), 20000, one_list.data(), nullptr); }));
        note(thrown_by([&] { nodes_map.copy_nodes(0); }));
        note(thrown_by([&] { nodes_map.take(); }));
        note(thrown_by([&] { ids_map.add(nodes.data() + round, 10, nullptr, 10); }));
        note(thrown_by([&] { ids_map.find(nodes.data(), 20000, nullptr, 20000); }));
        note(thrown_by([&] { ids_map.copy_ids(); }));
      }
    });
  for (auto& thread : threads) thread.join();
  for (const std::string& error : errors)
    CHECK(error.empty() || error.find("two threads use one map") != std::string::npos);
}
