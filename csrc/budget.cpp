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

// Exponential races (Efraimidis and Spirakis), one for each node: who is the earliest does not depend on who else runs.
Buffer NodeBudget::draw(uint64_t key, uint32_t stream, int64_t count) {
  const auto held = alone_.change();
  const Buffer ids = ids_.copy_ids();
  std::vector<std::tuple<double, int64_t, size_t>> races;  // when it ends, node, number
  for (size_t number = 0; number < sums_.size(); ++number) {
    const int64_t node = ids.as<int64_t>()[number];
    const double weight = sums_[number] * sums_[number];
    if (weight > 0) races.emplace_back(-exact_log(Draws(key, node, stream).unit(0)) / weight, node, number);
  }
  const size_t drawn = std::min(size_t(std::max<int64_t>(0, count)), races.size());
  std::partial_sort(races.begin(), races.begin() + ptrdiff_t(drawn), races.end());
  Buffer out(drawn * 8);
  for (size_t i = 0; i < drawn; ++i) {
    out.as<int64_t>()[i] = std::get<1>(races[i]);
    sums_[std::get<2>(races[i])] = 0.0;
  }
  return out;
}

}  // namespace hoploom
