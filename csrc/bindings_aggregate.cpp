// Aggregation and learned rows for Python: one overload per type of value and of id. Checks shapes, releases the GIL,
// calls the core.
#include "best.h"
#include "bindings_lists.h"
#include "learned.h"
#include "products.h"
#include "shared_softmax.h"
#include "tables.h"

namespace hoploom {
namespace {

template <typename T>
Weights<T> weights_of(const std::optional<Rows<const T>>& weights, size_t num_entries, size_t width) {
  const size_t heads = weights ? weights->shape(1) : 1;
  require(!weights || (weights->shape(0) == num_entries && heads > 0 && width % heads == 0),
          "one weight per edge and head is needed");
  return {weights ? weights->data() : nullptr, int64_t(heads)};
}

// Stored is In's type in Python, which has no bfloat16: its bits come as int16_t.
template <typename In, typename T, typename Id, typename Stored = In>
void bind_sums(nb::module_& m) {
  m.def(
      "sum_rows",
      [](Array<int64_t> indptr, Array<Id> rows, Optional<int64_t> places, Strided<Stored> x,
         std::optional<Rows<const T>> weights, bool mean, int threads, Rows<Stored> out) {
        const auto lists = lists_of(indptr, rows, places, int64_t(x.shape(0)));
        const size_t most = std::max(x.shape(1), out.shape(1));
        Weights<T> factors = weights_of<T>(weights, rows.shape(0), most);
        factors.sum_width = int64_t(out.shape(1));
        require(int64_t(out.shape(0)) == lists.num_lists &&
                    (out.shape(1) == x.shape(1) || std::min(x.shape(1), out.shape(1)) * size_t(factors.heads) == most),
                "the output has another shape");
        const auto [values, num_rows, width, stride] = matrix_of(x);
        nb::gil_scoped_release release;
        sum_rows(lists, Matrix<In>{reinterpret_cast<const In*>(values), num_rows, width, stride}, factors, mean,
                 threads, reinterpret_cast<In*>(out.data()));
      },
      nb::arg("indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("places").noconvert().none(),
      nb::arg("x").noconvert(), nb::arg("weights").noconvert().none(), "mean"_a, "threads"_a,
      nb::arg("out").noconvert());
}

template <typename T, typename Id>
void bind_aggregation(nb::module_& m) {
  bind_sums<T, T, Id>(m);
  m.def(
      "max_rows",
      [](Array<int64_t> indptr, Array<Id> rows, Strided<T> x, std::optional<Rows<const T>> weights, int threads,
         Rows<T> out, Rows<int32_t> winners) {
        const auto lists = lists_of(indptr, rows, {}, int64_t(x.shape(0)));
        const auto factors = weights_of<T>(weights, rows.shape(0), x.shape(1));
        require(int64_t(out.shape(0)) == lists.num_lists && out.shape(1) == x.shape(1) &&
                    winners.shape(0) == out.shape(0) && winners.shape(1) == out.shape(1),
                "the output has another shape");
        nb::gil_scoped_release release;
        max_rows(lists, matrix_of(x), factors, threads, out.data(), winners.data());
      },
      nb::arg("indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("x").noconvert(),
      nb::arg("weights").noconvert().none(), "threads"_a, nb::arg("out").noconvert(), nb::arg("winners").noconvert());
  m.def(
      "max_rows_backward",
      [](Array<int64_t> out_indptr, Array<Id> rows, Optional<int64_t> places, Array<int64_t> indptr, Strided<T> grad,
         std::optional<Rows<const T>> weights, Rows<const int32_t> winners, int threads, Rows<T> out) {
        const auto lists = lists_of(out_indptr, rows, places, int64_t(grad.shape(0)));
        const auto factors = weights_of<T>(weights, rows.shape(0), grad.shape(1));
        require(indptr.shape(0) == grad.shape(0) + 1 && winners.shape(0) == grad.shape(0) &&
                    winners.shape(1) == grad.shape(1) && int64_t(out.shape(0)) == lists.num_lists &&
                    out.shape(1) == grad.shape(1),
                "the output has another shape");
        check_indptr(indptr.data(), int64_t(grad.shape(0)), int64_t(rows.shape(0)));
        nb::gil_scoped_release release;
        max_rows_backward(lists, indptr.data(), matrix_of(grad), factors, winners.data(), threads, out.data());
      },
      nb::arg("out_indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("places").noconvert().none(),
      nb::arg("indptr").noconvert(), nb::arg("grad").noconvert(), nb::arg("weights").noconvert().none(),
      nb::arg("winners").noconvert(), "threads"_a, nb::arg("out").noconvert());
  m.def(
      "dot_rows",
      [](Array<int64_t> indptr, Array<Id> rows, Strided<T> x, Strided<T> y, std::optional<Rows<const int32_t>> winners,
         int threads, Rows<T> out) {
        const auto lists = lists_of(indptr, rows, {}, int64_t(x.shape(0)));
        require(int64_t(y.shape(0)) == lists.num_lists && out.shape(0) == rows.shape(0) && out.shape(1) > 0 &&
                    y.shape(1) % out.shape(1) == 0 &&
                    (y.shape(1) == x.shape(1) || y.shape(1) == x.shape(1) * out.shape(1)) &&
                    (!winners || (winners->shape(0) == y.shape(0) && winners->shape(1) == y.shape(1))),
                "the output has another shape");
        nb::gil_scoped_release release;
        dot_rows(lists, matrix_of(x), matrix_of(y), int64_t(out.shape(1)), winners ? winners->data() : nullptr, threads,
                 out.data());
      },
      nb::arg("indptr").noconvert(), nb::arg("rows").noconvert(), nb::arg("x").noconvert(), nb::arg("y").noconvert(),
      nb::arg("winners").noconvert().none(), "threads"_a, nb::arg("out").noconvert());
}

template <typename T>
void bind_softmax(nb::module_& m) {
  m.def(
      "softmax_lists",
      [](Array<int64_t> indptr, Rows<const T> scores, std::optional<Rows<const T>> grad, int threads, Rows<T> out) {
        require(indptr.shape(0) >= 1, "indptr is empty");
        const int64_t num_lists = int64_t(indptr.shape(0)) - 1, heads = int64_t(scores.shape(1));
        const auto fits = [&](const auto& a) { return a.shape(0) == scores.shape(0) && a.shape(1) == scores.shape(1); };
        require(fits(out) && (!grad || fits(*grad)), "the output has another shape");
        check_indptr(indptr.data(), num_lists, int64_t(scores.shape(0)));
        nb::gil_scoped_release release;
        if (grad)
          softmax_lists_backward(indptr.data(), num_lists, heads, scores.data(), grad->data(), threads, out.data());
        else softmax_lists(indptr.data(), num_lists, heads, scores.data(), threads, out.data());
      },
      nb::arg("indptr").noconvert(), nb::arg("scores").noconvert(), nb::arg("grad").noconvert().none(), "threads"_a,
      nb::arg("out").noconvert());
}

// A table is (rows [n, bytes per row] uint8, first id).
void sum_table_rows(nb::list tables, int element, Array<int64_t> ids, Array<int64_t> indptr, bool mean,
                    Rows<float> out) {
  require(element >= 0 && element <= int(Element::kBfloat16) && nb::len(tables) > 0, "no such element, or no table");
  std::vector<Rows<const uint8_t>> kept;
  std::vector<TableRows> parts;
  for (nb::handle table : tables) {
    kept.push_back(nb::cast<Rows<const uint8_t>>(table[0], false));
    parts.push_back({kept.back().data(), nb::cast<int64_t>(table[1]), int64_t(kept.back().shape(0))});
    require(int64_t(kept.back().shape(1)) == int64_t(out.shape(1)) * element_bytes(Element(element)),
            "the output has another width");
  }
  require(indptr.shape(0) == out.shape(0) + 1, "the output has another shape");
  check_indptr(indptr.data(), int64_t(out.shape(0)), int64_t(ids.shape(0)));
  std::vector<const void*> arrays = {ids.data(), indptr.data()};
  for (const TableRows& part : parts) arrays.push_back(part.rows);
  nb::gil_scoped_release release;
  read_maps(arrays, [&] {
    sum_tables(parts, Element(element), ids.data(), int64_t(ids.shape(0)), indptr.data(), int64_t(out.shape(0)),
               int64_t(out.shape(1)), mean, out.data());
  });
}

// scores [num_sources, width] are of the destinations from `first` on; `best` and `ids` [num_sources, k] are changed.
void keep_best_rows(Rows<const float> scores, int64_t first, Optional<int64_t> indptr, Optional<int64_t> known,
                    int threads, Rows<float> best, Rows<int64_t> ids) {
  const int64_t num_sources = int64_t(scores.shape(0)), k = int64_t(best.shape(1));
  require(int64_t(best.shape(0)) == num_sources && ids.shape(0) == best.shape(0) && ids.shape(1) == best.shape(1),
          "one row per source is needed");
  require(bool(indptr) == bool(known), "indptr and known are given together");
  if (indptr) {
    require(int64_t(indptr->shape(0)) == num_sources + 1, "one list per source is needed");
    check_indptr(indptr->data(), num_sources, int64_t(known->shape(0)));
  }
  nb::gil_scoped_release release;
  keep_best({scores.data(), num_sources, int64_t(scores.shape(1)), first}, {pointer(indptr), pointer(known)}, k,
            threads, best.data(), ids.data());
}

void choose_among_shared(Rows<const float> queries, Rows<const float> truths, Rows<const float> candidates,
                         float temperature, Optional<float> weights, int threads, Output<float> losses,
                         Rows<float> to_queries, Rows<float> to_truths, Rows<float> to_candidates) {
  const auto same = [](const auto& a, const auto& b) { return a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1); };
  require(same(queries, truths) && queries.shape(1) == candidates.shape(1), "one true row per query is needed");
  require(candidates.shape(0) > 0 && candidates.shape(1) > 0, "candidates are needed");
  require(losses.shape(0) == queries.shape(0) && (!weights || weights->shape(0) == queries.shape(0)),
          "one loss and weight per query is needed");
  require(same(to_queries, queries) && same(to_truths, truths) && same(to_candidates, candidates),
          "the gradient has another shape");
  nb::gil_scoped_release release;
  shared_softmax({queries.data(), truths.data(), candidates.data(), int64_t(queries.shape(0)),
                  int64_t(candidates.shape(0)), int64_t(queries.shape(1)), temperature, pointer(weights)},
                 threads, losses.data(), {to_queries.data(), to_truths.data(), to_candidates.data()});
}

void multiply_layer_rows(Strided<float> x, Rows<const float> by, bool turned, Optional<float> bias, int threads,
                         Rows<float> out) {
  require(by.shape(turned ? 1 : 0) == x.shape(1) && by.shape(turned ? 0 : 1) == out.shape(1) &&
              out.shape(0) == x.shape(0) && (!bias || bias->shape(0) == out.shape(1)),
          "the shapes of a product do not match");
  nb::gil_scoped_release release;
  multiply_rows(matrix_of(x), by.data(), int64_t(out.shape(1)), turned, pointer(bias), threads, out.data());
}

void multiply_layer_columns(Strided<float> a, Strided<float> b, int threads, Rows<float> out,
                            std::optional<Output<float>> sums) {
  require(a.shape(0) == b.shape(0) && out.shape(0) == a.shape(1) && out.shape(1) == b.shape(1) &&
              (!sums || sums->shape(0) == a.shape(1)),
          "the shapes of a product do not match");
  nb::gil_scoped_release release;
  multiply_columns(matrix_of(a), matrix_of(b), threads, out.data(), sums ? sums->data() : nullptr);
}

template <typename T>
using Records = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;  // rows, or states of rows, with gaps between them

template <typename T>
LearnedRows<T> learned_of(const Records<T>& rows, int64_t first, int file) {
  require(rows.size() == 0 || rows.stride(1) == 1, "the values of a row must lie beside each other");
  return {rows.data(), int64_t(rows.shape(0)), int64_t(rows.shape(1)), first, int64_t(rows.stride(0)), file};
}

template <typename T>
void bind_learned_rows(nb::module_& m) {
  m.def(
      "draw_rows",
      [](Records<T> rows, Array<int64_t> ids, uint64_t key, bool normal, double spread, int threads) {
        require(rows.shape(0) == ids.shape(0), "one id per row is needed");
        const LearnedRows<T> table = learned_of(rows, 0, -1);
        nb::gil_scoped_release release;
        draw_rows(table, ids.data(), key, normal, spread, threads);
      },
      nb::arg("rows").noconvert(), nb::arg("ids").noconvert(), "key"_a, "normal"_a, "spread"_a, "threads"_a);
  m.def(
      "look_up_rows",
      [](Records<const T> rows, int file, Array<int64_t> ids, int threads, Rows<float> out) {
        require(out.shape(0) == ids.shape(0) && out.shape(1) == rows.shape(1), "the output has another shape");
        const LearnedRows<const T> table = learned_of(rows, 0, file);
        nb::gil_scoped_release release;
        look_up_rows(table, ids.data(), int64_t(ids.shape(0)), threads, out.data());
      },
      nb::arg("rows").noconvert(), "file"_a, nb::arg("ids").noconvert(), "threads"_a, nb::arg("out").noconvert());
  m.def(
      "update_rows",
      [](Records<T> rows, int file, int64_t first, Records<float> state, Array<int64_t> ids, Strided<float> gradients,
         int rule, double rate, double scale, double eps, double beta1, double beta2, uint64_t key, int threads) {
        require(rule >= 0 && rule <= int(RowRule::kLazyAdam), "no such rule");
        const LearnedRows<T> table = learned_of(rows, first, file);
        const LearnedRows<float> states = learned_of(state, first, file);
        require(states.num_rows == table.num_rows && states.width == state_width(RowRule(rule), table.width),
                "the state has another shape");
        require(gradients.shape(0) == ids.shape(0) && int64_t(gradients.shape(1)) == table.width,
                "one gradient per id is needed");
        const Matrix<float> found = matrix_of(gradients);
        nb::gil_scoped_release release;
        return update_rows(table, states, {ids.data(), found.values, found.num_rows, found.stride},
                           {RowRule(rule), rate, scale, eps, beta1, beta2, key}, threads);
      },
      nb::arg("rows").noconvert(), "file"_a, "first"_a, nb::arg("state").noconvert(), nb::arg("ids").noconvert(),
      nb::arg("gradients").noconvert(), "rule"_a, "rate"_a, "scale"_a, "eps"_a, "beta1"_a, "beta2"_a, "key"_a,
      "threads"_a);
}

}  // namespace

void bind_aggregates(nb::module_& m) {
  bind_aggregation<float, int32_t>(m);
  bind_aggregation<float, int64_t>(m);
  bind_aggregation<double, int32_t>(m);
  bind_aggregation<double, int64_t>(m);
  bind_sums<Bfloat16, float, int32_t, int16_t>(m);
  bind_sums<Bfloat16, float, int64_t, int16_t>(m);
  bind_softmax<float>(m);
  bind_softmax<double>(m);
  bind_learned_rows<float>(m);
  bind_learned_rows<uint16_t>(m);
  m.def("state_width", [](int rule, int64_t width) { return state_width(RowRule(rule), width); }, "rule"_a, "width"_a);
  m.def("sum_tables", &sum_table_rows, "tables"_a, "element"_a, nb::arg("ids").noconvert(),
        nb::arg("indptr").noconvert(), "mean"_a, nb::arg("out").noconvert());
  m.def("keep_best", &keep_best_rows, nb::arg("scores").noconvert(), "first"_a, nb::arg("indptr").noconvert().none(),
        nb::arg("known").noconvert().none(), "threads"_a, nb::arg("best").noconvert(), nb::arg("ids").noconvert());
  m.def("has_fast_products", &has_fast_products);
  m.def("multiply_rows", &multiply_layer_rows, nb::arg("x").noconvert(), nb::arg("by").noconvert(), "turned"_a,
        nb::arg("bias").noconvert().none(), "threads"_a, nb::arg("out").noconvert());
  m.def("multiply_columns", &multiply_layer_columns, nb::arg("a").noconvert(), nb::arg("b").noconvert(), "threads"_a,
        nb::arg("out").noconvert(), nb::arg("sums").noconvert().none());
  m.def("shared_softmax", &choose_among_shared, nb::arg("queries").noconvert(), nb::arg("truths").noconvert(),
        nb::arg("candidates").noconvert(), "temperature"_a, nb::arg("weights").noconvert().none(), "threads"_a,
        nb::arg("losses").noconvert(), nb::arg("to_queries").noconvert(), nb::arg("to_truths").noconvert(),
        nb::arg("to_candidates").noconvert());
}

}  // namespace hoploom
