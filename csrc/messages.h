// Messages act(row of the source + term of the edge), aggregated as they are made, and GATv2's scores of edges; forward
// and backward. A term W f is computed for a few edges at a time: no array [edges, width] is written. As in
// aggregate.h, results do not depend on the number of threads.
#pragma once
#include "aggregate.h"

namespace hoploom {

// Added to the row of an edge's source: `weight` times the edge's row, or the row itself.
template <typename T>
struct EdgeTerm {
  const T* rows;  // [num_entries, num_features], by `places`; null: nothing is added
  int64_t num_features;
  const T* weight;  // [width, num_features]; null: num_features is the width
};

// Gradients of a term; null where none is wanted.
template <typename T>
struct TermGradient {
  T* rows;    // [num_entries, num_features]
  T* weight;  // [width, num_features]
};

enum class Message : int { kSumOfRelu, kSumOfSquare, kMax };  // numbered as in ops/messages.py

// out[i] = sum of act(row + term), divided by the list's length if `mean`, or maximum per column with `winners` as of
// max_rows. An empty list gives zeros.
template <typename T, typename Id>
void message_rows(const RowLists<Id>& lists, const Matrix<T>& x, const EdgeTerm<T>& term, Message message, bool mean,
                  int threads, T* out, int32_t* winners);

// Backward of sums. The gradient of x, of which list s of the transposed lists is row s; and that of the term. For a
// maximum, max_rows_backward gives the former.
template <typename T, typename Id>
void message_rows_backward(const RowLists<Id>& transposed, const Matrix<T>& x, const EdgeTerm<T>& term, Message message,
                           const Matrix<T>& grad, int threads, T* out);
template <typename T, typename Id>
void message_terms_backward(const RowLists<Id>& lists, const Matrix<T>& x, const EdgeTerm<T>& term, Message message,
                            const Matrix<T>& grad, const int32_t* winners, int threads, const TermGradient<T>& out);

// out[entry, head] = sum over the head's columns of att * leaky_relu(row of left + the list's row of right + term).
template <typename T>
struct Scorer {
  const T* att;  // [heads, width / heads]
  int64_t heads;
  T slope;  // of the leaky relu
};
template <typename T, typename Id>
void pair_scores(const RowLists<Id>& lists, const Matrix<T>& left, const Matrix<T>& right, const EdgeTerm<T>& term,
                 const Scorer<T>& scorer, int threads, T* out);

// Backward, with the gradient of scores, grad [num_entries, heads]: for the transposed lists, whose rows are those of
// right, the gradient of left; for the lists, those of right, att and the term.
template <typename T, typename Id>
void pair_scores_backward_left(const RowLists<Id>& transposed, const Matrix<T>& left, const Matrix<T>& right,
                               const EdgeTerm<T>& term, const Scorer<T>& scorer, const T* grad, int threads, T* out);
template <typename T, typename Id>
void pair_scores_backward_right(const RowLists<Id>& lists, const Matrix<T>& left, const Matrix<T>& right,
                                const EdgeTerm<T>& term, const Scorer<T>& scorer, const T* grad, int threads, T* out,
                                T* grad_att, const TermGradient<T>& grad_term);

}  // namespace hoploom
