// NodeBudget against a std::map, and against what a caller should not do.
#include "../budget.h"

#include <map>
#include <set>

#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

// Nodes by the end of their races: ln by parts as in sampling, here from the draws of one node alone.
std::vector<int64_t> naive_draw(std::map<int64_t, double>& sums, uint64_t key, uint32_t stream, size_t count) {
  std::set<std::pair<double, int64_t>> races;
  for (const auto& [node, sum] : sums) races.emplace(-exact_log(Draws(key, node, stream).unit(0)) / (sum * sum), node);
  std::vector<int64_t> drawn;
  for (auto race = races.begin(); race != races.end() && drawn.size() < count; ++race) drawn.push_back(race->second);
  for (int64_t node : drawn) sums.erase(node);
  return drawn;
}

}  // namespace

TEST(a_budget_adds_up_shares_and_draws_what_a_map_draws) {
  for (int64_t num_nodes : {1, 40, 3000}) {
    NodeBudget budget;
    std::map<int64_t, double> sums;
    std::set<int64_t> batch;
    for (uint32_t layer = 0; layer < 4; ++layer) {
      const std::vector<int64_t> counts = {3, 0, 50, 1, 7, 200}, sources = scattered(261, num_nodes, layer);
      std::vector<int32_t> local;
      for (size_t i = 0, at = 0; i < counts.size(); ++i)
        for (const size_t end = at + size_t(counts[i]); at < end; ++at) {
          local.push_back(batch.count(sources[at]) ? 0 : -1);
          if (local.back() < 0) sums[sources[at]] += 1.0 / double(counts[i]);
        }
      budget.add(sources.data(), local.data(), counts.data(), 6);
      const std::vector<int64_t> drawn = values_of<int64_t>(budget.draw(9, layer, layer * 20));
      CHECK_EQUAL(drawn, naive_draw(sums, 9, layer, layer * 20));
      batch.insert(drawn.begin(), drawn.end());
    }
    CHECK_EQUAL(values_of<int64_t>(budget.draw(9, 4, INT64_MAX)), naive_draw(sums, 9, 4, 1 << 20));
    CHECK_EQUAL(budget.draw(9, 5, 5).size(), size_t(0));
  }
}

TEST(an_empty_budget_draws_nobody_and_a_count_below_zero_is_none) {
  NodeBudget budget;
  budget.add(nullptr, nullptr, nullptr, 0);
  CHECK_EQUAL(budget.draw(1, 0, 10).size(), size_t(0));
  const std::vector<int64_t> sources = {INT64_MIN, INT64_MAX}, counts = {2};
  const std::vector<int32_t> local = {-1, -1};
  budget.add(sources.data(), local.data(), counts.data(), 1);
  CHECK_EQUAL(budget.draw(1, 0, -1).size(), size_t(0));
  CHECK_EQUAL(budget.draw(1, 0, 2).size(), size_t(16));
}
