// Messages and scores of edges for Python: one overload per type of value and of id. Checks shapes, releases the GIL,
// calls the core.
#include "bindings_lists.h"
#include "messages.h"

namespace hoploom {
namespace {

template <typename T>
using MaybeRows = std::optional<Rows<T>>;

template <typename T>
T* pointer(const MaybeRows<T>& rows) {
  return rows ? rows->data() : nullptr;
}

template <typename A, typename B>
bool same_shape(const A& a, const B& b) {
  return a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1);
}

template <typename T>
EdgeTerm<T> term_of(const MaybeRows<const T>& rows, const MaybeRows<const T>& weight, int64_t num_entries,
                    int64_t width) {
  if (!rows) return {nullptr, 0, nullptr};
  const auto num_features = int64_t(rows->shape(1));
  require(int64_t(rows->shape(0)) == num_entries && num_features > 0, "one row per edge is needed");
  require(
      weight ? int64_t(weight->shape(0)) == width && int64_t(weight->shape(1)) == num_features : num_features == width,
      "the weight has another shape");
  return {rows->data(), num_features, pointer(weight)};
}

template <typename T>
TermGradient<T> gradient_of(const EdgeTerm<T>& term, const MaybeRows<T>& rows, const MaybeRows<T>& weight,
                            int64_t num_entries, int64_t width) {
  require(!rows || (int64_t(rows->shape(0)) == num_entries && int64_t(rows->shape(1)) == term.num_features),
          "the gradient has another shape");
  require(
      !weight || (term.weight && int64_t(weight->shape(0)) == width && int64_t(weight->shape(1)) == term.num_features),
      "the gradient has another shape");
  return {pointer(rows), pointer(weight)};
}

Message message_of(int message, bool has_winners) {
  require(message >= 0 && message <= int(Message::kMax), "no such message");
  require((message == int(Message::kMax)) == has_winners, "a maximum has winners");
  return Message(message);
}

template <typename T>
Scorer<T> scorer_of(const Strided<T>& left, const Strided<T>& right, const Rows<const T>& att, double slope) {
  require(left.shape(1) == right.shape(1) && att.size() == left.shape(1) && att.shape(0) > 0,
          "the ends have another width");
  return {att.data(), int64_t(att.shape(0)), T(slope)};
}

template <typename T, typename Id>
void bind_message_rows(nb::module_& m) {
  m.def(
      "message_rows",
      [](Array<int64_t> indptr, Array<Id> rows, Strided<T> x, MaybeRows<const T> term_rows, MaybeRows<const T> weight,
         int message, bool mean, int threads, Rows<T> out, MaybeRows<int32_t> winners) {
        const auto lists = lists_of(indptr, rows, {}, int64_t(x.shape(0)));
        const auto term = term_of<T>(term_rows, weight, lists.num_entries, int64_t(x.shape(1)));
        require(int64_t(out.shape(0)) == lists.num_lists && out.shape(1) == x.shape(1) &&
                    (!winners || same_shape(*winners, out)),
                "the output has another shape");
        const Message of = message_of(message, bool(winners));
        nb::gil_scoped_release release;
        message_rows(lists, matrix_of(x), term, of, mean, threads, out.data(), pointer(winners));
      },
      nb::arg("indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("x").noconvert(),
      nb::arg("term_rows").noconvert(), nb::arg("weight").noconvert().none(), "message"_a, "mean"_a, "threads"_a,
      nb::arg("out").noconvert(), nb::arg("winners").noconvert().none());
  m.def(
      "message_rows_backward",
      [](Array<int64_t> out_indptr, Array<Id> rows, Optional<int64_t> places, Strided<T> x,
         MaybeRows<const T> term_rows, MaybeRows<const T> weight, int message, Strided<T> grad, int threads,
         Rows<T> out) {
        const auto lists = lists_of(out_indptr, rows, places, int64_t(grad.shape(0)));
        const auto term = term_of<T>(term_rows, weight, lists.num_entries, int64_t(x.shape(1)));
        require(int64_t(x.shape(0)) == lists.num_lists && grad.shape(1) == x.shape(1) && same_shape(out, x),
                "the output has another shape");
        const Message of = message_of(message, false);
        nb::gil_scoped_release release;
        message_rows_backward(lists, matrix_of(x), term, of, matrix_of(grad), threads, out.data());
      },
      nb::arg("out_indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("places").noconvert().none(),
      nb::arg("x").noconvert(), nb::arg("term_rows").noconvert(), nb::arg("weight").noconvert().none(), "message"_a,
      nb::arg("grad").noconvert(), "threads"_a, nb::arg("out").noconvert());
  m.def(
      "message_terms_backward",
      [](Array<int64_t> indptr, Array<Id> rows, Strided<T> x, MaybeRows<const T> term_rows, MaybeRows<const T> weight,
         int message, Strided<T> grad, MaybeRows<const int32_t> winners, int threads, MaybeRows<T> grad_rows,
         MaybeRows<T> grad_weight) {
        const auto lists = lists_of(indptr, rows, {}, int64_t(x.shape(0)));
        const auto width = int64_t(x.shape(1));
        const auto term = term_of<T>(term_rows, weight, lists.num_entries, width);
        const auto out = gradient_of<T>(term, grad_rows, grad_weight, lists.num_entries, width);
        require(int64_t(grad.shape(0)) == lists.num_lists && grad.shape(1) == x.shape(1) &&
                    (!winners || same_shape(*winners, grad)),
                "the gradient has another shape");
        const Message of = message_of(message, bool(winners));
        nb::gil_scoped_release release;
        message_terms_backward(lists, matrix_of(x), term, of, matrix_of(grad), pointer(winners), threads, out);
      },
      nb::arg("indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("x").noconvert(),
      nb::arg("term_rows").noconvert(), nb::arg("weight").noconvert().none(), "message"_a, nb::arg("grad").noconvert(),
      nb::arg("winners").noconvert().none(), "threads"_a, nb::arg("grad_rows").noconvert().none(),
      nb::arg("grad_weight").noconvert().none());
}

template <typename T, typename Id>
void bind_scores(nb::module_& m) {
  m.def(
      "pair_scores",
      [](Array<int64_t> indptr, Array<Id> rows, Strided<T> left, Strided<T> right, MaybeRows<const T> term_rows,
         MaybeRows<const T> weight, Rows<const T> att, double slope, int threads, Rows<T> out) {
        const auto lists = lists_of(indptr, rows, {}, int64_t(left.shape(0)));
        const auto term = term_of<T>(term_rows, weight, lists.num_entries, int64_t(left.shape(1)));
        const auto scorer = scorer_of(left, right, att, slope);
        require(int64_t(right.shape(0)) == lists.num_lists && int64_t(out.shape(0)) == lists.num_entries &&
                    out.shape(1) == att.shape(0),
                "the output has another shape");
        nb::gil_scoped_release release;
        pair_scores(lists, matrix_of(left), matrix_of(right), term, scorer, threads, out.data());
      },
      nb::arg("indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("left").noconvert(),
      nb::arg("right").noconvert(), nb::arg("term_rows").noconvert().none(), nb::arg("weight").noconvert().none(),
      nb::arg("att").noconvert(), "slope"_a, "threads"_a, nb::arg("out").noconvert());
  m.def(
      "pair_scores_backward_left",
      [](Array<int64_t> out_indptr, Array<Id> rows, Optional<int64_t> places, Strided<T> left, Strided<T> right,
         MaybeRows<const T> term_rows, MaybeRows<const T> weight, Rows<const T> att, double slope, Rows<const T> grad,
         int threads, Rows<T> out) {
        const auto lists = lists_of(out_indptr, rows, places, int64_t(right.shape(0)));
        const auto term = term_of<T>(term_rows, weight, lists.num_entries, int64_t(left.shape(1)));
        const auto scorer = scorer_of(left, right, att, slope);
        require(int64_t(left.shape(0)) == lists.num_lists && same_shape(out, left) &&
                    int64_t(grad.shape(0)) == lists.num_entries && grad.shape(1) == att.shape(0),
                "the gradient has another shape");
        nb::gil_scoped_release release;
        pair_scores_backward_left(lists, matrix_of(left), matrix_of(right), term, scorer, grad.data(), threads,
                                  out.data());
      },
      nb::arg("out_indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("places").noconvert().none(),
      nb::arg("left").noconvert(), nb::arg("right").noconvert(), nb::arg("term_rows").noconvert().none(),
      nb::arg("weight").noconvert().none(), nb::arg("att").noconvert(), "slope"_a, nb::arg("grad").noconvert(),
      "threads"_a, nb::arg("out").noconvert());
  m.def(
      "pair_scores_backward_right",
      [](Array<int64_t> indptr, Array<Id> rows, Strided<T> left, Strided<T> right, MaybeRows<const T> term_rows,
         MaybeRows<const T> weight, Rows<const T> att, double slope, Rows<const T> grad, int threads, Rows<T> out,
         Rows<T> grad_att, MaybeRows<T> grad_rows, MaybeRows<T> grad_weight) {
        const auto lists = lists_of(indptr, rows, {}, int64_t(left.shape(0)));
        const auto width = int64_t(left.shape(1));
        const auto term = term_of<T>(term_rows, weight, lists.num_entries, width);
        const auto scorer = scorer_of(left, right, att, slope);
        const auto grad_term = gradient_of<T>(term, grad_rows, grad_weight, lists.num_entries, width);
        require(int64_t(right.shape(0)) == lists.num_lists && same_shape(out, right) && same_shape(grad_att, att) &&
                    int64_t(grad.shape(0)) == lists.num_entries && grad.shape(1) == att.shape(0),
                "the gradient has another shape");
        nb::gil_scoped_release release;
        pair_scores_backward_right(lists, matrix_of(left), matrix_of(right), term, scorer, grad.data(), threads,
                                   out.data(), grad_att.data(), grad_term);
      },
      nb::arg("indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("left").noconvert(),
      nb::arg("right").noconvert(), nb::arg("term_rows").noconvert().none(), nb::arg("weight").noconvert().none(),
      nb::arg("att").noconvert(), "slope"_a, nb::arg("grad").noconvert(), "threads"_a, nb::arg("out").noconvert(),
      nb::arg("grad_att").noconvert(), nb::arg("grad_rows").noconvert().none(),
      nb::arg("grad_weight").noconvert().none());
}

template <typename T>
void bind_both_ids(nb::module_& m) {
  bind_message_rows<T, int32_t>(m);
  bind_message_rows<T, int64_t>(m);
  bind_scores<T, int32_t>(m);
  bind_scores<T, int64_t>(m);
}

}  // namespace

void bind_messages(nb::module_& m) {
  bind_both_ids<float>(m);
  bind_both_ids<double>(m);
}

}  // namespace hoploom
