// Vectors of floats for matrix products whose sums stay in registers, and memory for panels: some columns of all rows.
#pragma once
#include <cstdint>

#include "buffers.h"
#include "processor.h"

namespace hoploom {

// Vectors of so many numbers, and the rows of a product in registers.
template <int kLanes>
struct Vectors;
template <>
struct Vectors<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));
  static constexpr int kRows = 8;
};
template <>
struct Vectors<8> {
  typedef float Floats __attribute__((vector_size(32)));
  typedef int32_t Ints __attribute__((vector_size(32)));
  static constexpr int kRows = 4;
};
template <>
struct Vectors<4> {
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  static constexpr int kRows = 4;
};

HOPLOOM_INLINE int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

template <int kLanes>
HOPLOOM_INLINE auto* vectors_at(float* values) {
  return reinterpret_cast<typename Vectors<kLanes>::Floats*>(values);
}
template <int kLanes>
HOPLOOM_INLINE const auto* vectors_at(const float* values) {
  return reinterpret_cast<const typename Vectors<kLanes>::Floats*>(values);
}

// The memory of one call, in floats from an address that vectors like.
struct Scratch {
  explicit Scratch(int64_t count) : buffer(size_t(count) * 4 + 64) {
    first = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.as<char>()) + 63) & ~uintptr_t(63));
  }
  Buffer buffer;
  float* first;
};

}  // namespace hoploom
