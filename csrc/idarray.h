// An array of integers of four or five bytes each: half of an int64 array, where memory per node of a graph counts.
#pragma once
#include <cstdint>
#include <cstring>

#include "buffers.h"

namespace hoploom {

// Initialized with zeros, in huge pages, because it is read in random order.
class IdArray {
 public:
  // Chooses the width by the largest value.
  IdArray(int64_t size, uint64_t largest)
      : size_(size),
        wide_(largest > UINT32_MAX),
        pages_(size_t(size) * (wide_ ? 5 : 4)),
        low_(pages_.as<uint32_t>()),
        high_(wide_ ? pages_.as<uint8_t>() + size * 4 : nullptr) {}
  int64_t size() const { return size_; }
  uint64_t operator[](int64_t at) const { return wide_ ? uint64_t(high_[at]) << 32 | low_[at] : low_[at]; }
  void set(int64_t at, uint64_t value) {
    low_[at] = uint32_t(value);
    if (wide_) high_[at] = uint8_t(value >> 32);
  }
  bool is_wide() const { return wide_; }
  uint32_t& low(int64_t at) { return low_[at]; }  // the whole value, unless values are wide
  void prefetch(int64_t at) const {
    __builtin_prefetch(&low_[at]);
    if (wide_) __builtin_prefetch(&high_[at]);
  }

 private:
  int64_t size_;
  bool wide_;
  ZeroedPages pages_;
  uint32_t* low_;
  uint8_t* high_;
};

}  // namespace hoploom
