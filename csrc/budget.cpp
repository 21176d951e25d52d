#include "budget.h"

#include <algorithm>
#include <tuple>

#include "random.h"

namespace hoploom {

void NodeBudget::add(const int64_t* sources, const int32_t* local, const int64_t* counts, int64_t frontier_size) {
  const auto held = alone_.change();
  std::vector<int64_t> fresh;
  std::vector<double> shares;
  for (int64_t i = 0, position = 0; i < frontier_size; ++i)
    for (const int64_t end = position + counts[i]; position < end; ++position)
      if (local[position] < 0) fresh.push_back(sources[position]), shares.push_back(1.0 / double(counts[i]));
  const int64_t count = int64_t(fresh.size());
  ids_.add(fresh.data(), count, nullptr, count);
  sums_.resize(size_t(ids_.size()));
  const IdMap::Found found = ids_.find(fresh.data(), count, nullptr, count);
  for (size_t i = 0; i < fresh.size(); ++i) sums_[size_t(found.slots.as<int64_t>()[i])] += shares[i];
}

// Exponential races (Efraimidis and Spirakis), one per node: a node's time does not depend on the other nodes.
Buffer NodeBudget::draw(uint64_t key, uint32_t stream, int64_t count) {
  const auto held = alone_.change();
  const Buffer ids = ids_.copy_ids();
  using Race = std::tuple<double, int64_t, size_t>;  // finish time, node, candidate
  std::vector<Race> earliest;                        // a heap with the latest on top
  for (size_t number = 0; count > 0 && number < sums_.size(); ++number) {
    const int64_t node = ids.as<int64_t>()[number];
    const double weight = sums_[number] * sums_[number];
    if (weight == 0) continue;
    const double unit = Draws(key, node, stream).unit(0);
    const bool is_full = int64_t(earliest.size()) == count;
    // -ln(u) > 1 - u: most nodes lose without a logarithm. The margin is far above rounding errors.
    if (is_full && 1.0 - unit > std::get<0>(earliest[0]) * weight * (1 + 1e-9)) continue;
    const Race race(-exact_log(unit) / weight, node, number);
    if (is_full && race > earliest[0]) continue;
    if (is_full) std::pop_heap(earliest.begin(), earliest.end()), earliest.pop_back();
    earliest.push_back(race);
    std::push_heap(earliest.begin(), earliest.end());
  }
  std::sort_heap(earliest.begin(), earliest.end());
  Buffer out(earliest.size() * 8);
  for (size_t i = 0; i < earliest.size(); ++i) {
    out.as<int64_t>()[i] = std::get<1>(earliest[i]);
    sums_[std::get<2>(earliest[i])] = 0.0;
  }
  return out;
}

}  // namespace hoploom
