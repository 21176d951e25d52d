// Rows that are learned: their initial values, and updates by sparse gradients. A row belongs to one thread, and its
// gradients are added in the order given: the result does not depend on the number of threads.
#pragma once
#include <cstdint>

namespace hoploom {

// Rows first, first + 1, ... of a type, as float32 or bfloat16 (as uint16_t): [num_rows, width].
template <typename T>
struct LearnedRows {
  T* values;
  int64_t num_rows, width, first;
  int64_t stride = width;  // values from one row to the next: the bytes of a record, which has a row and its state
  int file = -1;  // a descriptor, if the records of all rows, from row 0 on, are read and written there, and not here

  T* row(int64_t i) const { return values + i * stride; }
  int64_t record_bytes() const { return stride * int64_t(sizeof(T)); }
};

// How a row follows its gradient, and what is kept beside it (`state_width` floats a row).
enum class RowRule : int {
  kSgd,             // nothing
  kRowwiseAdagrad,  // the sum of the gradients' mean squares
  kAdagrad,         // the sum of their squares, per column
  kLazyAdam,        // both moments per column, and the number of updates of this row
};
int64_t state_width(RowRule rule, int64_t width);

struct RowStep {
  RowRule rule;
  double rate, scale;  // the learning rate; a factor of all gradients
  double eps, beta1, beta2;
  uint64_t key;  // of the random bits that round bfloat16
};

// One gradient of a row: gradients[i] is of row ids[i]. An id may appear several times.
struct RowGradients {
  const int64_t* ids;      // [count]
  const float* gradients;  // [count, width]
  int64_t count, stride;   // floats from one gradient to the next
};

// Updates each row that has a gradient, once, with the sum of its gradients. Throws for ids out of range. A row stays
// with its state if one of them would not be finite afterwards: returns the id of such a row, the last of those that
// threads found, or -1.
template <typename T>
int64_t update_rows(const LearnedRows<T>& rows, const LearnedRows<float>& state, const RowGradients& given,
                    const RowStep& step, int threads);

// Copies the rows of `ids` to `out` [count, width]. Throws for ids out of range.
template <typename T>
void look_up_rows(const LearnedRows<const T>& rows, const int64_t* ids, int64_t count, int threads, float* out);

// Writes initial values: evenly in [-spread, spread), or normal with this standard deviation. Those of a row are a
// function of `key` and its entry in `ids` [num_rows].
template <typename T>
void draw_rows(const LearnedRows<T>& rows, const int64_t* ids, uint64_t key, bool normal, double spread, int threads);

}  // namespace hoploom
