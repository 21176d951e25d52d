#include "relabel.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "random.h"

namespace hoploom {
namespace {
constexpr int64_t kAhead = 24;
constexpr int64_t kBlock = 64;  // nodes that are hashed before they are looked up
constexpr size_t kFirstTable = 1024;

uint64_t hash_of(uint64_t tree_hash, int64_t node) { return mix(tree_hash, uint64_t(node)); }
uint64_t hash_of_tree(int64_t tree) { return mix(0, uint64_t(tree)); }
}  // namespace

NodeMap::NodeMap(int64_t num_nodes, int64_t budget) : num_nodes_(num_nodes) {
  has_slots_ = num_nodes <= budget / 4;
  hashed_ = !has_slots_;
  if (has_slots_) slots_ = ZeroedPages(size_t(num_nodes) * 4);
}

// The first nodes of a batch decide between direct map and hash.
void NodeMap::begin(bool with_trees) {
  if (size_ > 0 && with_trees != with_trees_)
    throw std::invalid_argument("a batch has trees for all of its nodes or for none");
  with_trees_ = with_trees;
  hashed_ = with_trees || !has_slots_;
  if (hashed_ && table_.empty()) table_.resize(kFirstTable);
}

void NodeMap::check(int64_t node) const {
  if (uint64_t(node) >= uint64_t(num_nodes_))
    throw std::out_of_range("node id " + std::to_string(node) + " is out of range [0, " + std::to_string(num_nodes_) +
                            ")");
}

void NodeMap::check_from(int64_t from) const {
  if (from < 0 || from > size_) throw std::invalid_argument("from is beyond the nodes");
}

void NodeMap::reserve(int64_t more) {
  if (size_ + more > INT32_MAX) throw std::length_error("a batch holds at most 2^31 nodes");
  const size_t bytes = size_t(size_ + more) * 8;
  nodes_.grow(bytes, size_t(size_) * 8);
  if (with_trees_) trees_.grow(bytes, size_t(size_) * 8);
}

int64_t NodeMap::size() const {
  const auto held = alone_.read();
  return size_;
}

void NodeMap::add_seeds(const int64_t* nodes, const int64_t* trees, int64_t count) {
  const auto held = alone_.change();
  for (int64_t i = 0; i < count; ++i) check(nodes[i]);
  begin(trees != nullptr);
  reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    if (direct()) {
      int32_t& slot = slots_.as<int32_t>()[nodes[i]];
      if (slot == 0) slot = int32_t(size_) + 1;
    } else {
      const int32_t before = int32_t(size_);
      const int64_t tree = trees ? trees[i] : 0;
      const int32_t local = insert(hash_of(hash_of_tree(tree), nodes[i]), nodes[i], tree);
      if (local == before) continue;  // appended by insert()
    }
    if (with_trees_) trees_.as<int64_t>()[size_] = trees[i];
    nodes_.as<int64_t>()[size_++] = nodes[i];
  }
}

void NodeMap::add_direct(const int64_t* sources, int64_t count, int32_t* local) {
  int32_t* slots = slots_.as<int32_t>();
  int64_t* nodes = nodes_.as<int64_t>();
  int64_t size = size_;
  const uint64_t limit = uint64_t(num_nodes_);
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count && uint64_t(sources[i + kAhead]) < limit) __builtin_prefetch(slots + sources[i + kAhead], 1);
    const int64_t node = sources[i];
    if (uint64_t(node) >= limit) {
      size_ = size;
      check(node);
    }
    // No branch on "new or seen": a mispredicted branch costs more than two superfluous stores.
    int32_t slot = slots[node];
    const bool fresh = slot == 0;
    slot = fresh ? int32_t(size) + 1 : slot;
    slots[node] = slot;
    nodes[size] = node;
    size += fresh;
    local[i] = slot - 1;
  }
  size_ = size;
}

Buffer NodeMap::add(const int64_t* sources, int64_t count, const int64_t* counts, const int64_t* frontier_trees) {
  const auto held = alone_.change();
  begin(frontier_trees != nullptr);
  reserve(count + 1);
  Buffer out(size_t(count) * 4);
  int32_t* local = out.as<int32_t>();
  if (direct() && !with_trees_) {
    add_direct(sources, count, local);
    return out;
  }
  // Hashes some sources ahead, so that their slots are in the cache when they are looked up.
  uint64_t hashes[kBlock];
  int64_t trees[kBlock], owner = -1, tree = 0, left = 0;
  uint64_t tree_hash = hash_of_tree(0);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    for (int64_t j = 0; j < size; ++j, --left) {
      check(sources[begin + j]);
      while (left == 0) {
        left = counts[++owner];
        tree = with_trees_ ? frontier_trees[owner] : 0;
        tree_hash = hash_of_tree(tree);
      }
      trees[j] = tree;
      hashes[j] = hash_of(tree_hash, sources[begin + j]);
      __builtin_prefetch(&table_[hashes[j] & (table_.size() - 1)], 1);
    }
    for (int64_t j = 0; j < size; ++j) local[begin + j] = insert(hashes[j], sources[begin + j], trees[j]);
  }
  return out;
}

size_t NodeMap::slot_of(uint64_t hash, int64_t node, int64_t tree) const {
  const int64_t *nodes = nodes_.as<int64_t>(), *trees = trees_.as<int64_t>();
  const size_t mask = table_.size() - 1;
  for (size_t slot = hash & mask;; slot = (slot + 1) & mask) {
    const auto [tag, local] = table_[slot];
    if (!local) return slot;
    if (tag == uint32_t(hash >> 32) && nodes[local - 1] == node && (!with_trees_ || trees[local - 1] == tree))
      return slot;
  }
}

// Returns the local id of (node, tree); appends it if it is new.
int32_t NodeMap::insert(uint64_t hash, int64_t node, int64_t tree) {
  if (used_.size() * 2 >= table_.size()) grow_table();
  const size_t slot = slot_of(hash, node, tree);
  if (table_[slot].local) return table_[slot].local - 1;
  table_[slot] = {uint32_t(hash >> 32), int32_t(size_) + 1};
  used_.push_back(slot);
  nodes_.as<int64_t>()[size_] = node;
  if (with_trees_) trees_.as<int64_t>()[size_] = tree;
  return int32_t(size_++);
}

void NodeMap::grow_table() {
  std::vector<Slot> old = std::move(table_);
  table_.assign(old.size() * 2, Slot{});
  for (size_t& used : used_) {
    const int32_t at = old[used].local - 1;
    const int64_t node = nodes_.as<int64_t>()[at], tree = with_trees_ ? trees_.as<int64_t>()[at] : 0;
    const Slot entry = old[used];
    used = slot_of(hash_of(hash_of_tree(tree), node), node, tree);
    table_[used] = entry;
  }
}

Buffer NodeMap::find(const int64_t* sources, int64_t count, const int64_t* trees) const {
  const auto held = alone_.read();
  if (size_ > 0 && with_trees_ != (trees != nullptr))
    throw std::invalid_argument("a batch has trees for all of its nodes or for none");
  Buffer out(size_t(count) * 4);
  int32_t* local = out.as<int32_t>();
  const int32_t* slots = slots_.as<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (direct() && i + kAhead < count && uint64_t(sources[i + kAhead]) < uint64_t(num_nodes_))
      __builtin_prefetch(slots + sources[i + kAhead]);
    check(sources[i]);
    const int64_t node = sources[i], tree = trees ? trees[i] : 0;
    if (direct()) local[i] = slots[node] - 1;
    else local[i] = table_.empty() ? -1 : table_[slot_of(hash_of(hash_of_tree(tree), node), node, tree)].local - 1;
  }
  return out;
}

Buffer NodeMap::copy_nodes(int64_t from) const {
  const auto held = alone_.read();
  check_from(from);
  Buffer out(size_t(size_ - from) * 8);
  if (size_ > from) std::memcpy(out.as<int64_t>(), nodes_.as<int64_t>() + from, out.size());
  return out;
}

Buffer NodeMap::copy_trees(int64_t from) const {
  const auto held = alone_.read();
  check_from(from);
  Buffer out(size_t(size_ - from) * 8);
  if (!with_trees_ && size_ > from) throw std::invalid_argument("this batch has no trees");
  if (size_ > from) std::memcpy(out.as<int64_t>(), trees_.as<int64_t>() + from, out.size());
  return out;
}

Buffer NodeMap::take() {
  const auto held = alone_.change();
  const size_t bytes = size_t(size_) * 8;
  forget();
  Buffer out = std::move(nodes_);
  nodes_ = Buffer();
  out.trim(bytes);
  return out;
}

void NodeMap::clear() {
  const auto held = alone_.change();
  forget();
}

void NodeMap::forget() {
  if (direct()) {
    int32_t* slots = slots_.as<int32_t>();
    const int64_t* nodes = nodes_.as<int64_t>();
    for (int64_t i = 0; i < size_; ++i) {
      if (i + kAhead < size_) __builtin_prefetch(slots + nodes[i + kAhead], 1);
      slots[nodes[i]] = 0;
    }
  } else {
    for (size_t slot : used_) table_[slot].local = 0;
    used_.clear();
  }
  size_ = 0;
}

}  // namespace hoploom
