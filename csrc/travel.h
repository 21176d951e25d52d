// Encoding of ids that are sent to another process, and merging of the picks of several parts.
#pragma once
#include <cstdint>
#include <vector>

#include "buffers.h"

namespace hoploom {

// Returns the ids at positions `places` of `num_ids`, or all of them if `places` is null: [count] int64.
Buffer select(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count);

// As above, minus `first`: [count] int32. Throws for ids outside [first, first + 2^31).
Buffer narrow(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, int64_t first);

// Undoes narrow(): [count] int64. Ids that were not narrowed are copied.
struct Narrowed {
  const void* ids;  // [count] int64, or int32 minus `first`
  bool is_narrow;
  int64_t count, first;
};
Buffer widen(const Narrowed& narrowed);

// As above; throws for an id outside [first, first + size).
Buffer owned(const Narrowed& narrowed, int64_t size);

// Returns whether `places` is 0, 1, 2, ...
bool is_counting(const int64_t* places, int64_t count);

// The picks of one part for its share of a frontier.
struct PartPicks {
  const int64_t *places, *counts;  // [num_nodes]: position in the frontier, and number of picks
  int64_t num_nodes;
  const int64_t *sources, *edges;  // [num_picks]
  int64_t num_picks;
};
struct Stitched {
  Buffer counts;          // [frontier_size] int64: 0 for nodes that are in no part
  Buffer sources, edges;  // [picks] int64, in the order of the frontier
};
// Throws if counts do not sum to the picks, or a position is out of range or given twice.
Stitched stitch(const std::vector<PartPicks>& parts, int64_t frontier_size);

}  // namespace hoploom
