// The in-edges of a whole graph as they lie in a store, read in blocks of nodes. Node ids here count through all types:
// those of the first type, then those of the second. Nothing read is trusted: an id out of range is an exception.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "threads.h"

namespace hoploom {

// The in-edges that one part of a store holds of one relation.
struct InLists {
  const int64_t* indptr;  // [num_lists + 1]
  const void* indices;    // [num_edges] int64 if wide, else int32: ids within the source type
  bool wide;
  int64_t num_lists, num_edges;
  int64_t first_node;                 // the destination of the first list
  int64_t first_source, num_sources;  // the source type's nodes
  int64_t relation;
  std::string name;     // of the relation, for messages
  bool mapped = false;  // both are maps of files that nobody wrote to: their pages may be dropped and come back
};

struct Topology {
  std::vector<int64_t> bounds;  // [num_types + 1]: type t has the nodes bounds[t] to bounds[t + 1] - 1
  std::vector<InLists> lists;
  int64_t num_nodes() const { return bounds.back(); }
  int64_t num_types() const { return int64_t(bounds.size()) - 1; }
  int64_t num_edges() const;
};

// Consecutive nodes of one type, and the lists that lead to them.
struct Block {
  int64_t first, end, type;
  std::vector<const InLists*> lists;
};

// All nodes in order, in at least `at_least` blocks where there are as many nodes. Throws std::out_of_range unless the
// lists fit the types.
std::vector<Block> blocks_of(const Topology& topology, int64_t at_least);

// Drops the whole pages of bytes [begin, end) of an array that is a map of a file, and some before them. What was
// written to such a page would be lost.
void drop(const void* array, int64_t begin, int64_t end);

// Drops the pages of mapped lists that hold those of nodes [first, end), unless they are less than `at_least` bytes:
// pages of a map count as the process's own until then. They stay in the page cache.
void let_go(const Block& block, int64_t first, int64_t end, int64_t at_least = 0);
constexpr int64_t kMany = 256 << 10;  // bytes that are let go before all of a block is

// The first fault that threads come across, by node.
class Faults {
 public:
  void add(const InLists& lists, int64_t node, const std::string& what);
  void raise() const;  // throws std::out_of_range if there is one

 private:
  std::mutex mutex_;
  int64_t node_ = INT64_MAX;
  std::string what_;
};

// Where the list of a node begins and ends; an empty list if that is outside the file.
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
inline Span span_of(const InLists& lists, int64_t node, Faults& faults) {
  const int64_t list = node - lists.first_node;
  const Span span{lists.indptr[list], lists.indptr[list + 1]};
  if (span.begin >= 0 && span.begin <= span.end && span.end <= lists.num_edges) return span;
  faults.add(lists, node, "its list runs from " + std::to_string(span.begin) + " to " + std::to_string(span.end));
  return {0, 0};
}

// take(source) for positions `begin` to `end`; stops at an id that is no source.
template <typename Id, typename Take>
inline void read_span(const InLists& lists, int64_t node, Span span, Faults& faults, Take take) {
  const Id* indices = static_cast<const Id*>(lists.indices);
  for (int64_t position = span.begin; position < span.end; ++position) {
    const int64_t source = int64_t(indices[position]);
    if (uint64_t(source) >= uint64_t(lists.num_sources)) {
      faults.add(
          lists, node,
          "source id " + std::to_string(source) + " is out of range [0, " + std::to_string(lists.num_sources) + ")");
      return;
    }
    take(lists.first_source + source);
  }
}
template <typename Take>
inline void read_sources(const InLists& lists, int64_t node, Span span, Faults& faults, Take take) {
  if (lists.wide) read_span<int64_t>(lists, node, span, faults, take);
  else read_span<int32_t>(lists, node, span, faults, take);
}

// How many edges lead to a node.
inline int64_t degree_of(const Block& block, int64_t node, Faults& faults) {
  int64_t degree = 0;
  for (const InLists* lists : block.lists) degree += span_of(*lists, node, faults).size();
  return degree;
}

// work(thread, first, end) for pieces of [first, end), whichever thread is free.
template <typename Work>
void share_out(int64_t first, int64_t end, int64_t piece, int threads, Work work) {
  std::atomic<int64_t> next{first};
  on_threads(int(std::min<int64_t>(threads, (end - first + piece - 1) / piece)), [&](int thread) {
    for (int64_t at = next.fetch_add(piece); at < end; at = next.fetch_add(piece))
      work(thread, at, std::min(at + piece, end));
  });
}

}  // namespace hoploom
