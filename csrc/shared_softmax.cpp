// Scores of a block of queries stay in the second-level cache until all three products that need them are done. All
// matrices are in panels: some columns of all rows, which are as many as a product keeps in registers. The sum over the
// block's exponentials divides its queries and their gradients, not the exponentials themselves.
#include "shared_softmax.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "panels.h"
#include "threads.h"

namespace hoploom {
namespace {

constexpr int kVectors = 3;      // of a panel's row
constexpr int64_t kBlock = 96;   // queries whose scores are in the cache at a time
constexpr int64_t kLeast = 512;  // queries of a share; each share has its own sum of the candidates' gradients
constexpr int64_t kMostShares = 64;
constexpr int64_t kMostSums = 1 << 24;    // floats in the sums of all shares
constexpr int64_t kDeep = 4;              // panels of candidates that a product passes at a time
constexpr float kLeastExponent = -87.0f;  // below it, exponentials are 0

// What all threads share. The sizes depend on the number of lanes.
struct Shared {
  SharedChoice given;
  float* losses;
  ChoiceGradients gradients;
  int64_t num_shares;
  float *turned, *rows;  // candidates in panels: [width] rows, and [num_candidates] rows
  float* sums;           // by share, the candidates' gradients in panels
  std::atomic<int64_t>* next;
};

// The panels of a block of queries, and of its scores.
template <int kLanes>
struct Block {
  float *queries, *gradients, *scores;
  alignas(64) float peaks[kBlock][kLanes], totals[kBlock][kLanes];
  float greatest[kBlock], true_scores[kBlock], factors[kBlock], true_factors[kBlock];
};

// Writes, or adds to, kRows rows of a product. The panels of `left` are `step` apart; kTurned: its columns are rows of
// the product.
template <int kLanes, int kUsed, bool kTurned>
HOPLOOM_INLINE void multiply(const float* left, int64_t step, const float* right, int64_t depth, float* out,
                             bool adds) {
  using Floats = typename Vectors<kLanes>::Floats;
  constexpr int kRows = Vectors<kLanes>::kRows, kPanel = kVectors * kLanes;
  Floats sums[kRows][kUsed];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kUsed; ++v) sums[r][v] = adds ? vectors_at<kLanes>(out + r * kPanel)[v] : Floats{};
  for (int64_t at = 0; at < depth; at += kPanel, left += step) {
    const int64_t end = std::min<int64_t>(kPanel, depth - at);
    for (int64_t k = 0; k < end; ++k, right += kPanel) {
      for (int r = 0; r < kRows; ++r) {
        const float value = kTurned ? left[k * kPanel + r] : left[r * kPanel + k];
        for (int v = 0; v < kUsed; ++v) sums[r][v] += value * vectors_at<kLanes>(right)[v];
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kUsed; ++v) vectors_at<kLanes>(out + r * kPanel)[v] = sums[r][v];
}

// The same for the columns that are used of a panel.
template <int kLanes, bool kTurned>
HOPLOOM_INLINE void multiply_some(int64_t columns, const float* left, int64_t step, const float* right, int64_t depth,
                                  float* out, bool adds) {
  if (columns > 2 * kLanes) return multiply<kLanes, 3, kTurned>(left, step, right, depth, out, adds);
  if (columns > kLanes) return multiply<kLanes, 2, kTurned>(left, step, right, depth, out, adds);
  multiply<kLanes, 1, kTurned>(left, step, right, depth, out, adds);
}

// Returns exp(x) of x <= 0, by Cephes' polynomial.
template <int kLanes>
HOPLOOM_INLINE void exponential(typename Vectors<kLanes>::Floats& x) {
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
  const Floats shifted = x * 1.44269504088896341f + kRound, whole = shifted - kRound;
  const Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  const Ints power = ((Ints)shifted << 23) + 0x3F800000;
  x = x < kLeastExponent ? Floats{} : sum * (Floats)power;
}

// Copies rows into panels.
template <int kLanes>
HOPLOOM_INLINE void pack(const float* rows, int64_t count, int64_t width, int64_t panel_rows, float* out) {
  constexpr int64_t kPanel = kVectors * kLanes;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < width; c += kPanel)
      std::copy_n(rows + i * width + c, std::min(kPanel, width - c), out + (c / kPanel * panel_rows + i) * kPanel);
}

// Writes the scores of a block, and the greatest of each query.
template <int kLanes>
HOPLOOM_INLINE void score(const Shared& shared, int64_t num_rows, Block<kLanes>& block) {
  constexpr int64_t kPanel = kVectors * kLanes;
  const int64_t width = shared.given.width, count = shared.given.num_candidates;
  for (int64_t i = 0; i < num_rows; ++i) std::fill_n(block.peaks[i], kLanes, -std::numeric_limits<float>::infinity());
  for (int64_t first = 0; first < count; first += kPanel) {
    float* panel = block.scores + first * kBlock;
    for (int64_t i = 0; i < num_rows; i += Vectors<kLanes>::kRows)
      multiply_some<kLanes, false>(count - first, block.queries + i * kPanel, kBlock * kPanel,
                                   shared.turned + first * width, width, panel + i * kPanel, false);
    for (int64_t i = 0; i < num_rows; ++i) {
      float* row = panel + i * kPanel;
      for (int64_t c = count - first; c < kPanel; ++c) row[c] = -std::numeric_limits<float>::infinity();
      auto& peak = *vectors_at<kLanes>(block.peaks[i]);
      for (int v = 0; v < kVectors; ++v) {
        const auto values = vectors_at<kLanes>(row)[v];
        peak = values > peak ? values : peak;
      }
    }
  }
}

// Replaces scores by their exponentials, and adds these up.
template <int kLanes>
HOPLOOM_INLINE void exponentiate(const Shared& shared, int64_t num_rows, Block<kLanes>& block) {
  constexpr int64_t kPanel = kVectors * kLanes;
  const float scale = 1 / shared.given.temperature;
  for (int64_t i = 0; i < num_rows; ++i) std::fill_n(block.totals[i], kLanes, 0.0f);
  for (int64_t first = 0; first < shared.given.num_candidates; first += kPanel)
    for (int64_t i = 0; i < num_rows; ++i) {
      auto* row = vectors_at<kLanes>(block.scores + first * kBlock + i * kPanel);
      auto total = *vectors_at<kLanes>(block.totals[i]);
      for (int v = 0; v < kVectors; ++v) {
        auto x = (row[v] - block.greatest[i]) * scale;
        exponential<kLanes>(x);
        row[v] = x;
        total += x;
      }
      *vectors_at<kLanes>(block.totals[i]) = total;
    }
}

// Writes the losses of a block and the gradients of its queries and true rows; adds to those of the candidates.
template <int kLanes>
HOPLOOM_INLINE void add_block(const Shared& shared, int64_t begin, int64_t end, float* sums, bool adds,
                              Block<kLanes>& block) {
  constexpr int64_t kPanel = kVectors * kLanes, kRows = Vectors<kLanes>::kRows;
  const SharedChoice& given = shared.given;
  const int64_t width = given.width, count = given.num_candidates, padded = divided_up(count, kPanel) * kPanel;
  const int64_t num_panels = divided_up(width, kPanel), num_rows = divided_up(end - begin, kRows) * kRows;
  const float *queries = given.queries + begin * width, *truths = given.truths + begin * width;
  const float scale = 1 / given.temperature;
  pack<kLanes>(queries, end - begin, width, kBlock, block.queries);
  for (int64_t p = 0; p < num_panels; ++p)
    std::fill_n(block.queries + (p * kBlock + end - begin) * kPanel, (num_rows - (end - begin)) * kPanel, 0.0f);
  score<kLanes>(shared, num_rows, block);
  for (int64_t i = 0; i < num_rows; ++i) {
    float score = 0;
    for (int64_t c = 0; i < end - begin && c < width; ++c) score += queries[i * width + c] * truths[i * width + c];
    block.true_scores[i] = score;
    block.greatest[i] = std::max(*std::max_element(block.peaks[i], block.peaks[i] + kLanes), score);
  }
  exponentiate<kLanes>(shared, num_rows, block);
  for (int64_t i = 0; i < end - begin; ++i) {
    const float behind = (block.greatest[i] - block.true_scores[i]) * scale, own = std::exp(-behind);
    float total = own;
    for (float part : block.totals[i]) total += part;
    const float weight = scale * (given.weights ? given.weights[begin + i] : 1.0f);
    shared.losses[begin + i] = std::log(total) + behind;
    block.factors[i] = weight / total;
    block.true_factors[i] = weight * (own / total - 1);
    for (int64_t c = 0; c < width; ++c)
      shared.gradients.truths[(begin + i) * width + c] = queries[i * width + c] * block.true_factors[i];
    for (int64_t p = 0; p < num_panels; ++p)
      for (int64_t c = 0; c < kPanel; ++c) block.queries[(p * kBlock + i) * kPanel + c] *= block.factors[i];
  }
  for (int64_t p = 0; p < num_panels; ++p)
    for (int64_t k = 0; k < count; k += kDeep * kPanel)
      for (int64_t i = 0; i < num_rows; i += kRows)
        multiply_some<kLanes, false>(width - p * kPanel, block.scores + k * kBlock + i * kPanel, kBlock * kPanel,
                                     shared.rows + (p * padded + k) * kPanel, std::min(kDeep * kPanel, count - k),
                                     block.gradients + (p * kBlock + i) * kPanel, k > 0);
  for (int64_t i = 0; i < end - begin; ++i)
    for (int64_t c = 0; c < width; ++c)
      shared.gradients.queries[(begin + i) * width + c] =
          block.gradients[(c / kPanel * kBlock + i) * kPanel + c % kPanel] * block.factors[i] +
          truths[i * width + c] * block.true_factors[i];
  for (int64_t p = 0; p < num_panels; ++p)
    for (int64_t j = 0; j < count; j += kRows)
      multiply_some<kLanes, true>(width - p * kPanel, block.scores + j / kPanel * kPanel * kBlock + j % kPanel,
                                  kPanel * kPanel, block.queries + p * kBlock * kPanel, num_rows,
                                  sums + (p * padded + j) * kPanel, adds);
}

template <int kLanes>
HOPLOOM_INLINE void add_shares(const Shared& shared) {
  constexpr int64_t kPanel = kVectors * kLanes;
  const SharedChoice& given = shared.given;
  const int64_t padded = divided_up(given.num_candidates, kPanel) * kPanel;
  const int64_t num_columns = divided_up(given.width, kPanel) * kPanel;
  const Scratch scratch((padded + 2 * num_columns) * kBlock);
  Block<kLanes> block;
  block.scores = scratch.first;
  block.queries = block.scores + padded * kBlock;
  block.gradients = block.queries + num_columns * kBlock;
  std::fill_n(block.queries, num_columns * kBlock, 0.0f);
  for (int64_t share; (share = shared.next->fetch_add(1)) < shared.num_shares;) {
    const int64_t begin = given.count * share / shared.num_shares, end = given.count * (share + 1) / shared.num_shares;
    for (int64_t at = begin; at < end; at += kBlock)
      add_block<kLanes>(shared, at, std::min(at + kBlock, end), shared.sums + share * padded * num_columns, at > begin,
                        block);
  }
}

// Writes the sums of all shares for some candidates.
template <int kLanes>
void add_up(const Shared& shared, int64_t begin, int64_t end) {
  constexpr int64_t kPanel = kVectors * kLanes;
  const int64_t width = shared.given.width, padded = divided_up(shared.given.num_candidates, kPanel) * kPanel;
  const int64_t size = padded * divided_up(width, kPanel) * kPanel;
  for (int64_t j = begin; j < end; ++j)
    for (int64_t c = 0; c < width; c += kPanel) {
      float total[kPanel] = {};
      const float* sums = shared.sums + (c / kPanel * padded + j) * kPanel;
      for (int64_t share = 0; share < shared.num_shares; ++share)
        for (int64_t i = 0; i < kPanel; ++i) total[i] += sums[share * size + i];
      std::copy_n(total, std::min(kPanel, width - c), shared.gradients.candidates + j * width + c);
    }
}

// `add` is add_shares, compiled for a processor.
template <int kLanes>
void run(Shared shared, int threads, void (*add)(const Shared&)) {
  constexpr int64_t kPanel = kVectors * kLanes;
  const SharedChoice& given = shared.given;
  if (!given.count) return void(std::fill_n(shared.gradients.candidates, given.num_candidates * given.width, 0.0f));
  const int64_t count = given.num_candidates, width = given.width, padded = divided_up(count, kPanel) * kPanel;
  const int64_t size = padded * divided_up(width, kPanel) * kPanel;
  const int64_t most = std::min({kMostShares, given.count / kLeast, kMostSums / size});
  shared.num_shares = int64_t(std::bit_floor(uint64_t(std::max<int64_t>(most, 1))));
  const Scratch scratch(padded * width + size * (1 + shared.num_shares));
  shared.turned = scratch.first;
  shared.rows = shared.turned + padded * width;
  shared.sums = shared.rows + size;
  std::fill_n(shared.turned, padded * width + size, 0.0f);
  pack<kLanes>(given.candidates, count, width, padded, shared.rows);
  for (int64_t j = 0; j < count; ++j)
    for (int64_t c = 0; c < width; ++c)
      shared.turned[(j / kPanel * width + c) * kPanel + j % kPanel] = given.candidates[j * width + c];
  std::atomic<int64_t> next = 0;
  shared.next = &next;
  const int used = int(std::clamp<int64_t>(threads, 1, shared.num_shares));
  on_threads(used, [&](int) { add(shared); });
  on_threads(used, [&](int t) { add_up<kLanes>(shared, count * t / used, count * (t + 1) / used); });
}

}  // namespace

void shared_softmax(const SharedChoice& given, int threads, float* losses, const ChoiceGradients& gradients) {
  const Shared shared{given, losses, gradients, 0, nullptr, nullptr, nullptr, nullptr};
#if defined(HOPLOOM_AVX2)
  if (has_avx512()) return run<16>(shared, threads, run_with_avx512<add_shares<16>, const Shared>);
  if (has_avx2()) return run<8>(shared, threads, run_with_avx2<add_shares<8>, const Shared>);
#endif
  run<4>(shared, threads, [](const Shared& given) { add_shares<4>(given); });
}

}  // namespace hoploom
