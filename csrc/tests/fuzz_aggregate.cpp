// Aggregates lists that may be damaged: these are refused, the others give what plain loops give.
#include "fuzz_aggregate.h"

#include <algorithm>

#include "fuzz_input.h"

namespace hoploom::test {
namespace {

// Whole numbers, so that sums are exact in any order; perhaps one that is not finite.
double value_from(ByteReader& reader) {
  const double value = double(reader.below(9) - 4);
  return reader.any_of<double>({value, value, value, value, value, 0.5, -0.0, std::numeric_limits<double>::infinity(),
                                -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()});
}

struct Shape {
  int64_t num_rows, width, heads, gap;
  int threads;
  uint64_t salt;
  std::vector<double> menu;

  double value(uint64_t key, uint64_t i) const { return menu[mix(salt + key, i) % menu.size()]; }
};

Shape shape_from(ByteReader& reader) {
  Shape shape{};
  shape.salt = reader.raw();
  shape.num_rows = 1 + reader.below(40);
  shape.heads = reader.any_of<int64_t>({1, 1, 2, 3, 8});
  shape.width = shape.heads * reader.below(20);
  shape.gap = reader.any_of<int64_t>({0, 0, 1, 5});
  shape.threads = reader.one_in(8) ? 3 : 1;
  for (int i = 0; i < 6; ++i) shape.menu.push_back(value_from(reader));
  return shape;
}

template <typename T>
Table<T> table_from(const Shape& shape, int64_t num_rows, uint64_t key) {
  return table_of<T>(num_rows, shape.width, shape.width + shape.gap, [&](uint64_t i) { return shape.value(key, i); });
}

template <typename T>
std::vector<T> cells_from(const Shape& shape, int64_t num_entries, uint64_t key) {
  std::vector<T> values(static_cast<size_t>(num_entries * shape.heads));
  for (size_t i = 0; i < values.size(); ++i) values[i] = T(shape.value(key, i));
  return values;
}

// At most one number of the lists is damaged.
template <typename Id>
OwnedLists<Id> lists_from(ByteReader& reader, const Shape& shape) {
  std::vector<int64_t> lengths;
  for (int64_t i = reader.below(16); i > 0; --i) lengths.push_back(degree_from(reader));
  if (reader.one_in(64)) lengths.push_back(3000);
  const Graph graph = graph_of_degrees(lengths, shape.num_rows);
  OwnedLists<Id> lists{graph.indptr, {graph.sources.begin(), graph.sources.end()}, {}};
  if (reader.one_in(2)) lists.places = scattered(lists.num_entries(), lists.num_entries(), shape.salt);
  if (!reader.one_in(4)) return lists;
  std::vector<int64_t>* const damaged = reader.any_of<std::vector<int64_t>*>({&lists.indptr, &lists.places, nullptr});
  const auto number = reader.one_in(2) ? damaged_id(reader) : int64_t(reader.raw() % uint64_t(graph.num_edges() + 2));
  if (damaged && !damaged->empty()) (*damaged)[reader.raw() % damaged->size()] = number;
  if (!damaged && !lists.rows.empty()) lists.rows[reader.raw() % lists.rows.size()] = Id(number);
  return lists;
}

template <typename T, typename Id>
void check_maxima(const OwnedLists<Id>& lists, const Shape& shape) {
  const auto x = table_from<T>(shape, shape.num_rows, 1);
  const auto grad = table_from<T>(shape, lists.num_lists(), 2);
  const auto transposed = transposed_of(lists, shape.num_rows);
  const HeadWeights<T> weights{cells_from<T>(shape, lists.num_entries(), 8), shape.heads};
  for (const HeadWeights<T>& given : {HeadWeights<T>(), weights}) {
    const auto maxima = maxima_of(lists, x, shape.threads, given), wanted = plain_maxima(lists, x, given);
    check_near(maxima.values, wanted.values, 0);
    CHECK_EQUAL(maxima.winners, wanted.winners);
    const int32_t* winners = maxima.winners.data();
    check_near(maxima_backward(lists, transposed, grad, maxima.winners, shape.threads, given),
               plain_maxima_backward(lists, shape.num_rows, grad, maxima.winners, given), 0);
    check_near(dots_of(lists, x, grad, shape.heads, shape.threads, winners),
               plain_dots(lists, x, grad, shape.heads, winners), 0);
  }
}

template <typename T, typename Id>
void check_softmax(const OwnedLists<Id>& lists, const Shape& shape) {
  const auto scores = cells_from<T>(shape, lists.num_entries(), 3);
  auto grad = cells_from<T>(shape, lists.num_entries(), 4);
  for (T& value : grad) value = std::isfinite(value) ? value : T(1);  // infinity minus itself: another for each formula
  int64_t longest = 0;
  for (int64_t i = 0; i < lists.num_lists(); ++i) longest = std::max(longest, lists.length(i));
  if (longest > 600) return;  // the plain backward takes the square of it
  const auto softmax = softmax_of(lists.indptr, scores, shape.heads, shape.threads);
  check_near(softmax, plain_softmax(lists.indptr, scores, shape.heads), 8 + double(longest));
  check_near(softmax_backward(lists.indptr, softmax, grad, shape.heads, shape.threads),
             plain_softmax_backward(lists.indptr, softmax, grad, shape.heads), 40 + 10 * double(longest), 1);
}

template <typename T, typename Id>
void check_lists_from(ByteReader& reader) {
  const Shape shape = shape_from(reader);
  const auto lists = lists_from<Id>(reader, shape);
  const bool refused = !thrown_by([&] { check_lists(lists.view(), shape.num_rows); }).empty();
  CHECK_EQUAL(refused, !are_sound(lists, shape.num_rows));
  if (refused) return;
  const auto x = table_from<T>(shape, shape.num_rows, 5), y = table_from<T>(shape, lists.num_lists(), 6);
  const HeadWeights<T> weights{cells_from<T>(shape, lists.num_entries(), 7), shape.heads};
  for (const HeadWeights<T>& given : {HeadWeights<T>(), weights})
    for (bool mean : {false, true})
      check_near(sums_of(lists, x, given, mean, shape.threads), plain_sums(lists, x, given, mean), mean ? 2 : 0);
  check_near(dots_of(lists, x, y, shape.heads, shape.threads), plain_dots(lists, x, y, shape.heads), 0);
  check_maxima<T>(lists, shape);
  check_softmax<T>(lists, shape);
}

}  // namespace

void check_aggregation(ByteReader& reader) {
  switch (reader.below(4)) {
    case 0:
      return check_lists_from<float, int32_t>(reader);
    case 1:
      return check_lists_from<float, int64_t>(reader);
    case 2:
      return check_lists_from<double, int32_t>(reader);
    default:
      return check_lists_from<double, int64_t>(reader);
  }
}

}  // namespace hoploom::test
