// Sums, maxima, dot products and softmax over lists against plain loops, and the ranges of lists threads take.
#include <algorithm>
#include <atomic>
#include <bit>

#include "../order.h"
#include "../threads.h"
#include "fuzz_aggregate.h"
#include "graphs.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr int64_t kRows = 50;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Whole numbers in [-8, 8]: sums of them are exact in any order, and there are many equal ones.
double whole(uint64_t i) { return double(mix(17, i) % 17) - 8; }
// In [-1, 1), of full precision: sums of them depend on the order.
double broken(uint64_t i) { return double(mix(19, i) >> 11) * 0x1p-52 - 1; }

template <typename Id>
OwnedLists<Id> lists_of_lengths(const std::vector<int64_t>& lengths, int64_t num_rows = kRows) {
  const Graph graph = graph_of_degrees(lengths, num_rows);
  return {graph.indptr, {graph.sources.begin(), graph.sources.end()}, {}};
}

// Empty lists first, last and beside each other, and lists shorter and longer than what is requested ahead.
const std::vector<int64_t> kLengths = {0, 1, 2, 0, 0, 33, 7, 1, 64, 0, 3, 200, 1, 1, 0};

// `entry -> some other place`, each one once.
template <typename Id>
OwnedLists<Id> with_places(OwnedLists<Id> lists) {
  const Permutation permutation(5, uint64_t(lists.num_entries()));
  for (int64_t e = 0; e < lists.num_entries(); ++e) lists.places.push_back(int64_t(permutation.at(uint64_t(e))));
  return lists;
}

template <typename T, typename ValueOf>
std::vector<T> cells(int64_t count, ValueOf value_of) {
  std::vector<T> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = T(value_of(i + 1000000));
  return values;
}

struct Shape {
  int64_t width, stride, heads;
};
const std::vector<Shape> kShapes = {{0, 0, 1},   {0, 3, 2},   {1, 1, 1},    {1, 4, 1},     {7, 7, 1},      {7, 9, 7},
                                    {64, 64, 4}, {64, 65, 1}, {64, 80, 64}, {100, 100, 1}, {100, 128, 10}, {20, 21, 2}};

// body(T(), Id()) for each of the types.
template <typename Body>
void for_each_type(Body body) {
  body(float(), int32_t());
  body(float(), int64_t());
  body(double(), int32_t());
  body(double(), int64_t());
}

template <typename T, typename Id>
void check_sums(const OwnedLists<Id>& lists, const Shape& shape) {
  const auto x = table_of<T>(kRows, shape.width, shape.stride, broken);
  const HeadWeights<T> weights{cells<T>(lists.num_entries() * shape.heads, broken), shape.heads};
  for (const HeadWeights<T>& given : {HeadWeights<T>(), weights}) {
    CHECK_EQUAL(sums_of(lists, x, given, false, 1), plain_sums(lists, x, given, false));
    check_near(sums_of(lists, x, given, true, 1), plain_sums(lists, x, given, true), 2);
  }
}

template <typename T, typename Id>
void check_maxima(const OwnedLists<Id>& lists, const Shape& shape) {
  const auto x = table_of<T>(kRows, shape.width, shape.stride, whole);
  const auto grad = table_of<T>(lists.num_lists(), shape.width, shape.stride, whole);
  const HeadWeights<T> weights{cells<T>(lists.num_entries() * shape.heads, whole), shape.heads};
  for (const HeadWeights<T>& given : {HeadWeights<T>(), weights}) {
    const auto maxima = maxima_of(lists, x, 1, given), wanted = plain_maxima(lists, x, given);
    CHECK_EQUAL(maxima.winners, wanted.winners);
    CHECK_EQUAL(maxima.values, wanted.values);
    CHECK_EQUAL(maxima_backward(lists, transposed_of(lists, kRows), grad, wanted.winners, 1, given),
                plain_maxima_backward(lists, kRows, grad, wanted.winners, given));
    CHECK_EQUAL(dots_of(lists, x, grad, shape.heads, 1, wanted.winners.data()),
                plain_dots(lists, x, grad, shape.heads, wanted.winners.data()));
  }
}

template <typename T, typename Id>
void check_dots(const OwnedLists<Id>& lists, const Shape& shape) {
  const auto x = table_of<T>(kRows, shape.width, shape.stride, whole);
  const auto y =
      table_of<T>(lists.num_lists(), shape.width, shape.stride + 2, [](uint64_t i) { return whole(i + 99); });
  CHECK_EQUAL(dots_of(lists, x, y, shape.heads, 1), plain_dots(lists, x, y, shape.heads));
}

template <typename T, typename Id>
void check_softmax(const OwnedLists<Id>& lists, int64_t heads) {
  const auto scores = cells<T>(lists.num_entries() * heads, [](uint64_t i) { return 20 * broken(i); });
  const auto softmax = softmax_of(lists.indptr, scores, heads, 1);
  check_near(softmax, plain_softmax(lists.indptr, scores, heads), 100);
  const auto grad = cells<T>(lists.num_entries() * heads, whole);
  check_near(softmax_backward(lists.indptr, softmax, grad, heads, 1),
             plain_softmax_backward(lists.indptr, softmax, grad, heads), 200, 1);
}

}  // namespace

TEST(sums_and_means_have_the_bits_of_a_plain_loop) {
  for_each_type([]<typename T, typename Id>(T, Id) {
    const auto lists = lists_of_lengths<Id>(kLengths);
    for (const Shape& shape : kShapes) check_sums<T>(lists, shape), check_sums<T>(with_places(lists), shape);
  });
}

TEST(maxima_name_the_first_of_equals_and_send_their_gradient_to_it) {
  for_each_type([]<typename T, typename Id>(T, Id) {
    for (const Shape& shape : kShapes) check_maxima<T>(lists_of_lengths<Id>(kLengths), shape);
  });
}

TEST(dot_products_equal_a_plain_loop) {
  for_each_type([]<typename T, typename Id>(T, Id) {
    for (const Shape& shape : kShapes) check_dots<T>(lists_of_lengths<Id>(kLengths), shape);
  });
}

// The sums of whole rows, and the sum of the heads' shares of a row, of which each has the same columns.
TEST(a_head_may_take_whole_rows) {
  for_each_type([]<typename T, typename Id>(T, Id) {
    const auto lists = with_places(lists_of_lengths<Id>(kLengths));
    const int64_t width = 5, heads = 3, num_lists = lists.num_lists();
    const auto x = table_of<T>(kRows, width, 6, whole);
    const HeadWeights<T> weights{cells<T>(lists.num_entries() * heads, whole), heads};
    const auto y = table_of<T>(num_lists, heads * width, 17, whole);
    const Table<T> many = table_of<T>(kRows, heads * width, 16, whole);
    auto apart = unwritten<T>(num_lists * heads * width), joined = unwritten<T>(num_lists * width);
    auto wide = weights.view(), narrow = weights.view();
    wide.sum_width = heads * width, narrow.sum_width = width;
    sum_rows(lists.view(), x.view(), wide, false, 1, apart.data());
    sum_rows(lists.view(), many.view(), narrow, false, 1, joined.data());
    const auto dots = dots_of(lists, x, y, heads, 1);
    for (int64_t i = 0; i < num_lists; ++i)
      for (int64_t c = 0; c < width; ++c) {
        T total = 0;
        for (int64_t h = 0; h < heads; ++h) {
          T own = 0;
          for (int64_t e = lists.indptr[size_t(i)]; e < lists.indptr[size_t(i) + 1]; ++e) {
            const T weight = weights.values[lists.place(e) * size_t(heads) + size_t(h)];
            own += weight * x.at(lists.row(e), c);
            total += weight * many.at(lists.row(e), h * width + c);
          }
          CHECK_EQUAL(apart[size_t((i * heads + h) * width + c)], own);
        }
        CHECK_EQUAL(joined[size_t(i * width + c)], total);
      }
    for (int64_t i = 0; i < num_lists; ++i)
      for (int64_t e = lists.indptr[size_t(i)]; e < lists.indptr[size_t(i) + 1]; ++e)
        for (int64_t h = 0; h < heads; ++h) {
          T dot = 0;
          for (int64_t c = 0; c < width; ++c) dot += x.at(lists.row(e), c) * y.at(i, h * width + c);
          CHECK_EQUAL(dots[size_t(e * heads + h)], dot);
        }
  });
}

TEST(softmax_and_its_backward_equal_their_definitions) {
  for_each_type([]<typename T, typename Id>(T, Id) {
    for (int64_t heads : {1, 2, 5}) check_softmax<T>(lists_of_lengths<Id>(kLengths), heads);
  });
}

TEST(no_lists_no_entries_and_one_giant_list_are_aggregated) {
  const std::vector<std::vector<int64_t>> shapes = {{}, {0}, {0, 0, 0}, {1000}, {0, 1000, 0}};
  for_each_type([&]<typename T, typename Id>(T, Id) {
    for (const auto& lengths : shapes) {
      const auto lists = lists_of_lengths<Id>(lengths);
      for (const Shape& shape : {Shape{0, 0, 1}, Shape{7, 8, 7}}) {
        check_sums<T>(lists, shape);
        check_maxima<T>(lists, shape);
        check_dots<T>(lists, shape);
        check_softmax<T>(lists, shape.heads);
      }
    }
  });
}

// Ring graph: node v links to v + 1 and v + 2, its row is v.
TEST(the_mean_on_a_ring_is_the_middle_of_its_neighbors) {
  const Graph graph = ring(10);
  const OwnedLists<int32_t> lists{graph.indptr, graph.narrow_sources, {}};
  const auto x = table_of<float>(10, 1, 1, [](uint64_t v) { return double(v); });
  const auto means = sums_of(lists, x, {}, true, 1);
  for (size_t v = 0; v < 8; ++v) CHECK_EQUAL(means[v], float(v) + 1.5f);
  CHECK_EQUAL(maxima_of(lists, x, 1).winners, (std::vector<int32_t>{1, 1, 1, 1, 1, 1, 1, 1, 0, 1}));
}

TEST(a_float_becomes_the_nearest_bfloat16_and_the_even_one_of_two) {
  const auto after = [](uint32_t bits) { return rounded(std::bit_cast<float>(bits)).bits; };
  CHECK(after(0x3f800000) == 0x3f80 && after(0x3f808000) == 0x3f80 && after(0x3f808001) == 0x3f81);
  CHECK(after(0x3f818000) == 0x3f82 && after(0xbf818000) == 0xbf82 && after(0x7f7fffff) == 0x7f80);
  CHECK(after(0x7f800000) == 0x7f80 && after(0xff800000) == 0xff80 && after(0x7f800001) == 0x7fc0);
}

TEST(a_maximum_below_zero_or_not_a_number_is_kept) {
  const OwnedLists<int32_t> lists{{0, 2, 4, 6, 6}, {0, 1, 2, 0, 0, 2}, {}};
  const std::vector<double> rows = {-5, -kInfinity, kNan};
  const auto x = table_of<double>(3, 1, 1, [&](uint64_t r) { return rows[r]; });
  const auto maxima = maxima_of(lists, x, 1);
  check_near(maxima.values, {-5, kNan, kNan, 0}, 0);
  CHECK_EQUAL(maxima.winners, (std::vector<int32_t>{0, 0, 1, -1}));
}

TEST(gradients_of_maxima_need_no_places_where_the_edges_stand_in_order) {
  OwnedLists<int64_t> lists = lists_of_lengths<int64_t>(kLengths);
  for (int64_t e = 0; e < lists.num_entries(); ++e) lists.rows[size_t(e)] = e / 7;
  OwnedLists<int64_t> transposed = transposed_of(lists, kRows);
  CHECK_EQUAL(transposed.places, counting(lists.num_entries()));
  transposed.places = {};
  const auto winners = plain_maxima(lists, table_of<float>(kRows, 7, 7, whole)).winners;
  const auto grad = table_of<float>(lists.num_lists(), 7, 7, broken);
  CHECK_EQUAL(maxima_backward(lists, transposed, grad, winners, 1), plain_maxima_backward(lists, kRows, grad, winners));
}

TEST(the_softmax_of_great_scores_does_not_overflow) {
  const std::vector<int64_t> indptr = {0, 3, 5, 7, 8};
  const std::vector<float> scores = {1e30f, 1e30f, -1e30f, -3e38f, -3e38f, -float(kInfinity), -800, 3e38f};
  check_near(softmax_of(indptr, scores, 1, 1), {0.5f, 0.5f, 0, 0.5f, 0.5f, 0, 1, 1}, 0);
}

TEST(a_softmax_of_nothing_but_minus_infinity_is_not_a_number) {
  check_near(softmax_of<double>({0, 2, 3}, {-kInfinity, -kInfinity, 2}, 1, 1), {kNan, kNan, 1}, 0);
}

// Enough values for four threads to be of use, and lists that cannot be shared out evenly.
TEST(any_number_of_threads_gives_the_same_bits) {
  std::vector<int64_t> lengths(300, 4);
  lengths.insert(lengths.begin() + 40, {0, 900, 0, 0, 1});
  for_each_type([&]<typename T, typename Id>(T, Id) {
    const auto lists = lists_of_lengths<Id>(lengths), transposed = transposed_of(lists, kRows);
    const auto x = table_of<T>(kRows, 64, 70, broken), y = table_of<T>(lists.num_lists(), 64, 64, broken);
    const HeadWeights<T> weights{cells<T>(lists.num_entries() * 64, broken), 64};
    const auto sums = sums_of(lists, x, weights, true, 1);
    const auto maxima = maxima_of(lists, x, 1);
    const auto sent = maxima_backward(lists, transposed, y, maxima.winners, 1);
    const auto dots = dots_of(lists, x, y, 4, 1);
    const auto softmax = softmax_of(lists.indptr, weights.values, 64, 1);
    const auto back = softmax_backward(lists.indptr, softmax, weights.values, 64, 1);
    for (int threads : {2, 3, 4, 0, -1}) {
      CHECK(same_bits(sums_of(lists, x, weights, true, threads), sums));
      CHECK(same_bits(maxima_of(lists, x, threads).values, maxima.values));
      CHECK(same_bits(maxima_of(lists, x, threads).winners, maxima.winners));
      CHECK(same_bits(maxima_backward(lists, transposed, y, maxima.winners, threads), sent));
      CHECK(same_bits(dots_of(lists, x, y, 4, threads), dots));
      CHECK(same_bits(softmax_of(lists.indptr, weights.values, 64, threads), softmax));
      CHECK(same_bits(softmax_backward(lists.indptr, softmax, weights.values, 64, threads), back));
    }
  });
}

TEST(lists_that_do_not_follow_each_other_are_refused) {
  const auto refused = [](const std::vector<int64_t>& indptr, int64_t num_entries) {
    return !thrown_by([&] { check_indptr(indptr.data(), int64_t(indptr.size()) - 1, num_entries); }).empty();
  };
  for (const std::vector<int64_t>& sound : {std::vector<int64_t>{0}, {0, 0, 0}, {0, 2, 2, 5}})
    CHECK(!refused(sound, sound.back()));
  CHECK(refused({1}, 1) && refused({0}, 1) && refused({1, 2, 5}, 5) && refused({-1, 2, 5}, 5));
  CHECK(refused({0, 3, 2, 5}, 5) && refused({0, 5, 4}, 4) && refused({0, -1, 5}, 5) && refused({0, 6, 5}, 5));
  CHECK(refused({0, 2, 5}, 4) && refused({0, 2, 5}, 6) && refused({0, INT64_MAX, 5}, 5));
  CHECK(refused({0, INT64_MIN, 5}, 5) && refused({0, 2, INT64_MIN}, 5));
}

TEST(ends_and_places_out_of_range_are_refused) {
  for_each_type([]<typename T, typename Id>(T, Id) {
    const auto sound = with_places(lists_of_lengths<Id>(kLengths));
    const auto refused = [](const OwnedLists<Id>& lists, int64_t num_rows) {
      return !thrown_by([&] { check_lists(lists.view(), num_rows); }).empty();
    };
    const Id greatest = *std::max_element(sound.rows.begin(), sound.rows.end());
    CHECK(!refused(sound, kRows) && !refused(sound, greatest + 1) && refused(sound, greatest) && refused(sound, 0));
    for (size_t at : {size_t(0), sound.rows.size() - 1}) {
      auto damaged = sound;
      for (Id row : {Id(-1), Id(kRows), std::numeric_limits<Id>::min(), std::numeric_limits<Id>::max()}) {
        damaged.rows[at] = row;
        CHECK(refused(damaged, kRows));
      }
      damaged = sound;
      for (int64_t place : {int64_t(-1), sound.num_entries(), INT64_MIN, INT64_MAX}) {
        damaged.places[at] = place;
        CHECK(refused(damaged, kRows));
      }
    }
    auto damaged = sound;
    std::swap(damaged.indptr[5], damaged.indptr[6]);
    CHECK(refused(damaged, kRows));
  });
}

TEST(every_list_belongs_to_one_thread_and_each_has_about_its_share) {
  for (int64_t first_edge : {int64_t(0), int64_t(1) << 40})
    for (const std::vector<int64_t>& lengths :
         {std::vector<int64_t>{}, {0}, {500}, kLengths, std::vector<int64_t>(100, 3), {0, 0, 0, 0, 90, 0, 0}}) {
      std::vector<int64_t> indptr = {first_edge};
      for (int64_t length : lengths) indptr.push_back(indptr.back() + length);
      const auto num_lists = int64_t(lengths.size());
      const int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
      for (int threads = 1; threads <= 9; ++threads) {
        const double share = double(indptr.back() - first_edge + num_lists) / threads;
        CHECK_EQUAL(first_list(indptr.data(), num_lists, 0, threads), int64_t(0));
        CHECK_EQUAL(first_list(indptr.data(), num_lists, threads, threads), num_lists);
        for (int t = 0; t < threads; ++t) {
          const int64_t from = first_list(indptr.data(), num_lists, t, threads);
          const int64_t to = first_list(indptr.data(), num_lists, t + 1, threads);
          CHECK(0 <= from && from <= to && to <= num_lists);
          const double load = double(indptr[size_t(to)] - indptr[size_t(from)] + to - from);
          CHECK_BETWEEN(share - double(longest + 1), load, share + double(longest + 1 + threads));
        }
      }
    }
}

TEST(work_runs_once_on_every_thread) {
  for (int threads : {1, 2, 4}) {
    std::vector<std::atomic<int>> num_runs(size_t(threads) + 1);
    on_threads(threads, [&](int t) { ++num_runs[size_t(t)]; });
    for (int t = 0; t <= threads; ++t) CHECK_EQUAL(num_runs[size_t(t)].load(), int(t < threads));
  }
}
