// gather, route, scatter and edge_rows.
#include <algorithm>
#include <cstring>
#include <utility>

#include "../gather.h"
#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

using Bytes = std::vector<uint8_t>;

// Byte k of row v is a hash of (v, k).
uint8_t byte_at(int64_t row, int64_t at) { return uint8_t(mix(uint64_t(row), uint64_t(at)) >> 56); }

Bytes table_of(int64_t num_rows, int64_t row_bytes, int64_t first = 0) {
  Bytes table;
  for (int64_t v = 0; v < num_rows; ++v)
    for (int64_t k = 0; k < row_bytes; ++k) table.push_back(byte_at(first + v, k));
  return table;
}

// `shift` misaligns the output.
void check_gather(int64_t num_rows, int64_t row_bytes, int64_t count, int64_t first, size_t shift) {
  const Bytes table = table_of(num_rows, row_bytes, first);
  std::vector<int64_t> ids = scattered(count, num_rows, uint64_t(count));
  for (int64_t& id : ids) id += first;
  if (count > 1) ids.front() = first, ids.back() = first + num_rows - 1;
  Buffer out(size_t(count * row_bytes) + shift + 1);
  uint8_t* begin = out.as<uint8_t>() + shift;
  begin[count * row_bytes] = 77;
  gather(table.data(), num_rows, row_bytes, ids.data(), count, first, begin);
  for (size_t i = 0; row_bytes && i < ids.size(); ++i)
    CHECK_EQUAL(
        std::memcmp(begin + int64_t(i) * row_bytes, table.data() + (ids[i] - first) * row_bytes, size_t(row_bytes)), 0);
  CHECK_EQUAL(int(begin[count * row_bytes]), 77);
}

const std::vector<int64_t> kRowBytes = {0, 1, 2, 3, 4, 5, 8, 12, 15, 16, 17, 32, 48, 63, 64, 65, 400};

}  // namespace

TEST(gathered_rows_are_the_rows_of_the_table) {
  for (int64_t row_bytes : kRowBytes)
    for (int64_t count : {0, 1, 2, 31, 32, 33, 34, 200})
      for (int64_t first : {int64_t(0), int64_t(1) << 40}) check_gather(100, row_bytes, count, first, 0);
}

TEST(the_output_need_not_be_aligned) {
  for (int64_t row_bytes : kRowBytes)
    for (size_t shift : {1u, 4u, 8u}) check_gather(100, row_bytes, 50, 0, shift);
}

// Four megabytes and more: beyond the first caches, and where an output may be treated apart.
TEST(large_outputs_hold_the_rows_of_the_table) {
  constexpr int64_t kBytes = int64_t(4) << 20;
  for (int64_t row_bytes : {3, 8, 16, 17, 48, 400}) check_gather(1000, row_bytes, kBytes / row_bytes + 2, 0, 0);
  for (int64_t count : {kBytes / 16 - 1, kBytes / 16}) check_gather(1000, 16, count, 0, 0);
  check_gather(1000, 400, kBytes / 400 + 2, 0, 4);
}

TEST(rows_wider_than_what_is_requested_ahead_are_gathered) {
  check_gather(5, 10000, 40, 0, 0);
  check_gather(1, 2 << 20, 3, 0, 0);
}

TEST(an_id_out_of_range_throws_before_anything_is_written) {
  const int64_t first = 1000;
  for (int64_t row_bytes : kRowBytes)
    for (int64_t bad : {int64_t(999), int64_t(1100), int64_t(-1), INT64_MAX, INT64_MIN}) {
      const Bytes table = table_of(100, row_bytes, first);
      std::vector<int64_t> ids(50, first);
      ids[49] = bad;
      Bytes out(size_t(50 * row_bytes), 9);
      const std::string message =
          thrown_by([&] { gather(table.data(), 100, row_bytes, ids.data(), 50, first, out.data()); });
      CHECK(message.find(std::to_string(bad)) != std::string::npos);
      CHECK_EQUAL(out, Bytes(size_t(50 * row_bytes), 9));
    }
}

TEST(rows_are_gathered_to_where_they_belong_and_nowhere_else) {
  constexpr int64_t kFirst = 1000, kIds = 200;
  for (int64_t row_bytes : kRowBytes) {
    const Bytes table = table_of(100, row_bytes, kFirst);
    std::vector<int64_t> ids = scattered(kIds, 100, 3), places;
    for (int64_t& id : ids) id += kFirst;
    for (int64_t i = 0; i < kIds; ++i) {
      if (i % 3 == 1) places.push_back(kIds - 1 - i);
      else ids[size_t(kIds - 1 - i)] = -1;  // of another part: never read
    }
    Bytes out(size_t(kIds * row_bytes), 9), expected = out;
    for (int64_t place : places)
      for (int64_t k = 0; k < row_bytes; ++k) expected[size_t(place * row_bytes + k)] = byte_at(ids[size_t(place)], k);
    const auto gathered = [&] {
      gather_at(table.data(), 100, row_bytes, ids.data(), kIds, places.data(), int64_t(places.size()), kFirst,
                out.data());
    };
    gathered();
    CHECK_EQUAL(out, expected);
    for (int64_t bad : {int64_t(-1), kIds, INT64_MAX, INT64_MIN}) {
      const int64_t sound = std::exchange(places[5], bad);
      CHECK(thrown_by(gathered).find(std::to_string(bad)) != std::string::npos);
      places[5] = sound;
    }
    ids[size_t(places[5])] = 999;
    CHECK(thrown_by(gathered).find("999") != std::string::npos);
    CHECK_EQUAL(out, expected);
  }
}

TEST(every_id_is_routed_to_the_part_whose_range_it_is_in) {
  for (int64_t num_bounds : {0, 1, 2, 7, 16, 17, 255, 256, 300}) {
    std::vector<int64_t> bounds, ids = scattered(1000, 700, uint64_t(num_bounds)), chosen;
    for (int64_t b = 0; b < num_bounds; ++b) bounds.push_back(b * 600 / num_bounds + (b % 3 == 0));
    std::sort(bounds.begin(), bounds.end());
    ids[3] = INT64_MIN, ids[4] = INT64_MAX;
    for (int64_t i = 0; i < 1000; i += 2) chosen.push_back(999 - i);
    for (bool some : {false, true}) {
      const int64_t count = some ? int64_t(chosen.size()) : 1000;
      std::vector<int64_t> routed(size_t(count), -1), counts(size_t(num_bounds) + 1, -1), expected;
      if (some)
        route_at(ids.data(), 1000, chosen.data(), count, bounds.data(), num_bounds, routed.data(), counts.data());
      else route(ids.data(), count, bounds.data(), num_bounds, routed.data(), counts.data());
      for (int64_t part = 0; part <= num_bounds; ++part) {
        const size_t before = expected.size();
        for (int64_t i = 0; i < count; ++i) {
          const int64_t place = some ? chosen[size_t(i)] : i, id = ids[size_t(place)];
          const bool after = part == 0 || id >= bounds[size_t(part) - 1];
          if (after && (part == num_bounds || id < bounds[size_t(part)])) expected.push_back(place);
        }
        CHECK_EQUAL(counts[size_t(part)], int64_t(expected.size() - before));
      }
      CHECK_EQUAL(routed, expected);
    }
  }
}

TEST(bounds_that_descend_and_places_that_are_not_there_are_refused) {
  const std::vector<int64_t> ids = {1, 2}, bounds = {5, 4}, places = {0, 2};
  std::vector<int64_t> routed(2), counts(3);
  CHECK_THROWS(route(ids.data(), 2, bounds.data(), 2, routed.data(), counts.data()));
  CHECK_THROWS(route_at(ids.data(), 2, places.data(), 2, bounds.data(), 1, routed.data(), counts.data()));
}

TEST(scatter_undoes_gather) {
  for (int64_t row_bytes : {1, 3, 8, 16, 400}) {
    const Bytes table = table_of(64, row_bytes);
    std::vector<int64_t> places = counting(64);
    for (int64_t& place : places) place = place * 29 % 64;
    Bytes rows(table.size()), out(table.size());
    gather(table.data(), 64, row_bytes, places.data(), 64, 0, rows.data());
    scatter(rows.data(), row_bytes, places.data(), 64, 64, out.data());
    CHECK_EQUAL(out, table);
  }
}

TEST(scatter_leaves_other_places_alone_and_rejects_bad_ones) {
  const Bytes rows = {1, 2, 3, 4};
  Bytes out(10, 0);
  const std::vector<int64_t> places = {4, 1};
  scatter(rows.data(), 2, places.data(), 2, 5, out.data());
  CHECK_EQUAL(out, (Bytes{0, 0, 3, 4, 0, 0, 0, 0, 1, 2}));
  for (int64_t bad : {int64_t(-1), int64_t(5), INT64_MAX, INT64_MIN}) {
    const std::vector<int64_t> damaged = {0, bad};
    CHECK_THROWS(scatter(rows.data(), 2, damaged.data(), 2, 5, out.data()));
  }
  CHECK_EQUAL(out, (Bytes{0, 0, 3, 4, 0, 0, 0, 0, 1, 2}));
}

TEST(edge_rows_repeats_each_place_as_often_as_it_picked) {
  const std::vector<int32_t> local = {5, 6, 7, 8};
  const std::vector<int64_t> counts = {1, 0, 3};
  std::vector<int64_t> sources(4), destinations(4);
  edge_rows(local.data(), 4, counts.data(), 3, 10, sources.data(), destinations.data());
  CHECK_EQUAL(sources, (std::vector<int64_t>{5, 6, 7, 8}));
  CHECK_EQUAL(destinations, (std::vector<int64_t>{10, 12, 12, 12}));
}

TEST(edge_rows_rejects_counts_that_do_not_sum_to_the_picks) {
  const std::vector<int32_t> local = {5, 6, 7};
  std::vector<int64_t> sources(3), destinations(3);
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{1, 1}, {4}, {2, 2}, {-1, 4}, {INT64_MAX, 1}, {INT64_MIN}, {}})
    CHECK_THROWS(
        edge_rows(local.data(), 3, counts.data(), int64_t(counts.size()), 0, sources.data(), destinations.data()));
}
