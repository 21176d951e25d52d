// The in-edges of a whole graph, read in blocks of nodes, from memory or in pieces from files. Node ids run through all
// types: first the nodes of the first type, then those of the second. An id out of range throws.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "threads.h"

namespace hoploom {

// The in-edges of one relation in one part of a store.
struct InLists {
  const int64_t* indptr;  // [num_lists + 1]; null: both arrays are read from files
  const void* indices;    // [num_edges] int64 if wide, else int32: ids within the source type
  bool wide;
  int64_t num_lists, num_edges;
  int64_t first_node;                 // the destination of the first list
  int64_t first_source, num_sources;  // the source type's nodes
  int64_t relation;
  std::string name;  // of the relation, for messages
};

// Reads bytes [begin, begin + count) of an array into memory; arrays 2 * i and 2 * i + 1 are indptr and indices of
// lists i. Called by several threads at a time.
using ReadArray = std::function<void(int64_t array, int64_t begin, int64_t count, void* into)>;

struct Topology {
  std::vector<int64_t> bounds;  // [num_types + 1]: type t has the nodes bounds[t] to bounds[t + 1] - 1
  std::vector<InLists> lists;
  ReadArray read;
  int64_t num_nodes() const { return bounds.back(); }
  int64_t num_types() const { return int64_t(bounds.size()) - 1; }
  int64_t num_edges() const;
};

// A range of nodes of one type, and the lists of their in-edges.
struct Block {
  int64_t first, end, type;
  std::vector<const InLists*> lists;
  int64_t piece;  // nodes that a thread takes at a time
};

// Returns all nodes in order, in at least `at_least` blocks if there are as many nodes. Throws std::out_of_range
// unless the lists fit the types.
std::vector<Block> blocks_of(const Topology& topology, int64_t at_least);

// The error with the lowest node among those that threads find.
class Faults {
 public:
  void add(const InLists& lists, int64_t node, const std::string& what);
  void raise() const;  // throws std::out_of_range if there is one

 private:
  std::mutex mutex_;
  int64_t node_ = INT64_MAX;
  std::string what_;
};

// Positions [begin, end) of edges.
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// A range of lists of one relation, and a window of their sources.
class ListReader {
 public:
  // Opens the lists of nodes [first, end). A window of a file has `window_bytes`.
  void open(const Topology& topology, const InLists& lists, int64_t first, int64_t end, int64_t window_bytes);
  const InLists& lists() const { return *lists_; }
  // Returns the range of a node's list; an empty one if it is outside the file.
  Span span_of(int64_t node, Faults& faults) const {
    const Span span{indptr_[node - first_], indptr_[node - first_ + 1]};
    if (span.begin >= 0 && span.begin <= span.end && span.end <= lists_->num_edges) return span;
    faults.add(*lists_, node, "its list runs from " + std::to_string(span.begin) + " to " + std::to_string(span.end));
    return {0, 0};
  }
  // Calls take(source) for the edges of a span; stops at a source out of range.
  template <typename Take>
  void each_source(int64_t node, Span span, Faults& faults, Take take) {
    while (span.begin < span.end) {
      const int64_t end = std::min(span.end, window_.begin <= span.begin ? window_.end : span.begin);
      if (end <= span.begin) {
        fill_window(span.begin);
        continue;
      }
      const bool all = lists_->wide ? each_of<int64_t>(node, {span.begin, end}, faults, take)
                                    : each_of<int32_t>(node, {span.begin, end}, faults, take);
      if (!all) return;
      span.begin = end;
    }
  }

 private:
  void fill_window(int64_t begin);
  template <typename Id, typename Take>
  bool each_of(int64_t node, Span span, Faults& faults, Take take) const {
    const Id* indices = static_cast<const Id*>(sources_) + (span.begin - window_.begin);
    for (const Id* end = indices + span.size(); indices != end; ++indices) {
      const int64_t source = int64_t(*indices);
      if (uint64_t(source) >= uint64_t(lists_->num_sources)) {
        faults.add(*lists_, node,
                   "source id " + std::to_string(source) + " is out of range [0, " +
                       std::to_string(lists_->num_sources) + ")");
        return false;
      }
      take(lists_->first_source + source);
    }
    return true;
  }

  const Topology* topology_ = nullptr;
  const InLists* lists_ = nullptr;
  int64_t first_ = 0;
  const int64_t* indptr_ = nullptr;  // of the list of node `first_`
  const void* sources_ = nullptr;    // of the edges in the window
  Span window_{0, 0};
  int64_t last_ = 0;  // the end of the last list
  int64_t window_bytes_ = 0;
  std::vector<int64_t> read_indptr_;
  std::vector<char> read_sources_;
};

// One thread's reader of the lists of a piece of a block.
struct PieceReader {
  std::vector<ListReader> lists;

  void open(const Topology& topology, const Block& block, int64_t first, int64_t end);
  int64_t degree_of(int64_t node, Faults& faults) const {
    int64_t degree = 0;
    for (const ListReader& reader : lists) degree += reader.span_of(node, faults).size();
    return degree;
  }
};

// Calls work(thread, reader, first, end) for the pieces of a block on all threads. `readers` has one per thread.
template <typename Work>
void share_out(const Topology& topology, const Block& block, std::vector<PieceReader>& readers, Work work) {
  std::atomic<int64_t> next{block.first};
  const int64_t pieces = (block.end - block.first + block.piece - 1) / block.piece;
  on_threads(int(std::min<int64_t>(int64_t(readers.size()), pieces)), [&](int thread) {
    PieceReader& reader = readers[size_t(thread)];
    for (int64_t at = next.fetch_add(block.piece); at < block.end; at = next.fetch_add(block.piece)) {
      const int64_t end = std::min(at + block.piece, block.end);
      reader.open(topology, block, at, end);
      work(thread, reader, at, end);
    }
  });
}

// Drops from memory the whole pages of bytes [begin, end) of an array in a mapped file, and some before them. Bytes
// written to such a page would be lost.
void drop(const void* array, int64_t begin, int64_t end);

}  // namespace hoploom
