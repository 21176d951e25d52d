// Ids that have a slot each of a table of rows. An id that two rounds have not needed gives its slot to another one:
// rows that are needed again stay where they are. Trades a look-up for moving no row: by id where there are few ids,
// else by hash.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "alone.h"
#include "buffers.h"

namespace hoploom {

class SlotMap {
 public:
  // For ids from 0 up to `num_ids`, with 4 bytes for each of these; 0: for any ids, with a hash.
  explicit SlotMap(int64_t num_ids);

  // Begins a round. Slots of ids that neither this round nor the one before it needs are free.
  void begin();

  struct Found {
    Buffer slots;   // [num_ids] int64: at the places of ids that have a slot; the rest is left as it was
    Buffer misses;  // int64: the places of the other ids, in order
  };
  // Looks up the ids at some places of `num_ids`. This round needs them.
  Found find(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count);
  // Gives those that have no slot one, and writes the slots of all to `slots` [num_ids], at their places. Returns the
  // slots given, int64: their rows are still to be written. After all look-ups of a round, so that none is given away
  // whose id that round needs.
  Buffer add(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, int64_t* slots);

  int64_t size() const;        // slots: free ones too
  int64_t num_needed() const;  // ids that this round needs
  Buffer copy_ids() const;     // by slot, that of a free one too

 private:
  size_t begin_of(int64_t id) const;
  size_t entry_from(size_t entry, int64_t id) const;
  void check(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) const;
  void reserve(size_t more);
  int32_t free_slot();
  void need(int32_t slot);
  template <typename At>
  void locate(const int64_t* ids, At place, int64_t size, size_t* at) const;

  Alone alone_;
  struct Slot {
    int64_t id;
    int64_t round;  // the last one that needed the id
  };
  std::vector<Slot> slots_;
  // By id, or by open addressing, a power of two then: slot plus one; 0 is empty. With a hash, an entry whose slot has
  // gone to another id stays until all are entered anew: it matches that other id alone.
  std::vector<int32_t> hashed_ = {0, 0};
  ZeroedPages direct_;
  int32_t* entries_;
  int64_t num_ids_;
  size_t num_entries_ = 0, hand_ = 0, num_passed_ = 0;
  int64_t round_ = 2;
  int64_t num_needed_ = 0;
};

}  // namespace hoploom
