// Ids that ascend, numbered in that order: a bit for each id of their range, and for every 64 of them how many come
// before. Trades two bits for each id between the first one and the last for no hashing.
#pragma once
#include <cstdint>

#include "buffers.h"
#include "idmap.h"

namespace hoploom {

class IdRanks {
 public:
  // Throws where ids do not ascend.
  IdRanks(const int64_t* ids, int64_t count);

  // As IdMap::find, in any number of threads. `slots` holds anything at the misses.
  IdMap::Found find(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) const;

  int64_t size() const { return size_; }
  Buffer copy_ids() const;
  int64_t bytes() const { return int64_t(words_.size()); }
  // What these would take.
  static int64_t bytes_of(int64_t first, int64_t last);

  struct Word {
    uint64_t bits;  // 64 ids from a multiple of 64 beyond the first one on
    int64_t before;
  };

 private:
  Buffer words_;
  int64_t size_ = 0, first_ = 0, span_ = 0;
};

}  // namespace hoploom
