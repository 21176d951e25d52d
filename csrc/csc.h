// COO to CSC: stable, in the result's own memory, on several threads. Edges go to buckets of neighbouring destinations,
// then each bucket is sorted: two passes through memory instead of a random write per edge.
// Costs memory for one more bucket per thread; with a hub in it, a bucket can be as large as the result.
#pragma once
#include <cstdint>

#include "buffers.h"

namespace hoploom {

struct Csc {
  Buffer indptr;       // [num_destinations + 1] int64
  Buffer indices;      // [num_edges] int32 while ids fit, else int64
  Buffer permutation;  // [num_edges] int64: CSC position -> input position; empty if identical
  bool wide_ids, is_identity;
};

// The division of the work. Results do not depend on it.
struct Split {
  int threads;
  int64_t bucket_size;  // edges and lists per bucket, about
  Split(int threads, int64_t bucket_size = 1 << 15) : threads(threads), bucket_size(bucket_size) {}
};

// Throws std::out_of_range if an id of an edge is out of range.
Csc build_csc(const int64_t* sources, const int64_t* destinations, int64_t num_edges, int64_t num_sources,
              int64_t num_destinations, Split split);

// Sorts every list by time (stable). The time of an edge is edge_time[permutation[position]] or source_time[source];
// exactly one of the two arrays is given.
void order_by_time(Csc& csc, int64_t num_edges, int64_t num_destinations, const int64_t* edge_time,
                   const int64_t* source_time);

}  // namespace hoploom
