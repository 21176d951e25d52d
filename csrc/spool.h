// Rows on their way to a position within a known range: packed into records by bucket, then sorted bucket by bucket.
// Costs one more pass over the bytes; never holds all of them.
#pragma once
#include <cstdint>
#include <vector>

namespace hoploom {

// One column of a chunk, and its offset in a record.
struct Column {
  const uint8_t* values;  // [num_rows, row_bytes]
  int64_t row_bytes, offset;
};

// Groups rows by bucket and keeps their order: bucket b has the keys in [bounds[b], bounds[b + 1]). A record begins
// with its key minus the bucket's first key, in 32 bits. Throws std::out_of_range for a key outside all buckets.
void pack(const int64_t* keys, int64_t num_rows, const std::vector<Column>& columns, int64_t width,
          const int64_t* bounds, int64_t num_buckets, uint8_t* records, int64_t* counts);

struct Records {
  const uint8_t* bytes;  // [count, width]
  int64_t count, width;
};

// out[key] = bytes of the record at `offset`. Throws unless every key of [0, num_keys) occurs once.
void place(const Records& records, int64_t num_keys, int64_t offset, int64_t row_bytes, uint8_t* out);

// out[i] = bytes at `offset` of record order[i].
void take(const Records& records, const uint32_t* order, int64_t count, int64_t offset, int64_t row_bytes,
          uint8_t* out);

// The order of records with equal keys.
struct EdgeOrder {
  int64_t source_bytes;  // 4 or 8; the source follows the key
  int64_t time_offset;   // offset of an int64 to sort by; -1: none
  bool canonical;        // then by source, then by all bytes after it; else in the order of arrival
  bool deduplicate;      // keep only the first record of each key and source
};

// Writes lists of records by key: indptr [num_lists + 1], order [records.count]. Returns the number of records kept.
int64_t order_edges(const Records& records, int64_t num_lists, const EdgeOrder& how, int threads, int64_t* indptr,
                    uint32_t* order);

}  // namespace hoploom
