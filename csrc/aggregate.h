// Sums, means, maxima and attention over lists of rows, forward and backward. Every output row belongs to one thread
// and its terms are added in the order of its list: the result does not depend on the number of threads.
#pragma once
#include <cstdint>

#include "bfloat16.h"

namespace hoploom {

// Entry k of list i is row `rows[indptr[i] + k]` of a matrix.
template <typename Id>
struct RowLists {
  const int64_t* indptr;  // [num_lists + 1], from 0, ascending
  const Id* rows;         // [num_entries]
  int64_t num_lists, num_entries;
  const int64_t* places;  // [num_entries] index of an entry's weight; null: the entry's own index
};

// A matrix whose rows may have gaps between them.
template <typename T>
struct Matrix {
  const T* values;
  int64_t num_rows, width, stride;
};

// Weights of entries: `heads` per entry, each for its share of the columns. Null: every weight is one.
template <typename T>
struct Weights {
  const T* values;  // [num_entries, heads]
  int64_t heads;
  // Width of sums; 0: that of rows. For sums `heads` times as wide as rows, each head sums up whole rows; for rows
  // `heads` times as wide as sums, the heads' shares of a row are summed up.
  int64_t sum_width = 0;
};

// Throws std::out_of_range unless `indptr` ascends and every row index is below `num_rows`.
void check_indptr(const int64_t* indptr, int64_t num_lists, int64_t num_entries);
template <typename Id>
void check_lists(const RowLists<Id>& lists, int64_t num_rows);

// out[i] = sum over list i of weight * row; divided by the list's length if `mean`. An empty list gives zeros. Rows of
// Bfloat16 are summed as floats.
template <typename In, typename T, typename Id>
void sum_rows(const RowLists<Id>& lists, const Matrix<In>& x, const Weights<T>& weights, bool mean, int threads,
              In* out);

// out[i] = maximum of weight * row per column, zero for an empty list. winners: the index of the entry that has it, the
// first of equal ones, -1 for an empty list.
template <typename T, typename Id>
void max_rows(const RowLists<Id>& lists, const Matrix<T>& x, const Weights<T>& weights, int threads, T* out,
              int32_t* winners);

// Backward of max_rows over the transposed lists: out[s] = sum of weight * grad[d] over the entries of s that won in d.
template <typename T, typename Id>
void max_rows_backward(const RowLists<Id>& transposed, const int64_t* indptr, const Matrix<T>& grad,
                       const Weights<T>& weights, const int32_t* winners, int threads, T* out);

// out[entry, head] = dot product of a row of x and the list's row of y, over the head's columns; over those of y and
// all of x where y is `heads` times as wide. With `winners` of max_rows, only over columns that the entry has won.
template <typename T, typename Id>
void dot_rows(const RowLists<Id>& lists, const Matrix<T>& x, const Matrix<T>& y, int64_t heads, const int32_t* winners,
              int threads, T* out);

// Softmax within each list, per head, and its backward.
template <typename T>
void softmax_lists(const int64_t* indptr, int64_t num_lists, int64_t heads, const T* scores, int threads, T* out);
template <typename T>
void softmax_lists_backward(const int64_t* indptr, int64_t num_lists, int64_t heads, const T* softmax, const T* grad,
                            int threads, T* out);

}  // namespace hoploom
