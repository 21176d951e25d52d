// Moving rows: gathers by id, and the stitching of per-part answers.
#pragma once
#include <cstdint>

#include "buffers.h"

namespace hoploom {

// out[i] = table[ids[i] - first], rows of any size. Ids outside [first, first + num_rows) throw
// before anything else is read.
void gather(const uint8_t* table, int64_t num_rows, int64_t row_bytes, const int64_t* ids, int64_t count, int64_t first,
            uint8_t* out);

// The same where they belong: out[places[i]] = table[ids[places[i]] - first], of `num_ids` ids and output rows. Places
// outside [0, num_ids) throw as well.
void gather_at(const uint8_t* table, int64_t num_rows, int64_t row_bytes, const int64_t* ids, int64_t num_ids,
               const int64_t* places, int64_t count, int64_t first, uint8_t* out);

// Which part owns each id: part p has the ids from bounds[p - 1] on, up to bounds[p]. `routed` takes the positions of
// all ids, those of part 0 first, each part's in order; `counts` [num_bounds + 1] how many each part has. The ends are
// open: what lies beyond them falls to the first or last part.
void route(const int64_t* ids, int64_t count, const int64_t* bounds, int64_t num_bounds, int64_t* routed,
           int64_t* counts);

// The same for the ids at some places [count] of `num_ids`; `routed` takes these places.
void route_at(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, const int64_t* bounds,
              int64_t num_bounds, int64_t* routed, int64_t* counts);

// Writes rows at places: out[places[i]] = rows[i].
void scatter(const uint8_t* rows, int64_t row_bytes, const int64_t* places, int64_t count, int64_t out_rows,
             uint8_t* out);

// The two rows of an edge_index: local source ids, and each frontier position repeated.
void edge_rows(const int32_t* local, int64_t picks, const int64_t* counts, int64_t frontier_size, int64_t first,
               int64_t* sources, int64_t* destinations);

}  // namespace hoploom
