#include "travel.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace hoploom {
namespace {

void check_places(const int64_t* places, int64_t count, int64_t limit) {
  uint64_t worst = 0;
  for (int64_t i = 0; i < count; ++i) worst = std::max(worst, uint64_t(places[i]));
  if (count && worst >= uint64_t(limit))
    throw std::out_of_range("place " + std::to_string(int64_t(worst)) + " is out of range [0, " +
                            std::to_string(limit) + ")");
}

}  // namespace

Buffer select(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) {
  Buffer out(size_t(count) * 8);
  if (places) {
    check_places(places, count, num_ids);
    for (int64_t i = 0; i < count; ++i) out.as<int64_t>()[i] = ids[places[i]];
  } else if (count) {
    std::memcpy(out.as<int64_t>(), ids, size_t(count) * 8);
  }
  return out;
}

Buffer narrow(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, int64_t first) {
  if (places) check_places(places, count, num_ids);
  Buffer out(size_t(count) * 4);
  int32_t* narrowed = out.as<int32_t>();
  uint64_t worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t from_first = uint64_t(ids[places ? places[i] : i]) - uint64_t(first);
    worst |= from_first;
    narrowed[i] = int32_t(from_first);
  }
  if (worst > uint64_t(INT32_MAX)) throw std::out_of_range("ids do not lie within 2^31 of the first one");
  return out;
}

Buffer widen(const Narrowed& narrowed) {
  const auto [ids, is_narrow, count, first] = narrowed;
  if (!is_narrow) return select(static_cast<const int64_t*>(ids), count, nullptr, count);
  Buffer out(size_t(count) * 8);
  const auto* from = static_cast<const int32_t*>(ids);
  for (int64_t i = 0; i < count; ++i) out.as<int64_t>()[i] = int64_t(uint64_t(first) + uint64_t(int64_t(from[i])));
  return out;
}

Buffer owned(const Narrowed& narrowed, int64_t size) {
  Buffer out = widen(narrowed);
  const int64_t* ids = out.as<int64_t>();
  const auto is_outside = [&](int64_t id) { return uint64_t(id) - uint64_t(narrowed.first) >= uint64_t(size); };
  uint64_t worst = 0;
  for (int64_t i = 0; i < narrowed.count; ++i) worst |= uint64_t(is_outside(ids[i]));
  if (worst)
    throw std::out_of_range("id " + std::to_string(*std::find_if(ids, ids + narrowed.count, is_outside)) +
                            " is out of range [" + std::to_string(narrowed.first) + ", " +
                            std::to_string(narrowed.first + size) + ")");
  return out;
}

bool is_counting(const int64_t* places, int64_t count) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) wrong |= places[i] ^ i;
  return wrong == 0;
}

Stitched stitch(const std::vector<PartPicks>& parts, int64_t frontier_size) {
  constexpr int64_t kNobody = -1;
  Stitched out{Buffer(size_t(frontier_size) * 8), Buffer(), Buffer()};
  int64_t* counts = out.counts.as<int64_t>();
  std::fill_n(counts, frontier_size, kNobody);
  int64_t num_picks = 0;
  for (const PartPicks& part : parts) {
    check_places(part.places, part.num_nodes, frontier_size);
    int64_t left = part.num_picks;
    for (int64_t i = 0; i < part.num_nodes; ++i) {
      if (part.counts[i] < 0 || part.counts[i] > left) throw std::out_of_range("counts do not sum to the picks");
      if (std::exchange(counts[part.places[i]], part.counts[i]) != kNobody)
        throw std::out_of_range("two parts have picked for one place");
      left -= part.counts[i];
    }
    if (left) throw std::out_of_range("counts do not sum to the picks");
    num_picks += part.num_picks;
  }
  Buffer begins(size_t(frontier_size) * 8);
  int64_t* begin = begins.as<int64_t>();
  for (int64_t i = 0, at = 0; i < frontier_size; ++i) {
    counts[i] = std::max<int64_t>(counts[i], 0);
    begin[i] = at;
    at += counts[i];
  }
  out.sources = Buffer(size_t(num_picks) * 8);
  out.edges = Buffer(size_t(num_picks) * 8);
  for (const PartPicks& part : parts)
    for (int64_t i = 0, read = 0; i < part.num_nodes; ++i) {
      const int64_t count = part.counts[i], at = begin[part.places[i]];
      if (count == 0) continue;
      std::memcpy(out.sources.as<int64_t>() + at, part.sources + read, size_t(count) * 8);
      std::memcpy(out.edges.as<int64_t>() + at, part.edges + read, size_t(count) * 8);
      read += count;
    }
  return out;
}

}  // namespace hoploom
