// Rows on their way to a place that is known only by range: packed into records by bucket, and put in order bucket by
// bucket. Gives up one more pass over the bytes for never holding all of them.
#pragma once
#include <cstdint>
#include <vector>

namespace hoploom {

// One column of a chunk, and where it stands in a record.
struct Column {
  const uint8_t* values;  // [num_rows, row_bytes]
  int64_t row_bytes, offset;
};

// Groups rows by bucket, keeping their order: bucket b takes the keys bounds[b] to bounds[b + 1] - 1. A record begins
// with its key less the bucket's first, in 32 bits. Throws std::out_of_range for a key outside all buckets.
void pack(const int64_t* keys, int64_t num_rows, const std::vector<Column>& columns, int64_t width,
          const int64_t* bounds, int64_t num_buckets, uint8_t* records, int64_t* counts);

struct Records {
  const uint8_t* bytes;  // [count, width]
  int64_t count, width;
};

// out[key] = the record's bytes at an offset. Throws unless every key of [0, num_keys) is there once.
void place(const Records& records, int64_t num_keys, int64_t offset, int64_t row_bytes, uint8_t* out);

// out[i] = the bytes at an offset of record order[i].
void take(const Records& records, const uint32_t* order, int64_t count, int64_t offset, int64_t row_bytes,
          uint8_t* out);

// What decides over the order of the records with the same key.
struct EdgeOrder {
  int64_t source_bytes;  // 4 or 8; the source follows the key
  int64_t time_offset;   // of an int64, ascending; -1: none
  bool canonical;        // then by source, then by all bytes behind it; else as they come
  bool deduplicate;      // of records with the same key and source only the first stays
};

// Lists of records by key: indptr [num_lists + 1], order [records.count]. Returns how many records stay.
int64_t order_edges(const Records& records, int64_t num_lists, const EdgeOrder& how, int threads, int64_t* indptr,
                    uint32_t* order);

}  // namespace hoploom
