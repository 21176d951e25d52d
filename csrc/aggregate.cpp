// Rows are prefetched some entries ahead, across the ends of lists; a list's sum stays in the first-level cache.
#include "aggregate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "ahead.h"

namespace hoploom {
namespace {

HOPLOOM_INLINE float widened(float value) { return value; }
HOPLOOM_INLINE double widened(double value) { return value; }

template <typename T, typename In>
HOPLOOM_INLINE void add(T* __restrict out, const In* __restrict row, int64_t width) {
  for (int64_t c = 0; c < width; ++c) out[c] += widened(row[c]);
}

template <typename T, typename In>
HOPLOOM_INLINE void add_scaled(T* __restrict out, const In* __restrict row, T weight, int64_t width) {
  for (int64_t c = 0; c < width; ++c) out[c] += weight * widened(row[c]);
}

// T is the type of weights and sums. A sum of another type than the rows is rounded once, at its end.
template <typename In, typename T, typename Id>
HOPLOOM_INLINE void sum_range(const RowLists<Id>& lists, const Matrix<In>& x, const Weights<T>& weights, bool mean,
                              int64_t from, int64_t to, In* out) {
  const int64_t width = weights.sum_width ? weights.sum_width : x.width;
  const int64_t share = weights.values ? std::max(width, x.width) / weights.heads : width;
  const int64_t step = x.width > share ? share : 0, sum_step = width > share ? share : 0;
  const int64_t ahead = entries_ahead(x.width * int64_t(sizeof(In)));
  std::vector<T> wide(std::is_same_v<In, T> ? 0 : width);
  for (int64_t i = from; i < to; ++i) {
    const int64_t begin = lists.indptr[i], end = lists.indptr[i + 1];
    T* total = wide.data();
    if constexpr (std::is_same_v<In, T>) total = out + i * width;
    std::fill_n(total, width, T(0));
    for (int64_t e = begin; e < end; ++e) {
      request_entry(lists, x, e + ahead);
      const In* row = x.values + int64_t(lists.rows[e]) * x.stride;
      if (!weights.values) {
        add(total, row, width);
        continue;
      }
      const T* weight = weights.values + (lists.places ? lists.places[e] : e) * weights.heads;
      for (int64_t h = 0; h < weights.heads; ++h) add_scaled(total + h * sum_step, row + h * step, weight[h], share);
    }
    if (mean && end - begin > 1) {
      const T scale = T(1) / T(end - begin);
      for (int64_t c = 0; c < width; ++c) total[c] *= scale;
    }
    if constexpr (!std::is_same_v<In, T>)
      for (int64_t c = 0; c < width; ++c) out[i * width + c] = rounded(total[c]);
  }
}

template <typename T>
HOPLOOM_INLINE const T* weights_at(const Weights<T>& weights, int64_t place) {
  static constexpr T kOne = 1;
  return weights.values ? weights.values + place * weights.heads : &kOne;
}

template <typename T, typename Id>
HOPLOOM_INLINE void max_range(const RowLists<Id>& lists, const Matrix<T>& x, const Weights<T>& weights, int64_t from,
                              int64_t to, T* out, int32_t* winners) {
  const int64_t width = x.width, heads = weights.values ? weights.heads : 1, share = width / heads;
  const int64_t ahead = entries_ahead(width * int64_t(sizeof(T)));
  for (int64_t i = from; i < to; ++i) {
    const int64_t begin = lists.indptr[i], end = lists.indptr[i + 1];
    T* __restrict best = out + i * width;
    int32_t* __restrict winner = winners + i * width;
    std::fill_n(best, width, T(0));
    std::fill_n(winner, width, begin == end ? -1 : 0);
    for (int64_t e = begin; e < end; ++e) {
      request_entry(lists, x, e + ahead);
      const T* __restrict row = x.values + int64_t(lists.rows[e]) * x.stride;
      const T* weight = weights_at(weights, e);
      for (int64_t h = 0; h < heads; ++h) {
        const T factor = weight[h];
        const int64_t until = (h + 1) * share;
        if (e == begin) {
          for (int64_t c = h * share; c < until; ++c) best[c] = factor * row[c];
          continue;
        }
        for (int64_t c = h * share; c < until; ++c) {
          const T value = factor * row[c];
          const bool wins = value > best[c] || (value != value && best[c] == best[c]);  // the first NaN wins
          best[c] = wins ? value : best[c];
          winner[c] = wins ? int32_t(e - begin) : winner[c];
        }
      }
    }
  }
}

template <typename T, typename Id>
HOPLOOM_INLINE void max_backward_range(const RowLists<Id>& lists, const int64_t* indptr, const Matrix<T>& grad,
                                       const Weights<T>& weights, const int32_t* winners, int64_t from, int64_t to,
                                       T* out) {
  const int64_t width = grad.width, heads = weights.values ? weights.heads : 1, share = width / heads;
  for (int64_t s = from; s < to; ++s) {
    T* __restrict total = out + s * width;
    std::fill_n(total, width, T(0));
    for (int64_t e = lists.indptr[s]; e < lists.indptr[s + 1]; ++e) {
      const int64_t d = int64_t(lists.rows[e]), place = lists.places ? lists.places[e] : e;
      const int32_t entry = int32_t(place - indptr[d]);
      const T* __restrict row = grad.values + d * grad.stride;
      const int32_t* __restrict winner = winners + d * width;
      const T* weight = weights_at(weights, place);
      for (int64_t h = 0; h < heads; ++h) {
        const T factor = weight[h];
        for (int64_t c = h * share; c < (h + 1) * share; ++c) total[c] += winner[c] == entry ? factor * row[c] : T(0);
      }
    }
  }
}

// Eight partial sums in a fixed order: the same result on every processor. Only columns that `entry` has won count.
template <bool has_winners, typename T>
HOPLOOM_INLINE T dot(const T* __restrict a, const T* __restrict b, const int32_t* __restrict winner, int32_t entry,
                     int64_t width) {
  const auto product = [&](int64_t c) __attribute__((always_inline)) {
    return !has_winners || winner[c] == entry ? a[c] * b[c] : T(0);
  };
  T part[8] = {};
  int64_t c = 0;
  for (; c + 8 <= width; c += 8)
    for (int64_t k = 0; k < 8; ++k) part[k] += product(c + k);
  for (int64_t k = 0; c < width; ++c, ++k) part[k] += product(c);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

template <bool has_winners, typename T, typename Id>
HOPLOOM_INLINE void dot_range(const RowLists<Id>& lists, const Matrix<T>& x, const Matrix<T>& y, int64_t heads,
                              const int32_t* winners, int64_t from, int64_t to, T* out) {
  const int64_t share = y.width / heads, step = x.width > share ? share : 0;
  const int64_t ahead = entries_ahead(x.width * int64_t(sizeof(T)));
  for (int64_t i = from; i < to; ++i)
    for (int64_t e = lists.indptr[i]; e < lists.indptr[i + 1]; ++e) {
      request_entry(lists, x, e + ahead);
      const T* row = x.values + int64_t(lists.rows[e]) * x.stride;
      for (int64_t h = 0; h < heads; ++h) {
        const int32_t* winner = has_winners ? winners + i * y.width + h * share : nullptr;
        out[e * heads + h] = dot<has_winners>(row + h * step, y.values + i * y.stride + h * share, winner,
                                              int32_t(e - lists.indptr[i]), share);
      }
    }
}

}  // namespace

void check_indptr(const int64_t* indptr, int64_t num_lists, int64_t num_entries) {
  bool holds = indptr[0] == 0 && indptr[num_lists] == num_entries;
  for (int64_t i = 0; i < num_lists; ++i) holds &= indptr[i] <= indptr[i + 1];
  if (!holds) throw std::out_of_range("indptr does not ascend from 0 to the number of edges");
}

template <typename Id>
void check_lists(const RowLists<Id>& lists, int64_t num_rows) {
  check_indptr(lists.indptr, lists.num_lists, lists.num_entries);
  bool outside = false;
  for (int64_t e = 0; e < lists.num_entries; ++e) outside |= uint64_t(int64_t(lists.rows[e])) >= uint64_t(num_rows);
  if (outside) throw std::out_of_range("an edge's end is out of range [0, " + std::to_string(num_rows) + ")");
  if (!lists.places) return;
  for (int64_t e = 0; e < lists.num_entries; ++e) outside |= uint64_t(lists.places[e]) >= uint64_t(lists.num_entries);
  if (outside) throw std::out_of_range("an edge's place is out of range");
}

template <typename In, typename T, typename Id>
void sum_rows(const RowLists<Id>& lists, const Matrix<In>& x, const Weights<T>& weights, bool mean, int threads,
              In* out) {
  in_shares(lists.indptr, lists.num_lists, threads, x.width, [&](int64_t from, int64_t to) {
    run_fastest<sum_range<In, T, Id>>(lists, x, weights, mean, from, to, out);
  });
}

template <typename T, typename Id>
void max_rows(const RowLists<Id>& lists, const Matrix<T>& x, const Weights<T>& weights, int threads, T* out,
              int32_t* winners) {
  in_shares(lists.indptr, lists.num_lists, threads, x.width, [&](int64_t from, int64_t to) {
    run_fastest<max_range<T, Id>>(lists, x, weights, from, to, out, winners);
  });
}

template <typename T, typename Id>
void max_rows_backward(const RowLists<Id>& transposed, const int64_t* indptr, const Matrix<T>& grad,
                       const Weights<T>& weights, const int32_t* winners, int threads, T* out) {
  in_shares(transposed.indptr, transposed.num_lists, threads, grad.width, [&](int64_t from, int64_t to) {
    run_fastest<max_backward_range<T, Id>>(transposed, indptr, grad, weights, winners, from, to, out);
  });
}

template <typename T, typename Id>
void dot_rows(const RowLists<Id>& lists, const Matrix<T>& x, const Matrix<T>& y, int64_t heads, const int32_t* winners,
              int threads, T* out) {
  in_shares(lists.indptr, lists.num_lists, threads, x.width, [&](int64_t from, int64_t to) {
    if (winners) run_fastest<dot_range<true, T, Id>>(lists, x, y, heads, winners, from, to, out);
    else run_fastest<dot_range<false, T, Id>>(lists, x, y, heads, winners, from, to, out);
  });
}

template <typename T>
void softmax_lists(const int64_t* indptr, int64_t num_lists, int64_t heads, const T* scores, int threads, T* out) {
  in_shares(indptr, num_lists, threads, heads, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t begin = indptr[i] * heads + h, end = indptr[i + 1] * heads;
        T greatest = begin < end ? scores[begin] : T(0), total = 0;
        for (int64_t e = begin; e < end; e += heads) greatest = std::max(greatest, scores[e]);
        for (int64_t e = begin; e < end; e += heads) total += out[e] = std::exp(scores[e] - greatest);
        for (int64_t e = begin; e < end; e += heads) out[e] /= total;
      }
  });
}

template <typename T>
void softmax_lists_backward(const int64_t* indptr, int64_t num_lists, int64_t heads, const T* softmax, const T* grad,
                            int threads, T* out) {
  in_shares(indptr, num_lists, threads, heads, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t begin = indptr[i] * heads + h, end = indptr[i + 1] * heads;
        T total = 0;
        for (int64_t e = begin; e < end; e += heads) total += softmax[e] * grad[e];
        for (int64_t e = begin; e < end; e += heads) out[e] = softmax[e] * (grad[e] - total);
      }
  });
}

#define HOPLOOM_INSTANCES(T, Id)                                                                            \
  template void sum_rows(const RowLists<Id>&, const Matrix<T>&, const Weights<T>&, bool, int, T*);          \
  template void max_rows(const RowLists<Id>&, const Matrix<T>&, const Weights<T>&, int, T*, int32_t*);      \
  template void max_rows_backward(const RowLists<Id>&, const int64_t*, const Matrix<T>&, const Weights<T>&, \
                                  const int32_t*, int, T*);                                                 \
  template void dot_rows(const RowLists<Id>&, const Matrix<T>&, const Matrix<T>&, int64_t, const int32_t*, int, T*);
HOPLOOM_INSTANCES(float, int32_t)
HOPLOOM_INSTANCES(float, int64_t)
HOPLOOM_INSTANCES(double, int32_t)
HOPLOOM_INSTANCES(double, int64_t)
#undef HOPLOOM_INSTANCES
template void sum_rows(const RowLists<int32_t>&, const Matrix<Bfloat16>&, const Weights<float>&, bool, int, Bfloat16*);
template void sum_rows(const RowLists<int64_t>&, const Matrix<Bfloat16>&, const Weights<float>&, bool, int, Bfloat16*);
#define HOPLOOM_INSTANCES(T)                                                        \
  template void softmax_lists(const int64_t*, int64_t, int64_t, const T*, int, T*); \
  template void softmax_lists_backward(const int64_t*, int64_t, int64_t, const T*, const T*, int, T*);
HOPLOOM_INSTANCES(float)
HOPLOOM_INSTANCES(double)
#undef HOPLOOM_INSTANCES
template void check_lists(const RowLists<int32_t>&, int64_t);
template void check_lists(const RowLists<int64_t>&, int64_t);

}  // namespace hoploom
