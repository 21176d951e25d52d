// Row gathers at memory speed: cache lines are prefetched some rows ahead, into the second-level cache.
// Non-temporal stores were slower here: they share their buffers with the reads in flight.
#include "gather.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffers.h"
#include "processor.h"

namespace hoploom {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kAheadBytes = 9600;  // how far ahead of the copy to prefetch

HOPLOOM_INLINE bool is_outside(int64_t id, int64_t first, int64_t num_rows) {
  return uint64_t(id) - uint64_t(first) >= uint64_t(num_rows);
}

[[noreturn]] void refuse(int64_t id, int64_t first, int64_t num_rows) {
  throw std::out_of_range("id " + std::to_string(id) + " is out of range [" + std::to_string(first) + ", " +
                          std::to_string(first + num_rows) + ")");
}

void check_ids_at(const int64_t* ids, const int64_t* places, int64_t count, int64_t first, int64_t num_rows) {
  for (int64_t i = 0; i < count; ++i)
    if (is_outside(ids[places[i]], first, num_rows)) refuse(ids[places[i]], first, num_rows);
}

// Returns the index of the i-th id, and of its row in the output: i, or places[i].
struct Everywhere {
  int64_t operator[](int64_t i) const { return i; }
};

template <int64_t kBytes, typename Places>
void gather_small(const uint8_t* table, const int64_t* ids, Places places, int64_t count, int64_t first, uint8_t* out) {
  constexpr int64_t kAhead = 32;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(table + (ids[places[i + kAhead]] - first) * kBytes, 0, 0);
    std::memcpy(out + places[i] * kBytes, table + (ids[places[i]] - first) * kBytes, kBytes);
  }
}

// Copies one row, 64 bytes at a time; the last piece overlaps the one before it.
HOPLOOM_INLINE void copy_row(uint8_t* out, const uint8_t* row, int64_t bytes) {
  if (bytes < kLine) {
    std::memcpy(out, row, size_t(bytes));
    return;
  }
  for (int64_t at = 0; at + kLine <= bytes; at += kLine) std::memcpy(out + at, row + at, kLine);
  if (bytes % kLine) std::memcpy(out + bytes - kLine, row + bytes - kLine, kLine);
}

template <typename Places>
HOPLOOM_INLINE void copy_rows(const uint8_t* table, int64_t row_bytes, const int64_t* ids, Places places, int64_t count,
                              int64_t first, uint8_t* out) {
  const int64_t ahead = std::clamp<int64_t>(kAheadBytes / row_bytes, 2, 32);
  for (int64_t i = 0; i < std::min(ahead, count); ++i) request(table + (ids[places[i]] - first) * row_bytes, row_bytes);
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count) request(table + (ids[places[i + ahead]] - first) * row_bytes, row_bytes);
    copy_row(out + places[i] * row_bytes, table + (ids[places[i]] - first) * row_bytes, row_bytes);
  }
}

template <typename Places>
void gather_any(const uint8_t* table, int64_t row_bytes, const int64_t* ids, Places places, int64_t count,
                int64_t first, uint8_t* out) {
  switch (row_bytes) {
    case 0:
      return;
    case 1:
      return gather_small<1>(table, ids, places, count, first, out);
    case 2:
      return gather_small<2>(table, ids, places, count, first, out);
    case 4:
      return gather_small<4>(table, ids, places, count, first, out);
    case 8:
      return gather_small<8>(table, ids, places, count, first, out);
    default:
      return run_fastest<copy_rows<Places>>(table, row_bytes, ids, places, count, first, out);
  }
}

// Returns how many bounds are at most an id. A few bounds are compared in a loop of known length.
HOPLOOM_INLINE int64_t part_of(int64_t id, const int64_t* bounds, int64_t num_bounds) {
  if (num_bounds > 16) return std::upper_bound(bounds, bounds + num_bounds, id) - bounds;
  int64_t part = 0;
  for (int64_t b = 0; b < num_bounds; ++b) part += id >= bounds[b];
  return part;
}

// A counting sort. Parts that fit a byte are kept between its two passes.
template <typename Places>
void route_any(const int64_t* ids, Places places, int64_t count, const int64_t* bounds, int64_t num_bounds,
               int64_t* routed, int64_t* counts) {
  if (!std::is_sorted(bounds, bounds + num_bounds)) throw std::invalid_argument("bounds must ascend");
  std::fill_n(counts, num_bounds + 1, 0);
  if (num_bounds == 0) {
    for (int64_t i = 0; i < count; ++i) routed[i] = places[i];
    counts[0] = count;
    return;
  }
  const bool kept = num_bounds < 256;
  const Buffer parts(kept ? size_t(count) : 0);
  uint8_t* part = parts.as<uint8_t>();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t owner = part_of(ids[places[i]], bounds, num_bounds);
    if (kept) part[i] = uint8_t(owner);
    ++counts[owner];
  }
  std::vector<int64_t> next(size_t(num_bounds) + 1, 0);
  for (int64_t p = 0; p < num_bounds; ++p) next[size_t(p) + 1] = next[size_t(p)] + counts[p];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t owner = kept ? part[i] : part_of(ids[places[i]], bounds, num_bounds);
    routed[next[size_t(owner)]++] = places[i];
  }
}

}  // namespace

void check_ids(const int64_t* ids, int64_t count, int64_t first, int64_t num_rows) {
  uint64_t worst = 0;
  for (int64_t i = 0; i < count; ++i) worst |= uint64_t(is_outside(ids[i], first, num_rows));
  if (!worst) return;
  for (int64_t i = 0; i < count; ++i)
    if (is_outside(ids[i], first, num_rows)) refuse(ids[i], first, num_rows);
}

void gather(const uint8_t* table, int64_t num_rows, int64_t row_bytes, const int64_t* ids, int64_t count, int64_t first,
            uint8_t* out) {
  check_ids(ids, count, first, num_rows);
  gather_any(table, row_bytes, ids, Everywhere{}, count, first, out);
}

void gather_at(const uint8_t* table, int64_t num_rows, int64_t row_bytes, const int64_t* ids, int64_t num_ids,
               const int64_t* places, int64_t count, int64_t first, uint8_t* out) {
  check_ids(places, count, 0, num_ids);
  check_ids_at(ids, places, count, first, num_rows);
  gather_any(table, row_bytes, ids, places, count, first, out);
}

void route(const int64_t* ids, int64_t count, const int64_t* bounds, int64_t num_bounds, int64_t* routed,
           int64_t* counts) {
  route_any(ids, Everywhere{}, count, bounds, num_bounds, routed, counts);
}

void route_at(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, const int64_t* bounds,
              int64_t num_bounds, int64_t* routed, int64_t* counts) {
  check_ids(places, count, 0, num_ids);
  route_any(ids, places, count, bounds, num_bounds, routed, counts);
}

void scatter(const uint8_t* rows, int64_t row_bytes, const int64_t* places, int64_t count, int64_t out_rows,
             uint8_t* out) {
  check_ids(places, count, 0, out_rows);
  if (row_bytes == 0) return;
  for (int64_t i = 0; i < count; ++i) std::memcpy(out + places[i] * row_bytes, rows + i * row_bytes, size_t(row_bytes));
}

void edge_rows(const int32_t* local, int64_t picks, const int64_t* counts, int64_t frontier_size, int64_t first,
               int64_t* sources, int64_t* destinations) {
  for (int64_t i = 0; i < picks; ++i) sources[i] = local[i];
  int64_t at = 0;
  for (int64_t i = 0; i < frontier_size; ++i) {
    if (counts[i] < 0 || counts[i] > picks - at) throw std::out_of_range("counts exceed the picks");
    for (const int64_t end = at + counts[i]; at < end; ++at) destinations[at] = first + i;
  }
  if (at != picks) throw std::out_of_range("counts do not sum to the picks");
}

}  // namespace hoploom
