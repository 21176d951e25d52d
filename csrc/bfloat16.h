// Half-width floating point: the upper 16 bits of a float.
#pragma once
#include <bit>
#include <cstdint>

#include "processor.h"

namespace hoploom {

struct Bfloat16 {
  uint16_t bits;
};

HOPLOOM_INLINE float widened(Bfloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }

// Rounds to the nearest; to the even one of two that are equally near. NaN stays NaN.
HOPLOOM_INLINE Bfloat16 rounded(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return {value == value ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fc0)};
}

}  // namespace hoploom
