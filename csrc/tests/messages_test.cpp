// Messages and scores of edges, forward and backward, against plain loops, and the same bits on any number of threads.
#include "../messages.h"

#include "fuzz_aggregate.h"
#include "graphs.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr int64_t kRows = 30;
const std::vector<int64_t> kLengths = {0, 1, 2, 0, 33, 7, 1, 64, 0, 3, 1, 17, 0};

// Small whole numbers: sums of products of them are exact in any order.
double whole(uint64_t i) { return double(mix(17, i) % 5) - 2; }
double broken(uint64_t i) { return double(mix(19, i) >> 11) * 0x1p-52 - 1; }
using ValueOf = double (*)(uint64_t);

template <typename Id>
OwnedLists<Id> lists_of(const std::vector<int64_t>& lengths) {
  const Graph graph = graph_of_degrees(lengths, kRows);
  return {graph.indptr, {graph.sources.begin(), graph.sources.end()}, {}};
}

template <typename T>
std::vector<T> cells(int64_t count, ValueOf value_of, uint64_t first) {
  std::vector<T> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = T(value_of(i + first));
  return values;
}

struct Shape {
  int64_t width, gap, heads, num_features;  // features: 0: no term, -1: rows of full width
};
const std::vector<Shape> kShapes = {{1, 0, 1, 1},  {7, 2, 7, 3},   {16, 0, 2, 8},   {24, 1, 4, 9},
                                    {24, 0, 1, 0}, {20, 3, 2, -1}, {64, 0, 64, 16}, {9, 0, 3, 17}};

// The arguments of one call, and all that the functions write.
template <typename T, typename Id>
struct Case {
  OwnedLists<Id> lists, transposed;
  Shape shape;
  int64_t num_features, num_edges;
  Table<T> x, right, grad;                 // grad, of messages, and right have a row per list
  std::vector<T> rows, weight, att, sent;  // sent: gradient of scores
  int threads = 1;

  Case(const std::vector<int64_t>& lengths, const Shape& of, ValueOf value)
      : lists(lists_of<Id>(lengths)),
        transposed(transposed_of(lists, kRows)),
        shape(of),
        num_features(of.num_features < 0 ? of.width : of.num_features),
        num_edges(lists.num_entries()),
        x(table_of<T>(kRows, of.width, of.width + of.gap, value)),
        right(table_of<T>(lists.num_lists(), of.width, of.width + 2 * of.gap,
                          [&](uint64_t i) { return value(i + 7777); })),
        grad(table_of<T>(lists.num_lists(), of.width, of.width + of.gap, [&](uint64_t i) { return value(i + 5555); })),
        rows(cells<T>(num_edges * num_features, value, 1000000)),
        weight(cells<T>(of.num_features > 0 ? of.width * num_features : 0, value, 2000000)),
        att(cells<T>(of.width, value, 3000000)),
        sent(cells<T>(num_edges * of.heads, value, 4000000)) {}

  EdgeTerm<T> term() const {
    return {num_features ? rows.data() : nullptr, num_features, weight.empty() ? nullptr : weight.data()};
  }
  Scorer<T> scorer() const { return {att.data(), shape.heads, T(0.5)}; }
  T added(int64_t edge, int64_t c) const {
    if (!num_features) return 0;
    if (weight.empty()) return rows[size_t(edge * num_features + c)];
    T sum = 0;
    for (int64_t k = 0; k < num_features; ++k)
      sum += rows[size_t(edge * num_features + k)] * weight[size_t(c * num_features + k)];
    return sum;
  }
};

template <typename T>
struct Found {
  std::vector<T> out, to_x, to_right, to_att, to_rows, to_weight;
  std::vector<int32_t> winners;

  bool operator==(const Found& other) const {
    return same_bits(out, other.out) && same_bits(to_x, other.to_x) && same_bits(to_right, other.to_right) &&
           same_bits(to_att, other.to_att) && same_bits(to_rows, other.to_rows) &&
           same_bits(to_weight, other.to_weight) && winners == other.winners;
  }
};

// All gradients, from change(list, edge, column): the gradient of the edge's term.
template <typename T, typename Id, typename Change>
void send_back(const Case<T, Id>& of, Found<T>& found, Change change) {
  const int64_t width = of.shape.width;
  found.to_x.assign(size_t(kRows * width), 0);
  found.to_rows.assign(of.rows.size(), 0), found.to_weight.assign(of.weight.size(), 0);
  for (int64_t i = 0; i < of.lists.num_lists(); ++i)
    for (int64_t e = of.lists.indptr[size_t(i)]; e < of.lists.indptr[size_t(i) + 1]; ++e)
      for (int64_t c = 0; c < width; ++c) {
        const T grad = change(i, e, c);
        found.to_x[size_t(of.lists.row(e) * width + c)] += grad;
        if (of.weight.empty() && of.num_features) found.to_rows[size_t(e * width + c)] += grad;
        for (int64_t k = 0; k < of.num_features && !of.weight.empty(); ++k) {
          found.to_rows[size_t(e * of.num_features + k)] += grad * of.weight[size_t(c * of.num_features + k)];
          found.to_weight[size_t(c * of.num_features + k)] += grad * of.rows[size_t(e * of.num_features + k)];
        }
      }
}

template <typename T, typename Id>
Found<T> plain_messages(const Case<T, Id>& of, Message message) {
  Found<T> found;
  const auto value = [&](int64_t e, int64_t c) { return of.x.at(of.lists.row(e), c) + of.added(e, c); };
  for (int64_t i = 0; i < of.lists.num_lists(); ++i)
    for (int64_t c = 0; c < of.shape.width; ++c) {
      const int64_t begin = of.lists.indptr[size_t(i)], end = of.lists.indptr[size_t(i) + 1];
      T total = 0;
      int32_t winner = begin < end ? 0 : -1;
      for (int64_t e = begin; e < end; ++e) {
        const T term = value(e, c);
        if (message == Message::kSumOfRelu) total += std::max(term, T(0));
        if (message == Message::kSumOfSquare) total += term * term;
        if (message == Message::kMax && term > value(begin + winner, c)) winner = int32_t(e - begin);
      }
      if (message == Message::kMax) found.winners.push_back(winner);
      if (message == Message::kMax && winner >= 0) total = value(begin + winner, c);
      found.out.push_back(total);
    }
  send_back(of, found, [&](int64_t i, int64_t e, int64_t c) {
    const T term = value(e, c), grad = of.grad.at(i, c);
    if (message == Message::kSumOfRelu) return term > 0 ? grad : T(0);
    if (message == Message::kSumOfSquare) return 2 * term * grad;
    return found.winners[size_t(i * of.shape.width + c)] == e - of.lists.indptr[size_t(i)] ? grad : T(0);
  });
  return found;
}

template <typename T, typename Id>
Found<T> messages_of(const Case<T, Id>& of, Message message) {
  const int64_t num_values = of.lists.num_lists() * of.shape.width;
  const bool is_max = message == Message::kMax;
  Found<T> found{.out = unwritten<T>(num_values),
                 .to_x = unwritten<T>(kRows * of.shape.width),
                 .to_right = {},
                 .to_att = {},
                 .to_rows = unwritten<T>(int64_t(of.rows.size())),
                 .to_weight = unwritten<T>(int64_t(of.weight.size())),
                 .winners = unwritten<int32_t>(is_max ? num_values : 0)};
  int32_t* const winners = is_max ? found.winners.data() : nullptr;
  message_rows(of.lists.view(), of.x.view(), of.term(), message, false, of.threads, found.out.data(), winners);
  if (is_max)
    max_rows_backward(of.transposed.view(), of.lists.indptr.data(), of.grad.view(), {}, winners, of.threads,
                      found.to_x.data());
  else
    message_rows_backward(of.transposed.view(), of.x.view(), of.term(), message, of.grad.view(), of.threads,
                          found.to_x.data());
  message_terms_backward<T, Id>(
      of.lists.view(), of.x.view(), of.term(), message, of.grad.view(), winners, of.threads,
      {of.rows.empty() ? nullptr : found.to_rows.data(), of.weight.empty() ? nullptr : found.to_weight.data()});
  return found;
}

template <typename T, typename Id>
Found<T> plain_scores(const Case<T, Id>& of) {
  Found<T> found;
  const int64_t width = of.shape.width, heads = of.shape.heads;
  found.out.assign(of.sent.size(), 0), found.to_att.assign(size_t(width), 0);
  found.to_right.assign(size_t(of.lists.num_lists() * width), 0);
  send_back(of, found, [&](int64_t i, int64_t e, int64_t c) {
    const T value = of.x.at(of.lists.row(e), c) + of.right.at(i, c) + of.added(e, c);
    const auto place = size_t(e * heads + c * heads / width);
    const T change = of.sent[place] * (value > 0 ? T(1) : T(0.5)), att = of.att[size_t(c)];
    found.out[place] += att * (value > 0 ? value : value / 2);
    found.to_att[size_t(c)] += change * value;
    found.to_right[size_t(i * width + c)] += change * att;
    return change * att;
  });
  return found;
}

template <typename T, typename Id>
Found<T> scores_of(const Case<T, Id>& of) {
  const int64_t width = of.shape.width;
  Found<T> found{.out = unwritten<T>(int64_t(of.sent.size())),
                 .to_x = unwritten<T>(kRows * width),
                 .to_right = unwritten<T>(of.lists.num_lists() * width),
                 .to_att = unwritten<T>(width),
                 .to_rows = unwritten<T>(int64_t(of.rows.size())),
                 .to_weight = unwritten<T>(int64_t(of.weight.size())),
                 .winners = {}};
  const auto x = of.x.view(), right = of.right.view();
  pair_scores(of.lists.view(), x, right, of.term(), of.scorer(), of.threads, found.out.data());
  pair_scores_backward_left(of.transposed.view(), x, right, of.term(), of.scorer(), of.sent.data(), of.threads,
                            found.to_x.data());
  pair_scores_backward_right<T, Id>(
      of.lists.view(), x, right, of.term(), of.scorer(), of.sent.data(), of.threads, found.to_right.data(),
      found.to_att.data(),
      {of.rows.empty() ? nullptr : found.to_rows.data(), of.weight.empty() ? nullptr : found.to_weight.data()});
  return found;
}

template <typename T>
void check_equal(const Found<T>& found, const Found<T>& wanted) {
  for (const auto part : {&Found<T>::out, &Found<T>::to_x, &Found<T>::to_right, &Found<T>::to_att, &Found<T>::to_rows,
                          &Found<T>::to_weight})
    CHECK_EQUAL(found.*part, wanted.*part);
  CHECK_EQUAL(found.winners, wanted.winners);
}

template <typename Body>
void for_each_type(Body body) {
  body(float(), int32_t());
  body(float(), int64_t());
  body(double(), int32_t());
  body(double(), int64_t());
}

constexpr Message kMessages[] = {Message::kSumOfRelu, Message::kSumOfSquare, Message::kMax};

}  // namespace

TEST(messages_and_their_gradients_equal_plain_loops) {
  for_each_type([]<typename T, typename Id>(T, Id) {
    for (const auto& lengths : {kLengths, {}, {0, 0}, {500}})
      for (const Shape& shape : kShapes)
        for (const Message message : kMessages) {
          const Case<T, Id> of(lengths, shape, whole);
          check_equal(messages_of(of, message), plain_messages(of, message));
        }
  });
}

TEST(scores_and_their_gradients_equal_plain_loops) {
  for_each_type([]<typename T, typename Id>(T, Id) {
    for (const auto& lengths : {kLengths, {}, {0, 0}, {500}})
      for (const Shape& shape : kShapes) {
        const Case<T, Id> of(lengths, shape, whole);
        check_equal(scores_of(of), plain_scores(of));
      }
  });
}

TEST(messages_and_scores_have_the_same_bits_on_any_number_of_threads) {
  std::vector<int64_t> lengths(900, 4);
  lengths.insert(lengths.begin() + 40, {0, 900, 0, 0, 1});
  for_each_type([&]<typename T, typename Id>(T, Id) {
    Case<T, Id> of(lengths, {64, 2, 4, 10}, broken);
    const auto scores = scores_of(of);
    std::vector<Found<T>> messages;
    for (const Message message : kMessages) messages.push_back(messages_of(of, message));
    for (int threads : {2, 3, 17, 0}) {
      of.threads = threads;
      CHECK(scores_of(of) == scores);
      for (const Message message : kMessages) CHECK(messages_of(of, message) == messages[size_t(message)]);
    }
  });
}

TEST(a_mean_divides_by_the_length_and_a_value_that_is_no_number_stays_with_its_edge) {
  Case<float, int32_t> of({2, 0, 4}, {3, 0, 1, 2}, whole);
  const auto sums = messages_of(of, Message::kSumOfRelu).out;
  std::vector<float> means(9);
  message_rows(of.lists.view(), of.x.view(), of.term(), Message::kSumOfRelu, true, 1, means.data(), nullptr);
  for (size_t c = 0; c < 3; ++c) {
    CHECK_EQUAL(means[c], sums[c] / 2);
    CHECK_EQUAL(means[3 + c], 0.0f);
    CHECK_EQUAL(means[6 + c], sums[6 + c] / 4);
  }
  of.rows[0] = std::numeric_limits<float>::quiet_NaN();
  const auto found = messages_of(of, Message::kSumOfRelu).out;
  CHECK(std::isnan(found[0]));
  CHECK_EQUAL(found[6], sums[6]);
}
