#include "slotmap.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "random.h"

namespace hoploom {
namespace {

constexpr int64_t kGroup = 32;  // ids prefetched together

}  // namespace

SlotMap::SlotMap(int64_t num_ids) : num_ids_(num_ids) {
  if (num_ids < 0 || num_ids > INT32_MAX) throw std::length_error("a map by id is for at most 2^31 ids");
  if (num_ids) direct_ = ZeroedPages(size_t(num_ids) * 4);
  entries_ = num_ids ? direct_.as<int32_t>() : hashed_.data();
}

void SlotMap::check(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) const {
  for (int64_t i = 0; i < count; ++i) {
    if (uint64_t(places[i]) >= uint64_t(num_ids))
      throw std::out_of_range("place " + std::to_string(places[i]) + " is out of range [0, " + std::to_string(num_ids) +
                              ")");
    if (num_ids_ && uint64_t(ids[places[i]]) >= uint64_t(num_ids_))
      throw std::out_of_range("id " + std::to_string(ids[places[i]]) + " is out of range [0, " +
                              std::to_string(num_ids_) + ")");
  }
}

void SlotMap::begin() {
  const auto held = alone_.change();
  ++round_;
  num_passed_ = 0;
  num_needed_ = 0;
}

int64_t SlotMap::size() const {
  const auto held = alone_.read();
  return int64_t(slots_.size());
}

int64_t SlotMap::num_needed() const {
  const auto held = alone_.read();
  return num_needed_;
}

Buffer SlotMap::copy_ids() const {
  const auto held = alone_.read();
  Buffer out(slots_.size() * 8);
  for (size_t slot = 0; slot < slots_.size(); ++slot) out.as<int64_t>()[slot] = slots_[slot].id;
  return out;
}

// Returns where the search for an id begins.
size_t SlotMap::begin_of(int64_t id) const {
  return num_ids_ ? size_t(id) : mix(0, uint64_t(id)) & (hashed_.size() - 1);
}

size_t SlotMap::entry_from(size_t entry, int64_t id) const {
  if (num_ids_) return entry;
  const size_t mask = hashed_.size() - 1;
  while (entries_[entry] && slots_[size_t(entries_[entry]) - 1].id != id) entry = (entry + 1) & mask;
  return entry;
}

// Returns where the search for each of some ids begins, and prefetches the lines that it reads.
template <typename At>
void SlotMap::locate(const int64_t* ids, At place, int64_t size, size_t* at) const {
  for (int64_t i = 0; i < size; ++i) {
    at[i] = begin_of(ids[place(i)]);
    __builtin_prefetch(&entries_[at[i]]);
  }
  for (int64_t i = 0; i < size; ++i)
    if (entries_[at[i]]) __builtin_prefetch(&slots_[size_t(entries_[at[i]]) - 1], 1);
}

// At most half of the entries are in use, including stale ones.
void SlotMap::reserve(size_t more) {
  if (slots_.size() + more > size_t(INT32_MAX)) throw std::length_error("a map holds at most 2^31 ids");
  if (num_ids_ || (num_entries_ + more) * 2 <= hashed_.size()) return;
  hashed_.assign(std::bit_ceil((slots_.size() + more) * 3), 0);
  entries_ = hashed_.data();
  for (size_t slot = 0; slot < slots_.size(); ++slot)
    entries_[entry_from(begin_of(slots_[slot].id), slots_[slot].id)] = int32_t(slot) + 1;
  num_entries_ = slots_.size();
}

// Returns a slot that no round needs (each is passed once per round), else a new one.
int32_t SlotMap::free_slot() {
  for (const size_t size = slots_.size(); num_passed_ < size; ++num_passed_) {
    hand_ = hand_ + 1 < size ? hand_ + 1 : 0;
    if (slots_[hand_].round >= round_ - 1) continue;
    if (num_ids_) entries_[slots_[hand_].id] = 0;
    return int32_t(hand_);
  }
  slots_.push_back({});
  ++num_passed_;
  return int32_t(slots_.size()) - 1;
}

void SlotMap::need(int32_t slot) {
  num_needed_ += slots_[size_t(slot)].round != round_;
  slots_[size_t(slot)].round = round_;
}

SlotMap::Found SlotMap::find(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) {
  const auto held = alone_.change();
  check(ids, num_ids, places, count);
  Found found{Buffer(size_t(num_ids) * 8), Buffer(size_t(count) * 8)};
  int64_t *slots = found.slots.as<int64_t>(), *misses = found.misses.as<int64_t>();
  int64_t num_misses = 0;
  size_t at[kGroup];
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t size = std::min(kGroup, count - begin);
    const auto place = [&](int64_t i) { return places[begin + i]; };
    locate(ids, place, size, at);
    for (int64_t i = 0; i < size; ++i) {
      const int32_t slot = entries_[entry_from(at[i], ids[place(i)])] - 1;
      if (slot < 0) misses[num_misses++] = place(i);
      else slots[place(i)] = slot, need(slot);
    }
  }
  found.misses.trim(size_t(num_misses) * 8);
  return found;
}

Buffer SlotMap::add(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, int64_t* slots) {
  const auto held = alone_.change();
  check(ids, num_ids, places, count);
  Buffer given(size_t(count) * 8);
  int64_t num_given = 0;
  size_t at[kGroup];
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t size = std::min(kGroup, count - begin);
    const auto place = [&](int64_t i) { return places[begin + i]; };
    reserve(size_t(size));
    locate(ids, place, size, at);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t id = ids[place(i)];
      const size_t entry = entry_from(at[i], id);
      int32_t slot = entries_[entry] - 1;
      if (slot < 0) {
        slot = free_slot();
        slots_[size_t(slot)].id = id;
        entries_[entry] = slot + 1;
        ++num_entries_;
        given.as<int64_t>()[num_given++] = slot;
      }
      need(slot);
      slots[place(i)] = slot;
    }
  }
  given.trim(size_t(num_given) * 8);
  return given;
}

}  // namespace hoploom
