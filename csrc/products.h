// Matrix products of a linear layer: its output rows, and the gradients of its input and of its weight. Results have
// the same bits for any number of threads.
#pragma once
#include "aggregate.h"

namespace hoploom {

// Whether these products are compiled for vectors that MKL, torch's library, does not use on this processor: it takes
// AVX2 on those of AMD.
bool has_fast_products();

// out [x.num_rows, width] = x times `by`, plus `bias` [width] if it is not null. `by` is [x.width, width], or
// [width, x.width] if `turned`.
void multiply_rows(const Matrix<float>& x, const float* by, int64_t width, bool turned, const float* bias, int threads,
                   float* out);

// out [a.width, b.width] = a, transposed, times b, which has as many rows; sums [a.width], unless null, are those of
// the columns of a.
void multiply_columns(const Matrix<float>& a, const Matrix<float>& b, int threads, float* out, float* sums);

}  // namespace hoploom
