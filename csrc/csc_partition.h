// The first half of building CSC: edges go to buckets of neighbouring destinations, each small enough to be sorted in
// a cache. Values are collected in one cache line per bucket and written line by line, so that a thread can write to
// thousands of positions at a cost of 128 bytes each.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hoploom {

// Edges that another thread may change meanwhile: each id is loaded once, and a later pass compares what it loads
// with the result of the first one.
struct Coo {
  const int64_t* sources;
  const int64_t* destinations;
  int64_t num_edges, num_sources, num_destinations;

  int64_t source(int64_t edge) const { return __atomic_load_n(sources + edge, __ATOMIC_RELAXED); }
  int64_t destination(int64_t edge) const { return __atomic_load_n(destinations + edge, __ATOMIC_RELAXED); }
};

struct Range {
  int64_t begin, end;
};

// The arrays of the result. Between the two halves, the permutation's memory holds records.
template <typename Id>
struct Entries {
  uint64_t* records;
  Id* sources;
};

struct Buckets {
  int shift = 0;  // a bucket has 2^shift destinations
  int edge_bits;  // bits of a record for the edge's position; the bits above hold the last bits of the destination
  int64_t count;

  Buckets(int64_t num_edges, int64_t num_destinations, int64_t most)
      : edge_bits(std::bit_width(uint64_t(num_edges) | 1)) {
    const int64_t last = std::max<int64_t>(num_destinations - 1, 0);
    while (last >> shift >= most && shift + edge_bits < 64) ++shift;
    count = (last >> shift) + 1;
  }
  uint64_t record(int64_t destination, int64_t edge) const {
    return uint64_t(destination) << edge_bits | uint64_t(edge);
  }
  uint64_t edge(uint64_t record) const { return record & ((uint64_t(1) << edge_bits) - 1); }
  size_t place(uint64_t record) const { return record >> edge_bits & ((uint64_t(1) << shift) - 1); }
};

inline bool are_below(uint64_t greatest, int64_t limit) { return limit > 0 && greatest < uint64_t(limit); }

// Write buffer of one thread for one array: a line per bucket, written to memory once it is full. A value keeps its
// offset within its line; at the start and end of a bucket, only the bucket's part of a line is written.
template <typename Value>
class Lines {
 public:
  Lines(Value* array, const std::vector<int64_t>& begins) : array_(array), begins_(begins), lines_(begins.size()) {}

  void put(size_t bucket, size_t position, Value value) {
    const size_t place = position % kLine;
    lines_[bucket].values[place] = value;
    if (place == kLine - 1) write(bucket, position + 1);
  }
  void finish(size_t bucket, size_t end) {
    if (end % kLine && end > size_t(begins_[bucket])) write(bucket, end);
  }

 private:
  static constexpr size_t kLine = 64 / sizeof(Value);
  struct alignas(64) Line {
    Value values[kLine];
  };

  void write(size_t bucket, size_t end) {
    const size_t line = (end - 1) / kLine * kLine, begin = std::max(line, size_t(begins_[bucket]));
    const Value* values = lines_[bucket].values;
    if (end - begin == kLine) write_past_caches(array_ + begin, values);
    else std::memcpy(array_ + begin, values + (begin - line), (end - begin) * sizeof(Value));
  }
  // Bypasses the caches. Arrays are aligned to 16 bytes.
  static void write_past_caches(Value* to, const Value* line) {
#if defined(__SSE2__)
    for (int i = 0; i < 4; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, _mm_load_si128(reinterpret_cast<const __m128i*>(line) + i));
#else
    std::memcpy(to, line, sizeof(Line));
#endif
  }

  Value* array_;
  std::vector<int64_t> begins_;  // [num_buckets] the thread's first position in each
  std::vector<Line> lines_;      // [num_buckets]
};

// The share of one thread. Allocates everything when constructed, because threads must not throw.
template <typename Id>
class Partition {
 public:
  // [num_buckets] first and end position of this thread's edges in each bucket.
  Partition(Entries<Id> entries, std::vector<int64_t> begins, std::vector<int64_t> ends)
      : records_(entries.records, begins),
        sources_(entries.sources, begins),
        cursors_(std::move(begins)),
        ends_(std::move(ends)) {}

  // Returns false if a source is out of range, or if the destinations differ from those that were counted.
  bool run(const Coo& coo, const Buckets& buckets, Range edges) {
    uint64_t greatest = 0;
    for (int64_t e = edges.begin; e < edges.end; ++e) {
      const int64_t source = coo.source(e), destination = coo.destination(e);
      greatest = std::max(greatest, uint64_t(source));
      if (uint64_t(destination) >= uint64_t(coo.num_destinations)) return false;
      const size_t bucket = size_t(destination >> buckets.shift), position = size_t(cursors_[bucket]);
      if (cursors_[bucket]++ >= ends_[bucket]) return false;
      records_.put(bucket, position, buckets.record(destination, e));
      sources_.put(bucket, position, Id(source));
    }
    for (size_t bucket = 0; bucket < cursors_.size(); ++bucket) {
      records_.finish(bucket, size_t(cursors_[bucket]));
      sources_.finish(bucket, size_t(cursors_[bucket]));
    }
#if defined(__SSE2__)
    _mm_sfence();  // makes the writes that bypassed the caches visible to other threads
#endif
    return edges.begin == edges.end || are_below(greatest, coo.num_sources);
  }

 private:
  Lines<uint64_t> records_;
  Lines<Id> sources_;
  std::vector<int64_t> cursors_, ends_;  // [num_buckets]
};

}  // namespace hoploom
