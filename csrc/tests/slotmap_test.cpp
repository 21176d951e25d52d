// SlotMap against a list of slots that is searched from its beginning.
#include "../slotmap.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

struct Round {
  std::vector<int64_t> slots, given;
};

// One round that needs these ids, all of them.
Round needed(SlotMap& map, const std::vector<int64_t>& ids) {
  const std::vector<int64_t> places = counting(int64_t(ids.size()));
  const auto count = int64_t(ids.size());
  map.begin();
  const SlotMap::Found found = map.find(ids.data(), count, places.data(), count);
  const auto misses = values_of<int64_t>(found.misses);
  const Buffer given = map.add(ids.data(), count, misses.data(), int64_t(misses.size()), found.slots.as<int64_t>());
  return {values_of<int64_t>(found.slots), values_of<int64_t>(given)};
}

void check_rounds(SlotMap map, bool any_ids) {
  std::unordered_map<int64_t, int64_t> slot_of;  // of the round before
  std::vector<int64_t> table;                    // what stands in each slot
  size_t most = 0;
  for (uint64_t round = 0; round < 60; ++round) {
    // The ends of the range of ids are among them; the range moves, so that ids leave and come back.
    std::vector<int64_t> ids = scattered(400 + int64_t(round % 7) * 30, 900, round);
    for (int64_t& id : ids) id += int64_t(round % 5) * 200;
    if (any_ids && round % 3 == 0) ids[0] = INT64_MIN, ids[1] = INT64_MAX, ids[2] = -1;
    const Round found = needed(map, ids);
    table.resize(size_t(map.size()), 0);
    const auto by_slot = values_of<int64_t>(map.copy_ids());
    std::unordered_map<int64_t, int64_t> now;
    for (size_t i = 0; i < ids.size(); ++i) {
      const int64_t slot = found.slots[i];
      CHECK_EQUAL(by_slot[size_t(slot)], ids[i]);
      const auto [known, is_new] = now.emplace(ids[i], slot);
      CHECK_EQUAL(known->second, slot);
      if (is_new && slot_of.contains(ids[i])) CHECK_EQUAL(slot_of[ids[i]], slot);
    }
    CHECK_EQUAL(map.num_needed(), int64_t(now.size()));
    // No slot is given twice, and none that either round needs.
    std::unordered_set<int64_t> given(found.given.begin(), found.given.end()), kept;
    CHECK_EQUAL(given.size(), found.given.size());
    for (const auto& [id, slot] : slot_of) CHECK(!given.contains(slot));
    for (int64_t slot : found.given) table[size_t(slot)] = by_slot[size_t(slot)];
    for (const auto& [id, slot] : now) CHECK_EQUAL(table[size_t(slot)], id);  // it was written once, and stays
    for (const auto& [id, slot] : slot_of) CHECK_EQUAL(table[size_t(slot)], id);
    std::unordered_set<int64_t> both;
    for (const auto& [id, slot] : slot_of) both.insert(id);
    for (const auto& [id, slot] : now) both.insert(id);
    most = std::max(most, both.size());
    CHECK_EQUAL(size_t(map.size()), most);  // no more than two rounds ever needed
    slot_of = now;
  }
}

}  // namespace

TEST(every_id_of_two_rounds_keeps_its_slot_and_what_is_new_takes_a_free_one) {
  check_rounds(SlotMap(0), true);
  check_rounds(SlotMap(2000), false);
}

TEST(ids_beyond_those_that_a_map_is_for_are_refused) {
  CHECK_THROWS(SlotMap(-1));
  CHECK_THROWS(SlotMap(int64_t(1) << 31));
  SlotMap map(10);
  const int64_t place = 0;
  int64_t slot;
  for (int64_t bad : {int64_t(-1), int64_t(10), INT64_MIN, INT64_MAX}) {
    CHECK_THROWS(map.find(&bad, 1, &place, 1));
    CHECK_THROWS(map.add(&bad, 1, &place, 1, &slot));
  }
}

TEST(a_row_stays_after_its_two_rounds_until_its_slot_is_wanted) {
  SlotMap map(0);
  CHECK_EQUAL(needed(map, {7, 8, 9}).given, (std::vector<int64_t>{0, 1, 2}));
  for (int round = 0; round < 4; ++round) CHECK(needed(map, {}).given.empty());
  CHECK(needed(map, {9, 7, 9}).given.empty());
  const Round found = needed(map, {10});
  CHECK_EQUAL(found.given, (std::vector<int64_t>{1}));             // that of 8
  CHECK_EQUAL(needed(map, {8}).slots, (std::vector<int64_t>{2}));  // 9 was needed two rounds ago
}

TEST(none_is_given_away_that_a_later_look_up_of_the_round_finds) {
  SlotMap map(0);
  needed(map, {1});
  needed(map, {});
  needed(map, {});
  const std::vector<int64_t> first = {2}, second = {1}, place = {0};
  map.begin();
  const SlotMap::Found missed = map.find(first.data(), 1, place.data(), 1);
  const SlotMap::Found found = map.find(second.data(), 1, place.data(), 1);
  CHECK_EQUAL(found.misses.size(), size_t(0));
  const Buffer given = map.add(first.data(), 1, place.data(), 1, missed.slots.as<int64_t>());
  CHECK_EQUAL(values_of<int64_t>(given), (std::vector<int64_t>{1}));
}

TEST(only_the_ids_at_the_places_get_a_slot) {
  SlotMap map(0);
  const std::vector<int64_t> ids = {10, 11, 12, 13, 11}, places = {4, 2, 1};
  std::vector<int64_t> slots(5, -1);
  map.begin();
  CHECK_EQUAL(values_of<int64_t>(map.add(ids.data(), 5, places.data(), 3, slots.data())), (std::vector<int64_t>{0, 1}));
  CHECK_EQUAL(slots, (std::vector<int64_t>{-1, 0, 1, -1, 0}));
  for (int64_t bad : {int64_t(-1), int64_t(5)}) {
    CHECK_THROWS(map.find(ids.data(), 5, &bad, 1));
    CHECK_THROWS(map.add(ids.data(), 5, &bad, 1, slots.data()));
  }
}
