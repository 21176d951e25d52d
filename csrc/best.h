// The best destinations of each source, kept while scores are computed block by block.
#pragma once
#include <cstdint>

namespace hoploom {

// Scores of `num_sources` sources for the destinations first, first + 1, ..., first + width - 1: one row a source.
struct ScoreBlock {
  const float* values;  // [num_sources, width]
  int64_t num_sources, width, first;
};

// Destinations that are left out: source s has known[indptr[s]] to known[indptr[s + 1] - 1], ascending.
struct KnownLists {
  const int64_t* indptr;  // [num_sources + 1]; null: nothing is left out
  const int64_t* known;
};

// Merges a block into the best `k` of each source: `scores` [num_sources, k] descending and their `ids`, -infinity and
// -1 where there are fewer. Of equal scores the lower id comes first, if blocks come in ascending order. NaN is never
// kept.
void keep_best(const ScoreBlock& block, const KnownLists& known, int64_t k, int threads, float* scores, int64_t* ids);

}  // namespace hoploom
