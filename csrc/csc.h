// COO to CSC by a counting sort: stable, out of place once, several threads, no atomics.
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

Csc build_csc(const int64_t* sources, const int64_t* destinations, int64_t num_edges, int64_t num_sources,
              int64_t num_destinations, int threads);

// Puts every list in time order (stable). Time of an edge: edge_time[permutation[position]], or
// source_time[source]. Exactly one of the two is given.
void order_by_time(Csc& csc, int64_t num_edges, int64_t num_destinations, const int64_t* edge_time,
                   const int64_t* source_time);

}  // namespace hoploom
