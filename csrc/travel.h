// Ids on their way to another process and back, and picks of several parts put together.
#pragma once
#include <cstdint>
#include <vector>

#include "buffers.h"

namespace hoploom {

// The ids at some places of `num_ids`, or all of them where `places` is null: [count] int64.
Buffer select(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count);

// The same, counted from `first`: [count] int32. Ids outside [first, first + 2^31) throw.
Buffer narrow(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, int64_t first);

// What narrow() has made, as it was before: [count] int64. Ids that were not narrowed are copied.
struct Narrowed {
  const void* ids;  // [count] int64, or int32 counted from `first`
  bool is_narrow;
  int64_t count, first;
};
Buffer widen(const Narrowed& narrowed);

// The same; one that is not in [first, first + size) throws.
Buffer owned(const Narrowed& narrowed, int64_t size);

// Whether `places` are 0, 1, 2 and so on.
bool is_counting(const int64_t* places, int64_t count);

// What one part has picked for its share of a frontier.
struct PartPicks {
  const int64_t *places, *counts;  // [num_nodes]: where in the frontier, and how many picks
  int64_t num_nodes;
  const int64_t *sources, *edges;  // [num_picks]
  int64_t num_picks;
};
struct Stitched {
  Buffer counts;          // [frontier_size] int64: 0 for nodes that no part has
  Buffer sources, edges;  // [picks] int64, in the order of the frontier
};
// Throws where counts do not sum to the picks, or places are none of the frontier or of two parts.
Stitched stitch(const std::vector<PartPicks>& parts, int64_t frontier_size);

}  // namespace hoploom
