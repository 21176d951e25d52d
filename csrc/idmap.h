// Distinct ids, numbered in the order in which they came: a set of rows that is held out of a larger table.
// Trades a hash per look-up for memory by what is held, not by what there is: 16 to 24 bytes per id.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "alone.h"
#include "buffers.h"

namespace hoploom {

class IdMap {
 public:
  // Makes room for so many ids at once.
  void reserve(int64_t count);
  // Adds those of the ids that are not there yet; with places, of the ids at these places of `num_ids`.
  void add(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count);

  struct Found {
    Buffer slots;         // [num_ids] int64: the numbers of ids at `hits`; the rest is left as it was
    Buffer hits, misses;  // int64: the places of the ids that are here, and of those that are not, in order
  };
  // Any number of threads may look up at once while none adds; else std::logic_error.
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
