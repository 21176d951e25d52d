// Sums of rows that are in one or several tables, read in place; narrow floats are widened on the way.
#pragma once
#include <cstdint>
#include <vector>

namespace hoploom {

enum class Element : int { kFloat32, kFloat16, kBfloat16 };
int64_t element_bytes(Element element);

// A table of the rows of ids [first, first + count).
struct TableRows {
  const uint8_t* rows;
  int64_t first, count;
};

// out[i] = sum (mean) of the rows ids[indptr[i]], ..., ids[indptr[i + 1] - 1], added in this order. Tables ascend by
// `first`. Throws std::out_of_range before the first read if an id is in none of them.
void sum_tables(const std::vector<TableRows>& tables, Element element, const int64_t* ids, int64_t num_ids,
                const int64_t* indptr, int64_t num_lists, int64_t width, bool mean, float* out);

}  // namespace hoploom
