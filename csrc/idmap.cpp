#include "idmap.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "random.h"

namespace hoploom {
namespace {

constexpr int64_t kGroup = 32;  // ids prefetched together

void check_places(const int64_t* places, int64_t count, int64_t num_ids) {
  for (int64_t i = 0; places && i < count; ++i)
    if (uint64_t(places[i]) >= uint64_t(num_ids))
      throw std::out_of_range("place " + std::to_string(places[i]) + " is out of range [0, " + std::to_string(num_ids) +
                              ")");
}

}  // namespace

size_t IdMap::slot_of(int64_t id) const { return slot_from(mix(0, uint64_t(id)) & (slots_.size() - 1), id); }

size_t IdMap::slot_from(size_t slot, int64_t id) const {
  const size_t mask = slots_.size() - 1;
  while (slots_[slot] && ids_[size_t(slots_[slot]) - 1] != id) slot = (slot + 1) & mask;
  return slot;
}

int64_t IdMap::size() const {
  const auto held = alone_.read();
  return int64_t(ids_.size());
}

int64_t IdMap::bytes() const {
  const auto held = alone_.read();
  return int64_t(ids_.capacity() * 8 + slots_.size() * 4);
}

Buffer IdMap::copy_ids() const {
  const auto held = alone_.read();
  Buffer out(ids_.size() * 8);
  std::copy(ids_.begin(), ids_.end(), out.as<int64_t>());
  return out;
}

void IdMap::grow(size_t slots) {
  slots_.assign(slots, 0);
  for (size_t number = 0; number < ids_.size(); ++number) slots_[slot_of(ids_[number])] = int32_t(number) + 1;
}

void IdMap::reserve(int64_t count) {
  const auto held = alone_.change();
  if (count < 0 || count > INT32_MAX) throw std::length_error("a map holds at most 2^31 ids");
  ids_.reserve(size_t(count));
  const size_t slots = std::bit_ceil(size_t(count) * 2 + 1);
  if (slots > slots_.size()) grow(slots);
}

// Returns where the search for each of some ids begins, and prefetches the lines it reads.
template <typename At>
void IdMap::locate(const int64_t* ids, At place, int64_t size, size_t* at) const {
  const size_t mask = slots_.size() - 1;
  for (int64_t i = 0; i < size; ++i) {
    at[i] = mix(0, uint64_t(ids[place(i)])) & mask;
    __builtin_prefetch(&slots_[at[i]]);
  }
  for (int64_t i = 0; i < size; ++i)
    if (slots_[at[i]]) __builtin_prefetch(&ids_[size_t(slots_[at[i]]) - 1]);
}

void IdMap::add(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) {
  const auto held = alone_.change();
  check_places(places, count, num_ids);
  size_t at[kGroup];
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t size = std::min(kGroup, count - begin);
    const auto place = [&](int64_t i) { return places ? places[begin + i] : begin + i; };
    if (ids_.size() + size_t(size) > size_t(INT32_MAX)) throw std::length_error("a map holds at most 2^31 ids");
    if ((ids_.size() + size_t(size)) * 2 > slots_.size()) grow(std::bit_ceil((ids_.size() + size_t(size)) * 2));
    locate(ids, place, size, at);
    for (int64_t i = 0; i < size; ++i) {
      const size_t slot = slot_from(at[i], ids[place(i)]);
      if (slots_[slot]) continue;
      ids_.push_back(ids[place(i)]);
      slots_[slot] = int32_t(ids_.size());
    }
  }
}

IdMap::Found IdMap::find(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) const {
  const auto held = alone_.read();
  check_places(places, count, num_ids);
  Found found{Buffer(size_t(num_ids) * 8), Buffer(size_t(count) * 8), Buffer(size_t(count) * 8)};
  int64_t* slots = found.slots.as<int64_t>();
  int64_t *hits = found.hits.as<int64_t>(), *misses = found.misses.as<int64_t>();
  int64_t num_hits = 0, num_misses = 0;
  size_t at[kGroup];
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t size = std::min(kGroup, count - begin);
    const auto place = [&](int64_t i) { return places ? places[begin + i] : begin + i; };
    locate(ids, place, size, at);
    for (int64_t i = 0; i < size; ++i) {
      const int32_t number = slots_[slot_from(at[i], ids[place(i)])];
      if (number) slots[place(i)] = number - 1;
      (number ? hits[num_hits++] : misses[num_misses++]) = place(i);
    }
  }
  found.hits.trim(size_t(num_hits) * 8);
  found.misses.trim(size_t(num_misses) * 8);
  return found;
}

}  // namespace hoploom
