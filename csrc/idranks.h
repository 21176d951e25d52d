// Ascending ids, numbered in their order: a bit for each id of their range, and a running count for every 64 of them.
// Costs two bits for each id between the first one and the last, and saves hashing.
#pragma once
#include <cstdint>

#include "buffers.h"
#include "idmap.h"

namespace hoploom {

class IdRanks {
 public:
  // Throws unless ids ascend.
  IdRanks(const int64_t* ids, int64_t count);

  // Works like IdMap::find, on any number of threads. `slots` is undefined at misses.
  IdMap::Found find(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) const;

  int64_t size() const { return size_; }
  Buffer copy_ids() const;
  int64_t bytes() const { return int64_t(words_.size()); }
  // Returns the bytes that an instance for these ids would take.
  static int64_t bytes_of(int64_t first, int64_t last);

  struct Word {
    uint64_t bits;  // presence bits of 64 ids
    int64_t before;
  };

 private:
  Buffer words_;
  int64_t size_ = 0, first_ = 0, span_ = 0;
};

}  // namespace hoploom
