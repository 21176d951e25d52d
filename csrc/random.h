// Counter-based randomness: Philox4x32-10, the 64-bit key mix, and bounded draws.
// Slower than a stateful generator, but any draw can be computed anywhere.
#pragma once
#include <cstdint>
#include <cstring>

#include "processor.h"

namespace hoploom {

// The finaliser of splitmix64: a bijection on 64 bits that avalanches.
HOPLOOM_INLINE uint64_t mix(uint64_t state, uint64_t value) {
  uint64_t z = (state ^ value) + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

// One Philox block: four 32-bit words from a 64-bit key and a 128-bit counter.
HOPLOOM_INLINE void philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t words[4]) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(kPhiloxM0) * c0, p1 = uint64_t(kPhiloxM1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// A bound above this takes two words per draw, so that no draw is biased by more than 2^-16.
constexpr uint64_t kNarrowLimit = 1u << 16;

// The draws of one (key, id, stream), in any order; caches the last block.
class Draws {
 public:
  Draws(uint64_t key, int64_t id, uint32_t stream)
      : key_(key), low_(uint32_t(uint64_t(id))), high_(uint32_t(uint64_t(id) >> 32)), stream_(stream) {}

  uint32_t word(uint64_t draw) {
    if (draw / 4 != block_) {
      block_ = draw / 4;
      philox(key_, low_, high_, stream_, uint32_t(block_), words_);
    }
    return words_[draw % 4];
  }
  uint64_t wide(uint64_t draw) {
    const uint64_t high = word(2 * draw);
    return high << 32 | word(2 * draw + 1);
  }
  // Returns an integer in [0, bound) by multiply-shift; `is_wide` says whether it takes two words.
  uint64_t bounded(uint64_t draw, uint64_t bound, bool is_wide) {
    if (!is_wide) return uint64_t(word(draw)) * bound >> 32;
    return uint64_t((unsigned __int128)wide(draw) * bound >> 64);
  }
  // Returns a double strictly inside (0, 1), exact in 53 bits.
  double unit(uint64_t draw) { return (double(wide(draw) >> 12) + 0.5) * 0x1p-52; }

 private:
  uint64_t key_;
  uint32_t low_, high_, stream_;
  uint64_t block_ = ~0ull;
  uint32_t words_[4];
};

// Returns ln(x) for 0 < x < 1, computed with +, *, / alone, so that every device rounds alike.
inline double exact_log(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  int exponent = int(bits >> 52) - 1022;
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FE0000000000000ull;
  double m;  // in [0.5, 1)
  std::memcpy(&m, &bits, 8);
  if (m < 0.70710678118654752) {
    m = m * 2.0;
    exponent -= 1;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double sum = 0.0;
  for (int n = 21; n >= 1; n -= 2) sum = sum * z + 1.0 / n;
  return double(exponent) * 0.69314718055994531 + 2.0 * s * sum;
}

}  // namespace hoploom
