// update_rows and draw_rows: against plain loops, whatever the threads, with several gradients of one row.
#include "../learned.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>

#include "check.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr int64_t kFirst = 100, kRows = 700, kWidth = 37;
constexpr RowRule kRules[] = {RowRule::kSgd, RowRule::kRowwiseAdagrad, RowRule::kAdagrad, RowRule::kLazyAdam};

RowStep step_of(RowRule rule) { return {rule, 0.1, 0.5, 1e-8, 0.9, 0.999, 7}; }

// Rows with their state, and a batch of gradients with repeated ids.
template <typename T>
struct Case {
  RowRule rule;
  std::vector<T> rows = std::vector<T>(size_t(kRows * kWidth));
  std::vector<float> state, gradients;
  std::vector<int64_t> ids;

  Case(RowRule of, int64_t count, unsigned seed) : rule(of), state(size_t(kRows * state_width(of, kWidth))) {
    std::vector<int64_t> all(static_cast<size_t>(kRows));
    for (size_t i = 0; i < all.size(); ++i) all[i] = int64_t(i);
    draw_rows(LearnedRows<T>{rows.data(), kRows, kWidth, kFirst}, all.data(), 5, false, 1.0, 1);
    std::mt19937 random(seed);
    for (int64_t i = 0; i < count; ++i) ids.push_back(kFirst + int64_t(random() % kRows));
    for (int64_t i = 0; i < count * kWidth; ++i) gradients.push_back(float(random() % 2001) / 1000 - 1);
  }

  int64_t update(int threads) {
    return update_rows(LearnedRows<T>{rows.data(), kRows, kWidth, kFirst},
                       {state.data(), kRows, state_width(rule, kWidth), kFirst},
                       {ids.data(), gradients.data(), int64_t(ids.size()), kWidth}, step_of(rule), threads);
  }
};

// One row after one gradient, in double.
double expected(RowRule rule, double value, const std::vector<double>& gradient, size_t column) {
  const double g = gradient[column];
  if (rule == RowRule::kSgd) return value - 0.1 * g;
  if (rule == RowRule::kAdagrad) return value - 0.1 * g / (std::abs(g) + 1e-8);
  if (rule == RowRule::kLazyAdam) {
    const double size = 0.1 * std::sqrt(1 - 0.999) / (1 - 0.9);
    return value - size * (0.1 * g) / (std::sqrt(0.001 * g * g) + 1e-8);
  }
  double sum = 0;
  for (double each : gradient) sum += each * each;
  return value - 0.1 * g / (std::sqrt(sum / double(gradient.size())) + 1e-8);
}

}  // namespace

TEST(a_row_follows_the_sum_of_its_gradients) {
  for (RowRule rule : kRules) {
    Case<float> tried(rule, 400, 1);
    const std::vector<float> before = tried.rows;
    std::map<int64_t, std::vector<double>> sums;
    for (size_t i = 0; i < tried.ids.size(); ++i) {
      auto& sum = sums.try_emplace(tried.ids[i] - kFirst, size_t(kWidth), 0.0).first->second;
      for (size_t c = 0; c < size_t(kWidth); ++c) sum[c] += 0.5 * tried.gradients[i * size_t(kWidth) + c];
    }
    tried.update(2);
    for (int64_t row = 0; row < kRows; ++row)
      for (size_t c = 0; c < size_t(kWidth); ++c) {
        const size_t at = size_t(row * kWidth) + c;
        const auto found = sums.find(row);
        if (found == sums.end()) CHECK_EQUAL(tried.rows[at], before[at]);
        else CHECK(std::abs(tried.rows[at] - expected(rule, before[at], found->second, c)) < 1e-5);
      }
  }
}

TEST(a_row_that_would_not_be_finite_stays) {
  const float huge = 3e38f, infinite = 2 * huge;
  for (RowRule rule : kRules)
    for (float bad : {infinite, -infinite, infinite - infinite}) {
      Case<float> tried(rule, 400, 1), fine(rule, 400, 1);
      const std::vector<float> before = tried.rows;
      for (size_t i = 0; i < 400; ++i)
        if (tried.ids[i] == tried.ids[3]) tried.gradients[i * size_t(kWidth) + 5] = bad;
      CHECK_EQUAL(tried.update(2), tried.ids[3]);
      CHECK_EQUAL(fine.update(2), int64_t(-1));
      for (size_t at = 0; at < before.size(); ++at)
        CHECK_EQUAL(tried.rows[at], int64_t(at) / kWidth == tried.ids[3] - kFirst ? before[at] : fine.rows[at]);
      CHECK_EQUAL(Case<uint16_t>(rule, 400, 1).update(2), int64_t(-1));
    }
  Case<float> tried(RowRule::kSgd, 1, 1);
  const std::vector<float> before = tried.rows;
  RowStep step = step_of(RowRule::kSgd);
  step.rate = 1e10, tried.gradients[0] = huge;
  const LearnedRows<float> rows{tried.rows.data(), kRows, kWidth, kFirst};
  const RowGradients given{tried.ids.data(), tried.gradients.data(), 1, kWidth};
  const LearnedRows<float> no_state{nullptr, kRows, 0, kFirst, kWidth};  // as of records without one
  CHECK_EQUAL(update_rows(rows, no_state, given, step, 1), tried.ids[0]);
  CHECK_EQUAL(tried.rows, before);
}

TEST(a_row_whose_state_would_not_be_finite_stays_with_its_state) {
  for (RowRule rule : kRules) {
    Case<float> tried(rule, 1, 1);
    tried.update(1);
    const std::vector<float> rows = tried.rows, state = tried.state;
    tried.gradients.assign(tried.gradients.size(), 1e25f);  // its square is infinite
    CHECK_EQUAL(tried.update(1), rule == RowRule::kSgd ? int64_t(-1) : tried.ids[0]);
    CHECK_EQUAL(tried.rows == rows, rule != RowRule::kSgd);
    CHECK_EQUAL(tried.state, state);
  }
}

TEST(records_in_a_file_change_as_those_in_memory) {
  for (RowRule rule : kRules) {
    Case<uint16_t> here(rule, 5000, 2);
    const int64_t width = state_width(rule, kWidth), state_at = (kWidth + 1) / 2, stride = state_at + width;
    std::vector<float> records(size_t((kFirst + kRows) * stride));  // of all rows, from row 0 on
    const auto row_of = [&](int64_t i) { return records.data() + (kFirst + i) * stride; };
    for (int64_t i = 0; i < kRows; ++i) std::memcpy(row_of(i), &here.rows[size_t(i * kWidth)], kWidth * 2);
    std::FILE* file = std::tmpfile();
    CHECK_EQUAL(pwrite(fileno(file), records.data(), records.size() * 4, 0), ssize_t(records.size() * 4));
    const LearnedRows<uint16_t> rows{
        reinterpret_cast<uint16_t*>(row_of(0)), kRows, kWidth, kFirst, stride * 2, fileno(file)};
    const RowGradients given{here.ids.data(), here.gradients.data(), int64_t(here.ids.size()), kWidth};
    update_rows(rows, {row_of(0) + state_at, kRows, width, kFirst, stride}, given, step_of(rule), 1);
    here.update(1);
    CHECK_EQUAL(pread(fileno(file), records.data(), records.size() * 4, 0), ssize_t(records.size() * 4));
    std::fclose(file);
    for (int64_t i = 0; i < kRows; ++i) {
      CHECK(std::memcmp(row_of(i), &here.rows[size_t(i * kWidth)], kWidth * 2) == 0);
      CHECK(std::equal(row_of(i) + state_at, row_of(i) + stride, here.state.begin() + i * width));
    }
    CHECK_THROWS(update_rows(LearnedRows<uint16_t>{rows.values, kRows, kWidth, kFirst, stride * 2, 1 << 20},
                             {nullptr, kRows, width, kFirst}, given, step_of(rule), 1));
  }
}

TEST(threads_change_nothing) {
  for (RowRule rule : kRules) {
    Case<uint16_t> one(rule, 5000, 2), many(rule, 5000, 2);
    for (int step = 0; step < 3; ++step) one.update(1), many.update(5);
    CHECK_EQUAL(one.rows, many.rows);
    CHECK_EQUAL(one.state, many.state);
  }
}

TEST(rounding_keeps_the_expected_value) {
  std::vector<uint16_t> rows(size_t(kRows * kWidth), 0x3F80);  // one, whose next bfloat16 is 1 / 128 above
  std::vector<float> gradients(rows.size(), -0.01f);           // with this rate, a tenth of that distance
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < kRows; ++i) ids.push_back(i);
  RowStep step = step_of(RowRule::kSgd);
  step.rate = 0.1 / 128 / 0.01, step.scale = 1;
  update_rows(LearnedRows<uint16_t>{rows.data(), kRows, kWidth, 0}, {nullptr, kRows, 0, 0},
              {ids.data(), gradients.data(), kRows, kWidth}, step, 2);
  const auto up = double(std::count(rows.begin(), rows.end(), 0x3F81));
  CHECK(std::abs(up / double(rows.size()) - 0.1) < 0.01);
}

TEST(initial_rows_depend_on_their_id_alone) {
  const std::vector<int64_t> ids = {5, 1 << 30, 7}, other = {7, 5};
  for (bool normal : {false, true}) {
    std::vector<float> three(3 * 10), two(2 * 10);
    draw_rows(LearnedRows<float>{three.data(), 3, 10, 0}, ids.data(), 9, normal, 0.5, 3);
    draw_rows(LearnedRows<float>{two.data(), 2, 10, 0}, other.data(), 9, normal, 0.5, 1);
    CHECK(std::equal(two.begin(), two.begin() + 10, three.begin() + 20));
    CHECK(std::equal(two.begin() + 10, two.end(), three.begin()));
  }
}

TEST(ids_out_of_range_are_refused) {
  for (int64_t id : {kFirst - 1, kFirst + kRows}) {
    Case<float> tried(RowRule::kSgd, 3, 4);
    tried.ids[1] = id;
    CHECK_THROWS(tried.update(1));
  }
}
