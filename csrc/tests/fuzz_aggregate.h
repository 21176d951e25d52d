// Lists and rows that own their arrays, the calls of aggregate.h upon them, and the same again as plain loops. Arrays
// are of the exact size and what lies between rows is NaN: what is read or left out wrongly is seen.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../aggregate.h"
#include "check.h"

namespace hoploom::test {

template <typename Id>
struct OwnedLists {
  std::vector<int64_t> indptr;  // [num_lists + 1]
  std::vector<Id> rows;         // [num_entries]
  std::vector<int64_t> places;  // [num_entries], or empty: none

  int64_t num_lists() const { return int64_t(indptr.size()) - 1; }
  int64_t num_entries() const { return int64_t(rows.size()); }
  int64_t length(int64_t list) const { return indptr[size_t(list) + 1] - indptr[size_t(list)]; }
  int64_t row(int64_t entry) const { return int64_t(rows[size_t(entry)]); }
  size_t place(int64_t entry) const { return places.empty() ? size_t(entry) : size_t(places[size_t(entry)]); }
  RowLists<Id> view() const {
    return {indptr.data(), rows.data(), num_lists(), num_entries(), places.empty() ? nullptr : places.data()};
  }
};

template <typename T>
struct Table {
  int64_t num_rows, width, stride;
  std::vector<T> values;  // up to the end of the last row

  Table(int64_t rows, int64_t columns, int64_t apart)
      : num_rows(rows),
        width(columns),
        stride(apart),
        values(size_t(rows && columns ? (rows - 1) * apart + columns : 0), std::numeric_limits<T>::quiet_NaN()) {}
  const T& at(int64_t row, int64_t column) const { return values[size_t(row * stride + column)]; }
  T& at(int64_t row, int64_t column) { return values[size_t(row * stride + column)]; }
  Matrix<T> view() const { return {values.data(), num_rows, width, stride}; }
};

// value_of(i) in every cell, i counting them row by row.
template <typename T, typename ValueOf>
Table<T> table_of(int64_t num_rows, int64_t width, int64_t stride, ValueOf value_of) {
  Table<T> table(num_rows, width, stride);
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t c = 0; c < width; ++c) table.at(r, c) = T(value_of(uint64_t(r * width + c)));
  return table;
}

template <typename T>
struct HeadWeights {
  std::vector<T> values;  // [num_entries, heads]
  int64_t heads = 0;      // 0: no weights

  Weights<T> view() const { return {heads ? values.data() : nullptr, heads}; }
  T of(size_t place, int64_t column, int64_t width) const {
    return heads ? values[place * size_t(heads) + size_t(column / (width / heads))] : T(1);
  }
};

template <typename T>
struct Maxima {
  std::vector<T> values;
  std::vector<int32_t> winners;
};

// --- the calls; every cell of an output must be written over ---------------------------------

template <typename T>
std::vector<T> unwritten(int64_t num_values) {
  return std::vector<T>(size_t(num_values), T(12345));
}

template <typename T, typename Id>
std::vector<T> sums_of(const OwnedLists<Id>& lists, const Table<T>& x, const HeadWeights<T>& weights, bool mean,
                       int threads) {
  auto out = unwritten<T>(lists.num_lists() * x.width);
  sum_rows(lists.view(), x.view(), weights.view(), mean, threads, out.data());
  return out;
}

template <typename T, typename Id>
Maxima<T> maxima_of(const OwnedLists<Id>& lists, const Table<T>& x, int threads, const HeadWeights<T>& weights = {}) {
  const int64_t num_values = lists.num_lists() * x.width;
  Maxima<T> maxima{unwritten<T>(num_values), unwritten<int32_t>(num_values)};
  max_rows(lists.view(), x.view(), weights.view(), threads, maxima.values.data(), maxima.winners.data());
  return maxima;
}

template <typename T, typename Id>
std::vector<T> maxima_backward(const OwnedLists<Id>& lists, const OwnedLists<Id>& transposed, const Table<T>& grad,
                               const std::vector<int32_t>& winners, int threads, const HeadWeights<T>& weights = {}) {
  auto out = unwritten<T>(transposed.num_lists() * grad.width);
  max_rows_backward(transposed.view(), lists.indptr.data(), grad.view(), weights.view(), winners.data(), threads,
                    out.data());
  return out;
}

template <typename T, typename Id>
std::vector<T> dots_of(const OwnedLists<Id>& lists, const Table<T>& x, const Table<T>& y, int64_t heads, int threads,
                       const int32_t* winners = nullptr) {
  auto out = unwritten<T>(lists.num_entries() * heads);
  dot_rows(lists.view(), x.view(), y.view(), heads, winners, threads, out.data());
  return out;
}

template <typename T>
std::vector<T> softmax_of(const std::vector<int64_t>& indptr, const std::vector<T>& scores, int64_t heads,
                          int threads) {
  auto out = unwritten<T>(int64_t(scores.size()));
  softmax_lists(indptr.data(), int64_t(indptr.size()) - 1, heads, scores.data(), threads, out.data());
  return out;
}

template <typename T>
std::vector<T> softmax_backward(const std::vector<int64_t>& indptr, const std::vector<T>& softmax,
                                const std::vector<T>& grad, int64_t heads, int threads) {
  auto out = unwritten<T>(int64_t(softmax.size()));
  softmax_lists_backward(indptr.data(), int64_t(indptr.size()) - 1, heads, softmax.data(), grad.data(), threads,
                         out.data());
  return out;
}

// --- the same again -------------------------------------------------------------------------

template <typename Id>
bool are_sound(const OwnedLists<Id>& lists, int64_t num_rows) {
  bool sound = lists.indptr.front() == 0 && lists.indptr.back() == lists.num_entries();
  for (size_t i = 1; i < lists.indptr.size(); ++i) sound = sound && lists.indptr[i - 1] <= lists.indptr[i];
  for (Id row : lists.rows) sound = sound && row >= 0 && row < num_rows;
  for (int64_t place : lists.places) sound = sound && place >= 0 && place < lists.num_entries();
  return sound;
}

template <typename T, typename Id>
std::vector<T> plain_sums(const OwnedLists<Id>& lists, const Table<T>& x, const HeadWeights<T>& weights, bool mean) {
  std::vector<T> sums;
  for (int64_t i = 0; i < lists.num_lists(); ++i)
    for (int64_t c = 0; c < x.width; ++c) {
      T sum = 0;
      for (int64_t e = lists.indptr[size_t(i)]; e < lists.indptr[size_t(i) + 1]; ++e)
        sum += weights.of(lists.place(e), c, x.width) * x.at(lists.row(e), c);
      sums.push_back(mean && lists.length(i) ? sum / T(lists.length(i)) : sum);
    }
  return sums;
}

// The first NaN beats all others.
template <typename T, typename Id>
Maxima<T> plain_maxima(const OwnedLists<Id>& lists, const Table<T>& x, const HeadWeights<T>& weights = {}) {
  Maxima<T> maxima;
  for (int64_t i = 0; i < lists.num_lists(); ++i)
    for (int64_t c = 0; c < x.width; ++c) {
      int32_t winner = lists.length(i) ? 0 : -1;
      const auto value = [&](int64_t k) {
        const int64_t e = lists.indptr[size_t(i)] + k;
        return weights.of(size_t(e), c, x.width) * x.at(lists.row(e), c);
      };
      for (int64_t k = 1; k < lists.length(i); ++k)
        if (!std::isnan(value(winner)) && !(value(k) <= value(winner))) winner = int32_t(k);
      maxima.winners.push_back(winner);
      maxima.values.push_back(winner < 0 ? T(0) : value(winner));
    }
  return maxima;
}

// List s of the transposed holds every entry whose row is s: the list it is in as its row, itself as its place.
template <typename Id>
OwnedLists<Id> transposed_of(const OwnedLists<Id>& lists, int64_t num_rows) {
  OwnedLists<Id> transposed{std::vector<int64_t>(size_t(num_rows) + 1), std::vector<Id>(lists.rows.size()),
                            std::vector<int64_t>(lists.rows.size())};
  for (Id row : lists.rows) ++transposed.indptr[size_t(row) + 1];
  for (size_t s = 1; s <= size_t(num_rows); ++s) transposed.indptr[s] += transposed.indptr[s - 1];
  std::vector<int64_t> next = transposed.indptr;
  for (int64_t i = 0; i < lists.num_lists(); ++i)
    for (int64_t e = lists.indptr[size_t(i)]; e < lists.indptr[size_t(i) + 1]; ++e) {
      const auto at = size_t(next[size_t(lists.row(e))]++);
      transposed.rows[at] = Id(i), transposed.places[at] = e;
    }
  return transposed;
}

// Every gradient to the row whose entry had won.
template <typename T, typename Id>
std::vector<T> plain_maxima_backward(const OwnedLists<Id>& lists, int64_t num_rows, const Table<T>& grad,
                                     const std::vector<int32_t>& winners, const HeadWeights<T>& weights = {}) {
  std::vector<T> sums(size_t(num_rows * grad.width), T(0));
  for (int64_t i = 0; i < lists.num_lists(); ++i)
    for (int64_t c = 0; c < grad.width; ++c) {
      const int32_t winner = winners[size_t(i * grad.width + c)];
      const int64_t e = lists.indptr[size_t(i)] + winner;
      if (winner >= 0)
        sums[size_t(lists.row(e) * grad.width + c)] += weights.of(size_t(e), c, grad.width) * grad.at(i, c);
    }
  return sums;
}

template <typename T, typename Id>
std::vector<T> plain_dots(const OwnedLists<Id>& lists, const Table<T>& x, const Table<T>& y, int64_t heads,
                          const int32_t* winners = nullptr) {
  std::vector<T> dots(size_t(lists.num_entries() * heads), T(0));
  for (int64_t i = 0; i < lists.num_lists(); ++i)
    for (int64_t e = lists.indptr[size_t(i)]; e < lists.indptr[size_t(i) + 1]; ++e)
      for (int64_t c = 0; c < x.width; ++c)
        if (!winners || winners[i * x.width + c] == e - lists.indptr[size_t(i)])
          dots[size_t(e * heads + c * heads / x.width)] += x.at(lists.row(e), c) * y.at(i, c);
  return dots;
}

template <typename T>
std::vector<T> plain_softmax(const std::vector<int64_t>& indptr, const std::vector<T>& scores, int64_t heads) {
  std::vector<T> softmax(scores.size());
  for (size_t i = 0; i + 1 < indptr.size(); ++i)
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<long double> list;
      for (int64_t e = indptr[i]; e < indptr[i + 1]; ++e) list.push_back(scores[size_t(e * heads + h)]);
      const long double greatest = list.empty() ? 0 : *std::max_element(list.begin(), list.end());
      long double total = 0;
      for (long double score : list) total += std::exp(score - greatest);
      for (int64_t e = indptr[i]; e < indptr[i + 1]; ++e)
        softmax[size_t(e * heads + h)] = T(std::exp(list[size_t(e - indptr[i])] - greatest) / total);
    }
  return softmax;
}

// By the matrix of derivatives: of softmax k by score e it is softmax k * ((k == e) - softmax e).
template <typename T>
std::vector<T> plain_softmax_backward(const std::vector<int64_t>& indptr, const std::vector<T>& softmax,
                                      const std::vector<T>& grad, int64_t heads) {
  std::vector<T> sums;
  for (size_t i = 0; i + 1 < indptr.size(); ++i)
    for (int64_t cell = indptr[i] * heads; cell < indptr[i + 1] * heads; ++cell) {
      long double sum = 0;
      for (int64_t e = indptr[i]; e < indptr[i + 1]; ++e) {
        const auto k = size_t(e * heads + cell % heads);
        sum += (long double)(grad[k]) * softmax[k] * ((k == size_t(cell)) - (long double)(softmax[size_t(cell)]));
      }
      sums.push_back(T(sum));
    }
  return sums;
}

// --- comparisons ----------------------------------------------------------------------------

template <typename T>
bool same_bits(const std::vector<T>& left, const std::vector<T>& right) {
  return left.size() == right.size() &&
         (left.empty() || !std::memcmp(left.data(), right.data(), sizeof(T) * left.size()));
}

// Up to `steps` roundings of `scale`, or of the value itself where that is greater. NaN is near NaN.
template <typename T>
bool near(T seen, T wanted, double steps, double scale = 0) {
  if (std::isnan(seen) || std::isnan(wanted)) return std::isnan(seen) && std::isnan(wanted);
  const double unit = double(std::numeric_limits<T>::epsilon());
  return seen == wanted ||
         std::abs(double(seen) - double(wanted)) <= steps * unit * std::max(scale, std::abs(double(wanted)));
}

template <typename T>
void check_near(const std::vector<T>& seen, const std::vector<T>& wanted, double steps, double scale = 0) {
  CHECK_EQUAL(seen.size(), wanted.size());
  for (size_t i = 0; i < seen.size(); ++i)
    if (!near(seen[i], wanted[i], steps, scale)) CHECK_EQUAL(seen[i], wanted[i]);
}

}  // namespace hoploom::test
