// Nearly every score is below the worst that is kept: a row is read in steps, each of which is one comparison of
// vectors.
#include "best.h"

#include <algorithm>

#include "processor.h"
#include "threads.h"

namespace hoploom {
namespace {

constexpr int64_t kStep = 64;        // scores compared at once
constexpr int64_t kSmall = 1 << 16;  // scores; for fewer, another thread costs more than it saves

// The sources of one thread, and what they keep.
struct Share {
  int64_t begin, end, k;
  float* scores;
  int64_t* ids;
};

HOPLOOM_INLINE bool any_above(const float* values, float limit) {
  int found = 0;
  for (int64_t i = 0; i < kStep; ++i) found |= values[i] > limit;
  return found != 0;
}

// Inserts behind all scores that are not lower.
HOPLOOM_INLINE void insert(float score, int64_t id, int64_t k, float* scores, int64_t* ids) {
  int64_t at = k - 1;
  for (; at > 0 && scores[at - 1] < score; --at) {
    scores[at] = scores[at - 1];
    ids[at] = ids[at - 1];
  }
  scores[at] = score;
  ids[at] = id;
}

HOPLOOM_INLINE void keep_rows(const ScoreBlock& block, const KnownLists& known, const Share& share) {
  for (int64_t s = share.begin; s < share.end; ++s) {
    const float* row = block.values + s * block.width;
    const int64_t* known_begin = known.indptr ? known.known + known.indptr[s] : nullptr;
    const int64_t* known_end = known.indptr ? known.known + known.indptr[s + 1] : nullptr;
    float* scores = share.scores + s * share.k;
    for (int64_t at = 0; at < block.width; at += kStep) {
      if (at + kStep <= block.width && !any_above(row + at, scores[share.k - 1])) continue;
      for (int64_t i = at; i < std::min(at + kStep, block.width); ++i)
        if (row[i] > scores[share.k - 1] && !std::binary_search(known_begin, known_end, block.first + i))
          insert(row[i], block.first + i, share.k, scores, share.ids + s * share.k);
    }
  }
}

}  // namespace

void keep_best(const ScoreBlock& block, const KnownLists& known, int64_t k, int threads, float* scores, int64_t* ids) {
  if (k == 0) return;
  const int64_t useful = std::clamp<int64_t>(block.num_sources * block.width / kSmall, 1, std::max(threads, 1));
  on_threads(int(useful), [&](int t) {
    const Share share{block.num_sources * t / useful, block.num_sources * (t + 1) / useful, k, scores, ids};
    run_fastest<keep_rows>(block, known, share);
  });
}

}  // namespace hoploom
