// keep_best: against sorting, whatever the blocks and threads, with ties, known destinations and NaN.
#include "../best.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "check.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Best {
  std::vector<float> scores;
  std::vector<int64_t> ids;
};

// Scores are few, so that many are equal; the block's width is no multiple of a step.
struct Case {
  int64_t num_sources = 5, num_destinations = 300;
  std::vector<float> values;
  std::vector<int64_t> indptr{0}, known;

  explicit Case(unsigned seed) : values(size_t(num_sources * num_destinations)) {
    std::mt19937 random(seed);
    for (float& value : values) value = float(random() % 40) - 20;
    values[7] = std::nanf("");
    for (int64_t s = 0; s < num_sources; ++s) {
      for (int64_t d = 0; d < num_destinations; ++d)
        if (random() % 4 == 0) known.push_back(d);
      indptr.push_back(int64_t(known.size()));
    }
  }

  Best kept(int64_t k, int64_t width, int threads) const {
    Best best{std::vector<float>(size_t(num_sources * k), kNone), std::vector<int64_t>(size_t(num_sources * k), -1)};
    for (int64_t first = 0; first < num_destinations; first += width) {
      const int64_t count = std::min(width, num_destinations - first);
      std::vector<float> block;
      for (int64_t s = 0; s < num_sources; ++s)
        block.insert(block.end(), values.begin() + s * num_destinations + first,
                     values.begin() + s * num_destinations + first + count);
      keep_best({block.data(), num_sources, count, first}, {indptr.data(), known.data()}, k, threads,
                best.scores.data(), best.ids.data());
    }
    return best;
  }

  Best sorted(int64_t k) const {
    Best best;
    for (int64_t s = 0; s < num_sources; ++s) {
      std::vector<std::pair<float, int64_t>> found;
      for (int64_t d = 0; d < num_destinations; ++d) {
        const float value = values[size_t(s * num_destinations + d)];
        const bool is_known = std::count(known.begin() + indptr[size_t(s)], known.begin() + indptr[size_t(s) + 1], d);
        if (!std::isnan(value) && !is_known) found.push_back({-value, d});
      }
      std::sort(found.begin(), found.end());
      for (int64_t i = 0; i < k; ++i) {
        const bool is_there = i < int64_t(found.size());
        best.scores.push_back(is_there ? -found[size_t(i)].first : kNone);
        best.ids.push_back(is_there ? found[size_t(i)].second : -1);
      }
    }
    return best;
  }
};

}  // namespace

TEST(the_best_are_those_of_sorting) {
  for (unsigned seed = 0; seed < 10; ++seed)
    for (int64_t k : {1, 10, 290})
      for (int64_t width : {300, 128, 77, 1}) {
        const Case tried(seed);
        const Best expected = tried.sorted(k), found = tried.kept(k, width, 2);
        CHECK_EQUAL(found.scores, expected.scores);
        CHECK_EQUAL(found.ids, expected.ids);
      }
}

TEST(threads_change_nothing) {
  std::vector<float> values(size_t(8) << 16);
  std::mt19937 random(3);
  for (float& value : values) value = float(random() % 100000);
  Best best[2];
  for (int i : {0, 1}) {
    best[i] = {std::vector<float>(8 * 5, kNone), std::vector<int64_t>(8 * 5, -1)};
    keep_best({values.data(), 8, 1 << 16, 0}, {nullptr, nullptr}, 5, i ? 3 : 1, best[i].scores.data(),
              best[i].ids.data());
  }
  CHECK_EQUAL(best[0].scores, best[1].scores);
  CHECK_EQUAL(best[0].ids, best[1].ids);
}
