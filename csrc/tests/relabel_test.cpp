// NodeMap: both kinds against a std::map, with reuse, trees and bad ids.
#include "../relabel.h"

#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr int64_t kDirect = int64_t(1) << 30, kHashed = 0;  // budgets

std::vector<int32_t> add(NodeMap& map, const std::vector<int64_t>& sources, const std::vector<int64_t>& counts,
                         const std::vector<int64_t>& trees = {}) {
  return values_of<int32_t>(
      map.add(sources.data(), int64_t(sources.size()), counts.data(), trees.empty() ? nullptr : trees.data()));
}

void add_seeds(NodeMap& map, const std::vector<int64_t>& seeds, const std::vector<int64_t>& trees = {}) {
  map.add_seeds(seeds.data(), trees.empty() ? nullptr : trees.data(), int64_t(seeds.size()));
}

std::vector<int32_t> find(const NodeMap& map, const std::vector<int64_t>& sources) {
  return values_of<int32_t>(map.find(sources.data(), int64_t(sources.size())));
}

// One batch of three hops, compared with the reference at every step; the map is left full.
void check_batch(NodeMap& map, int64_t num_nodes, uint64_t key, int64_t num_trees) {
  NaiveMap naive;
  const auto seeds = scattered(30, num_nodes, key);
  const auto seed_trees = num_trees ? scattered(30, num_trees, key + 1) : std::vector<int64_t>();
  add_seeds(map, seeds, seed_trees);
  naive.add_seeds(seeds, seed_trees);
  for (uint64_t hop = 0; hop < 3; ++hop) {
    const auto counts = scattered(40, 9, key + hop);
    int64_t total = 0;
    for (int64_t count : counts) total += count;
    const auto sources = scattered(total, num_nodes, key * 5 + hop);
    const auto trees = num_trees ? scattered(40, num_trees, key * 7 + hop) : std::vector<int64_t>();
    CHECK_EQUAL(add(map, sources, counts, trees), naive.add(sources, counts, trees));
    CHECK_EQUAL(map.size(), int64_t(naive.nodes.size()));
  }
  CHECK_EQUAL(values_of<int64_t>(map.copy_nodes(0)), naive.nodes);
  if (num_trees) CHECK_EQUAL(values_of<int64_t>(map.copy_trees(0)), naive.trees);
}

}  // namespace

TEST(both_maps_equal_the_reference_batch_after_batch) {
  for (int64_t budget : {kDirect, kHashed}) {
    NodeMap map(200, budget);
    for (uint64_t batch = 0; batch < 50; ++batch) {
      check_batch(map, 200, batch * 100, 0);
      if (batch % 2) {
        map.clear();
      } else {
        const auto wanted = values_of<int64_t>(map.copy_nodes(0));
        CHECK_EQUAL(values_of<int64_t>(map.take()), wanted);
      }
      CHECK_EQUAL(map.size(), int64_t(0));
    }
  }
}

TEST(trees_equal_the_reference_batch_after_batch) {
  for (int64_t budget : {kDirect, kHashed}) {
    NodeMap map(50, budget);
    for (uint64_t batch = 0; batch < 30; ++batch) {
      check_batch(map, 50, batch * 100, batch % 3 ? 6 : 0);
      if (batch % 2) map.clear();
      else map.take();
    }
  }
}

TEST(the_budget_is_four_bytes_a_node_and_changes_no_answer) {
  NodeMap fits(100, 400), exceeds(100, 399);
  const auto sources = scattered(5000, 100);
  CHECK_EQUAL(add(fits, sources, {5000}), add(exceeds, sources, {5000}));
  CHECK_EQUAL(values_of<int64_t>(fits.copy_nodes(0)), values_of<int64_t>(exceeds.copy_nodes(0)));
}

TEST(a_repeated_seed_keeps_its_place_and_is_found_at_its_first) {
  for (int64_t budget : {kDirect, kHashed}) {
    NodeMap map(10, budget);
    add_seeds(map, {7, 3, 7, 7, 5});
    CHECK_EQUAL(map.size(), int64_t(5));
    CHECK_EQUAL(values_of<int64_t>(map.copy_nodes(0)), (std::vector<int64_t>{7, 3, 7, 7, 5}));
    CHECK_EQUAL(add(map, {5, 7, 3, 9}, {3, 1}), (std::vector<int32_t>{4, 0, 1, 5}));
    CHECK_EQUAL(values_of<int64_t>(map.copy_nodes(3)), (std::vector<int64_t>{7, 5, 9}));
    map.clear();
    CHECK_EQUAL(find(map, {7, 3, 5, 9}), (std::vector<int32_t>{-1, -1, -1, -1}));
  }
}

TEST(a_node_of_two_trees_has_two_local_ids) {
  NodeMap map(10, kHashed);
  add_seeds(map, {4, 4, 4}, {0, 1, 0});
  CHECK_EQUAL(add(map, {4, 5, 4, 5, 5}, {2, 2, 1}, {0, 1, 0}), (std::vector<int32_t>{0, 3, 1, 4, 3}));
  CHECK_EQUAL(values_of<int64_t>(map.copy_nodes(0)), (std::vector<int64_t>{4, 4, 4, 5, 5}));
  CHECK_EQUAL(values_of<int64_t>(map.copy_trees(0)), (std::vector<int64_t>{0, 1, 0, 0, 1}));
  CHECK_EQUAL(values_of<int64_t>(map.copy_trees(4)), (std::vector<int64_t>{1}));
  const std::vector<int64_t> sources = {4, 5, 5, 4}, trees = {1, 1, 2, 0};
  CHECK_EQUAL(values_of<int32_t>(map.find(sources.data(), 4, trees.data())), (std::vector<int32_t>{1, 4, -1, 0}));
  CHECK_THROWS(map.find(sources.data(), 4));
}

TEST(find_tells_who_is_absent_and_adds_nothing) {
  for (int64_t budget : {kDirect, kHashed}) {
    NodeMap map(100, budget);
    add_seeds(map, {50, 60});
    CHECK_EQUAL(find(map, {60, 0, 99, 50, 60}), (std::vector<int32_t>{1, -1, -1, 0, 1}));
    CHECK_EQUAL(map.size(), int64_t(2));
  }
}

// Node n of 100000 is seen first at place n, whatever the table's size is by then.
TEST(a_hashed_map_grows) {
  NodeMap map(int64_t(1) << 40, kHashed);
  for (int round = 0; round < 2; ++round) {
    std::vector<int64_t> sources;
    for (int64_t i = 0; i < 100000; ++i) sources.push_back(i * 3000000 % 999999999989);
    const auto local = add(map, sources, {40000, 0, 60000});
    CHECK_EQUAL(local.size(), sources.size());
    for (size_t i = 0; i < local.size(); ++i) CHECK_EQUAL(local[i], int32_t(i));
    CHECK_EQUAL(add(map, sources, {100000}), local);
    CHECK_EQUAL(values_of<int64_t>(map.take()), sources);
  }
}

TEST(a_direct_map_holds_every_node) {
  NodeMap map(100000, kDirect);
  auto sources = counting(100000);
  sources.insert(sources.end(), sources.rbegin(), sources.rend());
  const auto local = add(map, sources, {200000});
  for (size_t i = 0; i < local.size(); ++i) CHECK_EQUAL(int64_t(local[i]), sources[i]);
  CHECK_EQUAL(map.size(), int64_t(100000));
}

TEST(an_id_out_of_range_throws_and_clear_makes_the_map_usable) {
  for (int64_t budget : {kDirect, kHashed})
    for (int64_t bad : {int64_t(-1), int64_t(100), INT64_MAX, INT64_MIN})
      for (size_t at : {size_t(0), size_t(60), size_t(199)}) {
        NodeMap map(100, budget);
        auto sources = scattered(200, 100);
        sources[at] = bad;
        CHECK_THROWS(add_seeds(map, sources));
        CHECK_THROWS(find(map, sources));
        map.clear();
        CHECK_THROWS(add(map, sources, {200}));
        map.clear();
        check_batch(map, 100, 5, 0);
      }
}

TEST(a_bad_id_among_trees_throws_and_clear_makes_the_map_usable) {
  NodeMap map(50, kHashed);
  CHECK_THROWS(add(map, {1, 2, 50}, {2, 1}, {0, 1}));
  map.clear();
  check_batch(map, 50, 5, 4);
}

TEST(seeds_that_throw_leave_the_map_as_it_was) {
  for (int64_t budget : {kDirect, kHashed}) {
    NodeMap map(10, budget);
    add_seeds(map, {4, 2});
    CHECK_THROWS(add_seeds(map, {3, 11}));
    CHECK_EQUAL(find(map, {4, 2, 3}), (std::vector<int32_t>{0, 1, -1}));
  }
}

TEST(an_empty_map_gives_empty_answers) {
  for (int64_t budget : {kDirect, kHashed})
    for (int64_t num_nodes : {0, 5}) {
      NodeMap map(num_nodes, budget);
      CHECK_EQUAL(map.take().size(), size_t(0));
      add_seeds(map, {});
      CHECK(add(map, {}, {}).empty() && add(map, {}, {0, 0}).empty() && find(map, {}).empty());
      CHECK_EQUAL(map.copy_nodes(0).size(), size_t(0));
      map.clear();
      CHECK_EQUAL(map.take().size(), size_t(0));
    }
}

TEST(nodes_that_were_taken_stay_as_they_were) {
  NodeMap map(1000, kDirect);
  add_seeds(map, counting(500));
  const Buffer taken = map.take();
  add_seeds(map, counting(500, 500));
  CHECK_EQUAL(values_of<int64_t>(taken), counting(500));
}

TEST(a_batch_has_trees_for_all_or_for_none) {
  for (int64_t budget : {kDirect, kHashed}) {
    NodeMap map(10, budget);
    add_seeds(map, {4, 5}, {0, 1});
    CHECK_THROWS(add(map, {4}, {1}));
    CHECK_THROWS(add_seeds(map, {6}));
    CHECK_EQUAL(add(map, {5, 5}, {1, 1}, {0, 1}), (std::vector<int32_t>{2, 1}));
    map.clear();
    add_seeds(map, {4, 5});
    CHECK_THROWS(add(map, {4}, {1}, {0}));
    CHECK_EQUAL(add(map, {5, 6}, {2}), (std::vector<int32_t>{1, 2}));
  }
}
