// shared_softmax: against plain sums in double, for one and for several threads, and rows that fill no panel.
#include "../shared_softmax.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr double kTemperature = 0.7;

struct Case {
  int64_t count, num_candidates, width;
  std::vector<float> queries, truths, candidates, weights;

  Case(int64_t n, int64_t m, int64_t d) : count(n), num_candidates(m), width(d) {
    std::mt19937 random(unsigned(n + m + d));
    const auto draw = [&](int64_t size) {
      std::vector<float> values(static_cast<size_t>(size));
      for (float& value : values) value = float(random() % 2001) / 1000 - 1;
      return values;
    };
    queries = draw(n * d), truths = draw(n * d), candidates = draw(m * d), weights = draw(n);
  }
};

struct Answer {
  std::vector<float> losses, queries, truths, candidates;

  explicit Answer(const Case& of)
      : losses(size_t(of.count)),
        queries(of.queries.size()),
        truths(of.truths.size()),
        candidates(of.candidates.size(), -7) {}
};

Answer answer(const Case& of, bool weighted, int threads) {
  Answer out(of);
  shared_softmax({of.queries.data(), of.truths.data(), of.candidates.data(), of.count, of.num_candidates, of.width,
                  float(kTemperature), weighted ? of.weights.data() : nullptr},
                 threads, out.losses.data(), {out.queries.data(), out.truths.data(), out.candidates.data()});
  return out;
}

double most_apart(const std::vector<float>& found, const std::vector<double>& expected) {
  double most = 0;
  for (size_t i = 0; i < found.size(); ++i) most = std::max(most, std::abs(found[i] - expected[i]));
  return most;
}

void check_case(const Case& of, bool weighted) {
  const auto n = size_t(of.count), m = size_t(of.num_candidates), d = size_t(of.width);
  std::vector<double> losses(n), queries(n * d), truths(n * d), candidates(m * d);
  for (size_t i = 0; i < n; ++i) {
    const auto row = [&](size_t j) { return j ? &of.candidates[(j - 1) * d] : &of.truths[i * d]; };
    std::vector<double> scores(m + 1);
    for (size_t j = 0; j <= m; ++j)
      for (size_t c = 0; c < d; ++c) scores[j] += double(of.queries[i * d + c]) * row(j)[c] / kTemperature;
    double total = 0;
    for (double score : scores) total += std::exp(score);
    losses[i] = std::log(total) - scores[0];
    for (size_t j = 0; j <= m; ++j) {
      const double factor =
          (std::exp(scores[j]) / total - (j == 0)) / kTemperature * (weighted ? double(of.weights[i]) : 1.0);
      for (size_t c = 0; c < d; ++c) {
        queries[i * d + c] += factor * row(j)[c];
        (j ? candidates[(j - 1) * d + c] : truths[i * d + c]) += factor * of.queries[i * d + c];
      }
    }
  }
  const Answer found = answer(of, weighted, 1);
  CHECK(most_apart(found.losses, losses) < 1e-4);
  CHECK(most_apart(found.queries, queries) < 1e-5);
  CHECK(most_apart(found.truths, truths) < 1e-5);
  CHECK(most_apart(found.candidates, candidates) < 1e-4);
  const Answer by_three = answer(of, weighted, 3);
  CHECK(by_three.losses == found.losses && by_three.queries == found.queries && by_three.truths == found.truths);
  CHECK(by_three.candidates == found.candidates);
}

}  // namespace

TEST(losses_and_gradients_are_those_of_a_softmax) {
  check_case(Case(1, 1, 1), false);
  check_case(Case(97, 49, 48), true);
  check_case(Case(1100, 70, 37), false);
  check_case(Case(1100, 5, 100), true);
}

TEST(no_query_gives_no_gradient) {
  const Answer found = answer(Case(0, 3, 5), false, 2);
  CHECK(found.candidates == std::vector<float>(15));
}

TEST(scores_far_apart_do_not_overflow) {
  Case of(2, 3, 1);
  of.queries = {1000, 1}, of.truths = {-1, -1000}, of.candidates = {1, 1, -1};
  const Answer found = answer(of, false, 1);
  CHECK(std::abs(found.losses[0] - (2000 / kTemperature + std::log(2.0))) < 1e-2);
  CHECK(found.queries[0] > 2.8f && std::isfinite(found.candidates[2]));
}
