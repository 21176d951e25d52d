// Global ids to batch-local ids, in the order of first occurrence.
// Takes a map of one slot per node and saves hashing; above its memory budget it hashes.
#pragma once
#include <cstdint>
#include <vector>

#include "alone.h"
#include "buffers.h"

namespace hoploom {

// The nodes of one type in one batch. Reused by the next batch: it resets only the slots in use. Not thread-safe: a
// second thread gets std::logic_error.
class NodeMap {
 public:
  // The direct map is used if it fits `budget` bytes. Disjoint trees always hash.
  NodeMap(int64_t num_nodes, int64_t budget);

  // Appends every seed, also repeated ones; look-ups find the first of equal seeds.
  void add_seeds(const int64_t* nodes, const int64_t* trees, int64_t count);
  // Returns local ids of the sources; appends new nodes. `counts` and `frontier_trees` give the tree of each source.
  Buffer add(const int64_t* sources, int64_t count, const int64_t* counts, const int64_t* frontier_trees);
  // Returns local ids, -1 for nodes that are not in the batch (or not in the tree given per source). Adds nothing.
  Buffer find(const int64_t* sources, int64_t count, const int64_t* trees = nullptr) const;

  int64_t size() const;
  Buffer copy_nodes(int64_t from) const;
  Buffer copy_trees(int64_t from) const;
  // Moves the node list out and clears the map.
  Buffer take();
  void clear();

 private:
  struct Slot {
    uint32_t tag;   // the upper bits of the hash
    int32_t local;  // local id plus one; 0 is empty
  };
  bool direct() const { return !hashed_; }
  void begin(bool with_trees);
  void forget();
  void reserve(int64_t more);
  void check(int64_t node) const;
  void check_from(int64_t from) const;
  size_t slot_of(uint64_t hash, int64_t node, int64_t tree) const;
  int32_t insert(uint64_t hash, int64_t node, int64_t tree);
  void grow_table();
  void add_direct(const int64_t* sources, int64_t count, int32_t* local);

  Alone alone_;
  int64_t num_nodes_;
  ZeroedPages slots_;         // direct: [num_nodes] int32, local id plus one
  std::vector<Slot> table_;   // hashed: open addressing, a power of two
  std::vector<size_t> used_;  // hashed: the slots in use
  Buffer nodes_, trees_;
  bool has_slots_ = false, hashed_ = false, with_trees_ = false;
  int64_t size_ = 0;
};

}  // namespace hoploom
