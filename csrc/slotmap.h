// Slots of a table of rows by id. An id that two rounds have not needed gives up its slot, so rows that are needed
// again stay in place. Costs a look-up and saves moving rows. Look-ups are by index if there are few ids, else by hash.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "alone.h"
#include "buffers.h"

namespace hoploom {

class SlotMap {
 public:
  // For ids in [0, num_ids), with 4 bytes per id; num_ids = 0: for any ids, with a hash.
  explicit SlotMap(int64_t num_ids);

  // Begins a round. Slots of ids that neither this round nor the previous one needs become free.
  void begin();

  struct Found {
    Buffer slots;   // [num_ids] int64: slots at the positions of ids that have one; other entries are not written
    Buffer misses;  // int64: positions of the other ids, ascending
  };
  // Looks up the ids at positions `places` of `num_ids`, and marks them as needed in this round.
  Found find(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count);
  // Gives a slot to each id without one, and writes all slots to `slots` [num_ids] at the ids' positions. Returns the
  // new slots, int64, whose rows must still be written. Call it after all look-ups of a round, so that no slot of an
  // id that the round needs is given away.
  Buffer add(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, int64_t* slots);

  int64_t size() const;        // slots, free ones included
  int64_t num_needed() const;  // ids needed in this round
  Buffer copy_ids() const;     // by slot, free ones included

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
    int64_t round;  // the last round that needed the id
  };
  std::vector<Slot> slots_;
  // Slot plus one, by id or by open addressing (a power of two); 0 is empty. In the hash, an entry whose slot was given
  // to another id stays until the next rebuild: its id no longer matches.
  std::vector<int32_t> hashed_ = {0, 0};
  ZeroedPages direct_;
  int32_t* entries_;
  int64_t num_ids_;
  size_t num_entries_ = 0, hand_ = 0, num_passed_ = 0;
  int64_t round_ = 2;
  int64_t num_needed_ = 0;
};

}  // namespace hoploom
