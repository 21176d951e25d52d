// A set of distinct ids, numbered in the order of insertion: the rows of a cache, for example.
// Costs a hash per look-up, and 16 to 24 bytes per id in the set; memory does not depend on the range of ids.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "alone.h"
#include "buffers.h"

namespace hoploom {

class IdMap {
 public:
  // Reserves memory for `count` ids.
  void reserve(int64_t count);
  // Inserts the ids that are missing; with `places`, only the ids at these positions of `num_ids`.
  void add(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count);

  struct Found {
    Buffer slots;         // [num_ids] int64: the numbers of ids at `hits`; other entries are not written
    Buffer hits, misses;  // int64: the positions of ids in the set, and of the others, ascending
  };
  // Any number of threads may look up at once unless one inserts; else throws std::logic_error.
  Found find(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) const;

  int64_t size() const;
  Buffer copy_ids() const;
  int64_t bytes() const;

 private:
  size_t slot_of(int64_t id) const;
  size_t slot_from(size_t slot, int64_t id) const;
  void grow(size_t slots);
  template <typename At>
  void locate(const int64_t* ids, At place, int64_t size, size_t* at) const;

  Alone alone_;
  std::vector<int64_t> ids_;             // by number
  std::vector<int32_t> slots_ = {0, 0};  // open addressing, a power of two: number plus one; 0 is empty
};

}  // namespace hoploom
