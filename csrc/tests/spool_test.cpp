// Records by bucket against plain sorts, and what must be refused.
#include "../spool.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "check.h"
#include "graphs.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

struct Edge {
  int64_t key, source, time;
  uint32_t field, position;
};

std::vector<Edge> edges_of(int64_t count, int64_t num_keys) {
  const auto keys = scattered(count, num_keys, 1), sources = scattered(count, 9, 2), times = scattered(count, 4, 3),
             fields = scattered(count, 3, 4);
  std::vector<Edge> edges;
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = size_t(i);
    edges.push_back({keys[at], sources[at], times[at], uint32_t(fields[at]), uint32_t(i)});
  }
  return edges;
}

// key | source (4 or 8 bytes) | time, where wanted | field
std::vector<uint8_t> records_of(const std::vector<Edge>& edges, int64_t source_bytes, bool timed) {
  std::vector<uint8_t> bytes;
  const auto append = [&](const auto& value, size_t size) {
    const auto* raw = reinterpret_cast<const uint8_t*>(&value);
    bytes.insert(bytes.end(), raw, raw + size);
  };
  for (const Edge& edge : edges) {
    append(uint32_t(edge.key), 4);
    append(edge.source, size_t(source_bytes));
    if (timed) append(edge.time, 8);
    append(edge.field, 4);
  }
  return bytes;
}

std::vector<Edge> expected(std::vector<Edge> edges, const EdgeOrder& how) {
  std::stable_sort(edges.begin(), edges.end(), [&](const Edge& a, const Edge& b) {
    if (a.key != b.key) return a.key < b.key;
    if (how.time_offset >= 0 && a.time != b.time) return a.time < b.time;
    return how.canonical && std::tie(a.source, a.field) < std::tie(b.source, b.field);
  });
  if (!how.deduplicate) return edges;
  std::vector<Edge> kept;
  for (const Edge& edge : edges)
    if (std::none_of(kept.begin(), kept.end(),
                     [&](const Edge& before) { return before.key == edge.key && before.source == edge.source; }))
      kept.push_back(edge);
  return kept;
}

void check_order(int64_t count, int64_t num_keys, const EdgeOrder& how, int threads) {
  const auto edges = edges_of(count, num_keys);
  const auto bytes = records_of(edges, how.source_bytes, how.time_offset >= 0);
  const int64_t width = 8 + how.source_bytes + (how.time_offset >= 0 ? 8 : 0);
  const Records records{bytes.data(), count, width};
  std::vector<int64_t> indptr(size_t(num_keys) + 1);
  std::vector<uint32_t> order(static_cast<size_t>(count));
  const int64_t kept = order_edges(records, num_keys, how, threads, indptr.data(), order.data());
  const auto wanted = expected(edges, how);
  CHECK_EQUAL(kept, int64_t(wanted.size()));
  CHECK_EQUAL(indptr.back(), kept);
  std::vector<uint8_t> sources(size_t(kept * how.source_bytes)), fields(size_t(kept) * 4);
  take(records, order.data(), kept, 4, how.source_bytes, sources.data());
  take(records, order.data(), kept, width - 4, 4, fields.data());
  for (size_t i = 0; i < wanted.size(); ++i) {
    CHECK(indptr[size_t(wanted[i].key)] <= int64_t(i) && int64_t(i) < indptr[size_t(wanted[i].key) + 1]);
    CHECK(std::memcmp(&sources[i * size_t(how.source_bytes)], &wanted[i].source, size_t(how.source_bytes)) == 0);
    CHECK(std::memcmp(&fields[i * 4], &wanted[i].field, 4) == 0);
    if (!how.canonical) CHECK_EQUAL(order[i], wanted[i].position);
  }
}

}  // namespace

TEST(edges_in_order_equal_a_stable_sort) {
  for (int64_t source_bytes : {4, 8})
    for (bool timed : {false, true})
      for (bool canonical : {false, true})
        for (bool deduplicate : {false, true})
          for (int64_t count : {0, 1, 7, 300})
            check_order(count, 5, {source_bytes, timed ? 4 + source_bytes : -1, canonical, deduplicate}, 2);
}

TEST(edges_in_order_are_the_same_for_every_number_of_threads) {
  for (int threads : {1, 2, 3, 100}) check_order(70000, 5000, {4, -1, true, false}, threads);
}

TEST(rows_are_packed_by_bucket_in_the_order_they_came) {
  const std::vector<int64_t> bounds{10, 10, 13, 5000, 5000, 90000};
  auto keys = scattered(4000, 89990, 7);
  for (int64_t& key : keys) key += 10;
  const auto values = scattered(4000, 1 << 30, 8);
  std::vector<uint8_t> bytes(4000 * 12);
  std::vector<int64_t> counts(5), seen(5);
  pack(keys.data(), 4000, {{reinterpret_cast<const uint8_t*>(values.data()), 8, 4}}, 12, bounds.data(), 5, bytes.data(),
       counts.data());
  const uint8_t* record = bytes.data();
  for (size_t bucket = 0; bucket < 5; ++bucket)
    for (size_t i = 0; i < keys.size(); ++i)
      if (bounds[bucket] <= keys[i] && keys[i] < bounds[bucket + 1]) {
        const uint32_t local = uint32_t(keys[i] - bounds[bucket]);
        CHECK(std::memcmp(record, &local, 4) == 0 && std::memcmp(record + 4, &values[i], 8) == 0);
        record += 12;
        ++seen[bucket];
      }
  CHECK_EQUAL(counts, seen);
  CHECK_EQUAL(record - bytes.data(), int64_t(4000 * 12));
}

TEST(a_key_outside_all_buckets_throws) {
  const std::vector<int64_t> bounds{5, 8, INT64_MAX};
  std::vector<uint8_t> record(4);
  std::vector<int64_t> counts(2);
  for (int64_t key : {int64_t(4), int64_t(-1), INT64_MIN, INT64_MAX})
    CHECK_THROWS(pack(&key, 1, {}, 4, bounds.data(), 2, record.data(), counts.data()));
}

TEST(rows_are_placed_by_key_and_every_key_must_come_once) {
  std::vector<Edge> edges{{2, 20, 0, 0, 0}, {0, 0, 0, 0, 1}, {1, 10, 0, 0, 2}};
  std::vector<int64_t> out(3);
  const auto placed = [&](int64_t num_keys) {
    const auto bytes = records_of(edges, 8, false);
    place({bytes.data(), int64_t(edges.size()), 16}, num_keys, 4, 8, reinterpret_cast<uint8_t*>(out.data()));
  };
  placed(3);
  CHECK_EQUAL(out, (std::vector<int64_t>{0, 10, 20}));
  CHECK_THROWS(placed(2));
  CHECK_THROWS(placed(4));
  edges[1].key = 2;
  CHECK_THROWS(placed(3));
  edges[1].key = 3;
  CHECK_THROWS(placed(3));
}

TEST(records_of_no_list_throw) {
  const auto bytes = records_of({{5, 0, 0, 0, 0}}, 4, false);
  std::vector<int64_t> indptr(6);
  uint32_t order = 7;
  CHECK_THROWS(order_edges({bytes.data(), 1, 12}, 5, {4, -1, true, false}, 1, indptr.data(), &order));
  uint8_t out[4];
  CHECK_THROWS(take({bytes.data(), 1, 12}, &order, 1, 4, 4, out));
}
