// Products of rows and of columns: against plain sums in double, for one and for several threads, and for matrices that
// fill no panel, no group of rows, and whose rows have gaps between them.
#include "../products.h"

#include <cmath>
#include <random>
#include <vector>

#include "check.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

std::vector<float> drawn(int64_t size) {
  std::mt19937 random{unsigned(size)};
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = float(random() % 2001) / 1000 - 1;
  return values;
}

void compare(const std::vector<float>& found, const std::vector<double>& expected) {
  for (size_t k = 0; k < found.size(); ++k) CHECK(std::abs(double(found[k]) - expected[k]) < 1e-3);
}

void check_rows(int64_t n, int64_t depth, int64_t width, bool turned) {
  const int64_t stride = depth + 3;
  const auto x = drawn(n * stride), by = drawn(depth * width), bias = drawn(width);
  std::vector<double> expected(size_t(n * width));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < width; ++c) {
      double sum = bias[size_t(c)];
      for (int64_t k = 0; k < depth; ++k)
        sum += double(x[size_t(i * stride + k)]) * by[size_t(turned ? c * depth + k : k * width + c)];
      expected[size_t(i * width + c)] = sum;
    }
  std::vector<float> first(expected.size(), -7);
  multiply_rows({x.data(), n, depth, stride}, by.data(), width, turned, bias.data(), 1, first.data());
  compare(first, expected);
  for (int threads : {2, 5}) {
    std::vector<float> found(expected.size(), -7);
    multiply_rows({x.data(), n, depth, stride}, by.data(), width, turned, bias.data(), threads, found.data());
    CHECK(found == first);
  }
}

void check_columns(int64_t n, int64_t left, int64_t right) {
  const int64_t stride = right + 5;
  const auto a = drawn(n * left), b = drawn(n * stride);
  std::vector<double> expected(size_t(left * right)), sums(static_cast<size_t>(left));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t r = 0; r < left; ++r) {
      sums[size_t(r)] += a[size_t(i * left + r)];
      for (int64_t c = 0; c < right; ++c)
        expected[size_t(r * right + c)] += double(a[size_t(i * left + r)]) * b[size_t(i * stride + c)];
    }
  std::vector<float> first(expected.size(), -7), first_sums(sums.size(), -7);
  multiply_columns({a.data(), n, left, left}, {b.data(), n, right, stride}, 1, first.data(), first_sums.data());
  compare(first, expected);
  compare(first_sums, sums);
  for (int threads : {2, 5}) {
    std::vector<float> found(expected.size(), -7);
    multiply_columns({a.data(), n, left, left}, {b.data(), n, right, stride}, threads, found.data(), nullptr);
    CHECK(found == first);
  }
}

}  // namespace

TEST(products_are_plain_sums_with_the_same_bits_for_any_threads) {
  for (int64_t width : {1, 15, 17, 64, 68, 130})
    for (int64_t n : {0, 1, 5, 47, 101}) {
      for (bool turned : {false, true}) check_rows(n, width + 2, width, turned);
      check_columns(n, width, 133 - width);
    }
  check_rows(5000, 40, 70, true);
  check_columns(5000, 40, 70);
}
