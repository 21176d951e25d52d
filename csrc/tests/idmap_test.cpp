// IdMap against std::unordered_map.
#include "../idmap.h"

#include <thread>
#include <unordered_map>

#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

std::vector<int64_t> listed(const Buffer& buffer) {
  return {buffer.as<int64_t>(), buffer.as<int64_t>() + buffer.size() / 8};
}

using Numbers = std::unordered_map<int64_t, int64_t>;

void check_found(const IdMap& map, const Numbers& numbers, const std::vector<int64_t>& ids) {
  const IdMap::Found found = map.find(ids.data(), int64_t(ids.size()), nullptr, int64_t(ids.size()));
  std::vector<int64_t> hits, misses;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto known = numbers.find(ids[i]);
    (known == numbers.end() ? misses : hits).push_back(int64_t(i));
    if (known != numbers.end()) CHECK_EQUAL(found.slots.as<int64_t>()[i], known->second);
  }
  CHECK_EQUAL(listed(found.hits), hits);
  CHECK_EQUAL(listed(found.misses), misses);
}

}  // namespace

TEST(ids_are_numbered_in_the_order_in_which_they_came) {
  for (int64_t count : {0, 1, 2, 31, 33, 5000}) {
    IdMap map;
    Numbers numbers;
    std::vector<int64_t> order;
    check_found(map, numbers, {0, 1, -1});
    for (uint64_t salt : {1, 2}) {  // the second half grows what the first has filled
      std::vector<int64_t> ids = scattered(count, count * 2 + 1, salt);
      if (count > 2) ids[1] = INT64_MIN, ids[2] = INT64_MAX;
      for (int64_t id : ids)
        if (numbers.emplace(id, int64_t(numbers.size())).second) order.push_back(id);
      map.add(ids.data(), count, nullptr, count);
      CHECK_EQUAL(map.size(), int64_t(numbers.size()));
      CHECK_EQUAL(values_of<int64_t>(map.copy_ids()), order);
      check_found(map, numbers, scattered(count + 40, count * 3 + 1, salt + 7));
    }
  }
}

TEST(only_the_ids_at_the_places_are_added_and_looked_up) {
  const std::vector<int64_t> ids = {10, 11, 12, 13, 11}, places = {4, 2, 1};
  IdMap map;
  map.add(ids.data(), 5, places.data(), 3);
  CHECK_EQUAL(values_of<int64_t>(map.copy_ids()), (std::vector<int64_t>{11, 12}));
  const std::vector<int64_t> asked = {3, 1};
  const IdMap::Found found = map.find(ids.data(), 5, asked.data(), 2);
  CHECK_EQUAL(listed(found.hits), (std::vector<int64_t>{1}));
  CHECK_EQUAL(listed(found.misses), (std::vector<int64_t>{3}));
  CHECK_EQUAL(found.slots.as<int64_t>()[1], int64_t(0));
  for (int64_t bad : {int64_t(-1), int64_t(5)}) {
    CHECK_THROWS(map.add(ids.data(), 5, &bad, 1));
    CHECK_THROWS(map.find(ids.data(), 5, &bad, 1));
  }
}

TEST(a_reserved_map_takes_at_most_24_bytes_per_id) {
  IdMap map;
  map.reserve(100000);
  const std::vector<int64_t> ids = counting(100000);
  map.add(ids.data(), 100000, nullptr, 100000);
  CHECK(map.bytes() <= 24 * 100000);
  CHECK_THROWS(map.reserve(-1));
  CHECK_THROWS(map.reserve(int64_t(1) << 31));
}

TEST(many_threads_look_up_at_once) {
  IdMap map;
  Numbers numbers;
  const std::vector<int64_t> ids = scattered(2000, 1 << 30, 5);
  for (int64_t id : ids) numbers.emplace(id, int64_t(numbers.size()));
  map.add(ids.data(), 2000, nullptr, 2000);
  std::vector<std::thread> threads;
  for (uint64_t salt = 0; salt < 4; ++salt)
    threads.emplace_back([&map, &numbers, salt] { check_found(map, numbers, scattered(3000, 1 << 30, salt + 4)); });
  for (std::thread& thread : threads) thread.join();
}
