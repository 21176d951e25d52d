// IdRanks against a search in the list of ids.
#include "../idranks.h"

#include <algorithm>

#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

void check_found(const std::vector<int64_t>& held, const std::vector<int64_t>& ids, bool with_places) {
  const IdRanks ranks(held.data(), int64_t(held.size()));
  CHECK_EQUAL(values_of<int64_t>(ranks.copy_ids()), held);
  std::vector<int64_t> places, hits, misses;
  for (size_t i = 0; i < ids.size(); i += with_places ? 2 : 1) places.push_back(int64_t(ids.size() - 1 - i));
  if (!with_places) places = counting(int64_t(ids.size()));
  const auto found =
      ranks.find(ids.data(), int64_t(ids.size()), with_places ? places.data() : nullptr, int64_t(places.size()));
  for (int64_t place : places) {
    const auto at = std::lower_bound(held.begin(), held.end(), ids[size_t(place)]);
    const bool is_hit = at != held.end() && *at == ids[size_t(place)];
    (is_hit ? hits : misses).push_back(place);
    if (is_hit) CHECK_EQUAL(found.slots.as<int64_t>()[place], int64_t(at - held.begin()));
  }
  CHECK_EQUAL(values_of<int64_t>(found.hits), hits);
  CHECK_EQUAL(values_of<int64_t>(found.misses), misses);
}

}  // namespace

TEST(ascending_ids_are_found_by_their_rank) {
  for (int64_t first : {int64_t(0), int64_t(-5), int64_t(63), int64_t(1) << 40, INT64_MIN, INT64_MAX - 3000})
    for (int64_t count : {0, 1, 2, 63, 64, 65, 1000}) {
      std::vector<int64_t> held = scattered(count, 2000, uint64_t(count)), ids = scattered(500, 2600, 3);
      for (int64_t& id : held) id += first;
      for (int64_t& id : ids)
        id = int64_t(uint64_t(first) + uint64_t(id) - 300);  // below the first and beyond the last
      std::sort(held.begin(), held.end());
      held.erase(std::unique(held.begin(), held.end()), held.end());
      ids[7] = INT64_MIN, ids[8] = INT64_MAX;
      for (bool with_places : {false, true}) check_found(held, ids, with_places);
    }
}

TEST(ids_that_do_not_ascend_or_lie_too_far_apart_are_refused) {
  for (const std::vector<int64_t>& ids : {std::vector<int64_t>{2, 2}, {3, 2}, {INT64_MIN, INT64_MAX}})
    CHECK_THROWS(IdRanks(ids.data(), 2));
  const std::vector<int64_t> ids = {1, 5};
  for (int64_t bad : {int64_t(-1), int64_t(2)}) CHECK_THROWS(IdRanks(ids.data(), 2).find(ids.data(), 2, &bad, 1));
}

TEST(ranks_take_two_bits_for_each_id_of_their_range) {
  const std::vector<int64_t> ids = {1000, 1000 + 6400 - 1};
  CHECK_EQUAL(IdRanks(ids.data(), 2).bytes(), int64_t(6400 * 2 / 8));
  CHECK_EQUAL(IdRanks::bytes_of(1000, 1000 + 6400 - 1), int64_t(6400 * 2 / 8));
  CHECK_EQUAL(IdRanks::bytes_of(0, -1), int64_t(0));
}
