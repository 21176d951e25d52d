// Row copies: gathers by id, and the stitching of results from several parts.
#pragma once
#include <cstdint>

#include "buffers.h"

namespace hoploom {

// Throws for the first id outside [first, first + num_rows).
void check_ids(const int64_t* ids, int64_t count, int64_t first, int64_t num_rows);

// out[i] = table[ids[i] - first], rows of any size. Ids outside [first, first + num_rows) throw
// before anything else is read.
void gather(const uint8_t* table, int64_t num_rows, int64_t row_bytes, const int64_t* ids, int64_t count, int64_t first,
            uint8_t* out);

// Scattered gather: out[places[i]] = table[ids[places[i]] - first], for `num_ids` ids and output rows. An index
// outside [0, num_ids) throws, too.
void gather_at(const uint8_t* table, int64_t num_rows, int64_t row_bytes, const int64_t* ids, int64_t num_ids,
               const int64_t* places, int64_t count, int64_t first, uint8_t* out);

// Sorts ids by the part that owns them: part p owns the ids in [bounds[p - 1], bounds[p]). `routed` gets the positions
// of all ids, those of part 0 first, ascending within a part; `counts` [num_bounds + 1] the number per part. Ids below
// the first bound count for the first part, ids from the last bound on for the last.
void route(const int64_t* ids, int64_t count, const int64_t* bounds, int64_t num_bounds, int64_t* routed,
           int64_t* counts);

// As above, for the ids at positions `places` [count] of `num_ids`; `routed` gets these positions.
void route_at(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count, const int64_t* bounds,
              int64_t num_bounds, int64_t* routed, int64_t* counts);

// Scatters rows: out[places[i]] = rows[i].
void scatter(const uint8_t* rows, int64_t row_bytes, const int64_t* places, int64_t count, int64_t out_rows,
             uint8_t* out);

// Writes the two rows of an edge_index: local source ids, and each frontier position repeated `count` times.
void edge_rows(const int32_t* local, int64_t picks, const int64_t* counts, int64_t frontier_size, int64_t first,
               int64_t* sources, int64_t* destinations);

}  // namespace hoploom
