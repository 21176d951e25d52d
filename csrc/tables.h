// Sums of rows that lie in one or several tables, straight from where they lie; narrow floats are widened on the way.
#pragma once
#include <cstdint>
#include <vector>

namespace hoploom {

enum class Element : int { kFloat32, kFloat16, kBfloat16 };
int64_t element_bytes(Element element);

// The rows of ids [first, first + count).
struct TableRows {
  const uint8_t* rows;
  int64_t first, count;
};

// out[i] = sum (mean) of the rows ids[indptr[i]], ..., ids[indptr[i + 1] - 1], added in this order. Tables ascend by
// `first`. An id that is in none of them throws std::out_of_range before anything else is read.
void sum_tables(const std::vector<TableRows>& tables, Element element, const int64_t* ids, int64_t num_ids,
                const int64_t* indptr, int64_t num_lists, int64_t width, bool mean, float* out);

}  // namespace hoploom
