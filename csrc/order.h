// A keyed bijection on [0, n): shuffling without memory. A Feistel network with cycle walking.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "random.h"

namespace hoploom {

class Permutation {
 public:
  Permutation(uint64_t key, uint64_t size) : key_(key), size_(size) {
    const int bits = size > 1 ? 64 - std::countl_zero(size - 1) : 1;
    half_ = std::max(4, (bits + 1) / 2);  // fewer bits per half would make small shuffles uneven
    mask_ = (uint64_t(1) << half_) - 1;
  }
  uint64_t at(uint64_t position) const {
    do position = once(position);
    while (position >= size_);
    return position;
  }

 private:
  uint64_t once(uint64_t value) const {
    uint64_t left = value >> half_, right = value & mask_;
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t next = left ^ (mix(mix(key_, round), right) & mask_);
      left = right;
      right = next;
    }
    return left << half_ | right;
  }
  uint64_t key_, size_, mask_;
  int half_;
};

}  // namespace hoploom
