// COO to CSC: stable, within the result's own memory, several threads. Edges go to buckets of neighbouring
// destinations, then each bucket is put in order: two sweeps through memory instead of a random write per edge.
// Gives up a second piece of memory as large as the largest bucket: with a hub in it, up to that of the whole result.
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

// How the work is divided. Results do not depend on it.
struct Split {
  int threads;
  int64_t bucket_size;  // edges and lists that one bucket should hold
  Split(int threads, int64_t bucket_size = 1 << 15) : threads(threads), bucket_size(bucket_size) {}
};

// Throws std::out_of_range for an edge with an unknown end.
Csc build_csc(const int64_t* sources, const int64_t* destinations, int64_t num_edges, int64_t num_sources,
              int64_t num_destinations, Split split);

// Puts every list in time order (stable). Time of an edge: edge_time[permutation[position]], or
// source_time[source]. Exactly one of the two is given.
void order_by_time(Csc& csc, int64_t num_edges, int64_t num_destinations, const int64_t* edge_time,
                   const int64_t* source_time);

}  // namespace hoploom
