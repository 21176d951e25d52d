// Terms of kTile edges at a time are a small matrix product in the first-level cache, in blocks of 8 x 8 that stay in
// registers; so are the gradients of features and weight. Gradients that all edges share are added up in kParts parts,
// whose ends do not depend on the number of threads.
#include "messages.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ahead.h"

namespace hoploom {
namespace {

constexpr int64_t kTile = 16;  // edges, a multiple of kBlock
constexpr int64_t kBlock = 8;  // widths of tiles are multiples of it
constexpr int64_t kWide = 16;  // columns of a product at a time, where vectors have 512 bits
constexpr int kParts = 16;

template <typename T>
struct alignas(kWide * sizeof(T)) Block {
  T values[kWide];
};
template <typename T>
using Blocks = std::vector<Block<T>>;
template <typename T, int64_t kLanes = kBlock>
using Lanes __attribute__((vector_size(kLanes * sizeof(T)), aligned(alignof(T)), may_alias)) = T;

// The number of blocks for some values.
size_t blocks_of(int64_t values) { return size_t((values + kWide - 1) / kWide); }
int64_t padded(int64_t width) { return (width + kBlock - 1) / kBlock * kBlock; }

template <typename T>
HOPLOOM_INLINE T* values_of(Blocks<T>& blocks) {
  return reinterpret_cast<T*>(blocks.data());
}
template <typename T>
HOPLOOM_INLINE const T* values_of(const Blocks<T>& blocks) {
  return reinterpret_cast<const T*>(blocks.data());
}

// A matrix that is read as a[row * across + column * down].
template <typename T>
struct Strides {
  const T* values;
  int64_t across, down;
};

// The columns [at, at + kLanes) of `multiply`.
template <int64_t kLanes, typename T>
HOPLOOM_INLINE void multiply_lanes(const Strides<T>& a, const T* b, int64_t num_rows, int64_t inner, int64_t width,
                                   bool adds, int64_t at, T* c) {
  using Some = Lanes<T, kLanes>;
  for (int64_t r = 0; r < num_rows; r += kBlock) {
    Some sums[kBlock] = {};
    if (adds)
      for (int64_t k = 0; k < kBlock; ++k) sums[k] = *reinterpret_cast<Some*>(c + (r + k) * width + at);
    for (int64_t i = 0; i < inner; ++i) {
      const Some row = *reinterpret_cast<const Some*>(b + i * width + at);
      for (int64_t k = 0; k < kBlock; ++k) sums[k] += a.values[(r + k) * a.across + i * a.down] * row;
    }
    for (int64_t k = 0; k < kBlock; ++k) *reinterpret_cast<Some*>(c + (r + k) * width + at) = sums[k];
  }
}

// c [num_rows, width] = a [num_rows, inner] * b [inner, width], added to c if `adds`. Rows and width are multiples of
// kBlock. kLanes columns are computed at a time; this changes no bit.
template <int64_t kLanes, typename T>
HOPLOOM_INLINE void multiply(const Strides<T>& a, const T* b, int64_t num_rows, int64_t inner, int64_t width, bool adds,
                             T* c) {
  int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) multiply_lanes<kLanes, T>(a, b, num_rows, inner, width, adds, at, c);
  for (; at < width; at += kBlock) multiply_lanes<kBlock, T>(a, b, num_rows, inner, width, adds, at, c);
}

// The weight with zeros up to full blocks, in both orders.
template <typename T>
struct PaddedWeight {
  int64_t num_features = 0, width = 0;  // multiples of kBlock
  Blocks<T> by_feature, by_column;      // [num_features, width] and [width, num_features]

  PaddedWeight(const EdgeTerm<T>& term, int64_t columns) {
    if (!term.weight) return;
    num_features = padded(term.num_features), width = padded(columns);
    by_feature.resize(blocks_of(num_features * width)), by_column.resize(by_feature.size());
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t k = 0; k < term.num_features; ++k)
        values_of(by_feature)[k * width + c] = values_of(by_column)[c * num_features + k] =
            term.weight[c * term.num_features + k];
  }
};

// The terms of the entries [from, to) in ascending order, and the gradients of them.
template <int64_t kLanes, typename T>
class Terms {
 public:
  Terms(const EdgeTerm<T>& term, const PaddedWeight<T>& weight, const int64_t* places, int64_t width, int64_t from,
        int64_t to)
      : term_(term), weight_(weight), places_(places), width_(width), until_(from), to_(to) {
    if (!term.weight) zeros_.resize(blocks_of(padded(width))), unwanted_.resize(zeros_.size());
    features_.resize(blocks_of(kTile * weight.num_features)), feature_grads_.resize(features_.size());
    terms_.resize(blocks_of(kTile * weight.width)), grads_.resize(terms_.size());
  }

  HOPLOOM_INLINE const T* at(int64_t entry) {
    if (!term_.rows) return values_of(zeros_);
    if (!term_.weight) return term_.rows + place(entry) * width_;
    if (entry == until_) fill(entry);
    return values_of(terms_) + (entry - begin_) * weight_.width;
  }

  // Where the gradient of the entry's term is to be written, after at(entry).
  HOPLOOM_INLINE T* gradient_at(int64_t entry, const TermGradient<T>& out) {
    if (term_.weight) return values_of(grads_) + (entry - begin_) * weight_.width;
    return out.rows ? out.rows + entry * width_ : values_of(unwanted_);
  }

  // Must follow the write. `shared` [features, width], with padding, is the part's gradient of the weight.
  HOPLOOM_INLINE void wrote_gradient(int64_t entry, const TermGradient<T>& out, T* shared) {
    if (!term_.weight || entry + 1 < until_) return;
    const int64_t count = until_ - begin_, features = weight_.num_features, width = weight_.width;
    std::fill_n(values_of(grads_) + count * width, (kTile - count) * width, T(0));
    if (out.rows) {
      multiply<kLanes, T>({values_of(grads_), width, 1}, values_of(weight_.by_column), kTile, width, features, false,
                          values_of(feature_grads_));
      for (int64_t e = 0; e < count; ++e)
        std::copy_n(values_of(feature_grads_) + e * features, term_.num_features,
                    out.rows + (begin_ + e) * term_.num_features);
    }
    if (shared)
      multiply<kLanes, T>({values_of(features_), 1, features}, values_of(grads_), features, kTile, width, true, shared);
  }

 private:
  HOPLOOM_INLINE int64_t place(int64_t entry) const { return places_ ? places_[entry] : entry; }

  HOPLOOM_INLINE void fill(int64_t entry) {
    begin_ = entry, until_ = std::min(entry + kTile, to_);
    for (int64_t e = begin_; e < until_; ++e)
      std::copy_n(term_.rows + place(e) * term_.num_features, term_.num_features,
                  values_of(features_) + (e - begin_) * weight_.num_features);
    std::fill_n(values_of(features_) + (until_ - begin_) * weight_.num_features,
                (kTile - (until_ - begin_)) * weight_.num_features, T(0));  // never 0 times an old NaN
    if (places_)
      for (int64_t e = until_; e < std::min(until_ + kTile, to_); ++e)
        request(term_.rows + places_[e] * term_.num_features, term_.num_features * int64_t(sizeof(T)));
    multiply<kLanes, T>({values_of(features_), weight_.num_features, 1}, values_of(weight_.by_feature), kTile,
                        term_.num_features, weight_.width, false, values_of(terms_));
  }

  const EdgeTerm<T>& term_;
  const PaddedWeight<T>& weight_;
  const int64_t* places_;
  int64_t width_, begin_ = 0, until_, to_;
  Blocks<T> features_, terms_, grads_, feature_grads_, zeros_, unwanted_;
};

template <int64_t kLanes, Message message, typename T, typename Id>
HOPLOOM_INLINE void message_range(const RowLists<Id>& lists, const Matrix<T>& x, const EdgeTerm<T>& term,
                                  const PaddedWeight<T>& weight, bool mean, int64_t from, int64_t to, T* out,
                                  int32_t* winners) {
  const int64_t width = x.width, ahead = entries_ahead(width * int64_t(sizeof(T)));
  Terms<kLanes, T> terms(term, weight, lists.places, width, lists.indptr[from], lists.indptr[to]);
  for (int64_t i = from; i < to; ++i) {
    const int64_t begin = lists.indptr[i], end = lists.indptr[i + 1];
    T* __restrict total = out + i * width;
    int32_t* __restrict winner = winners + (message == Message::kMax ? i * width : 0);
    std::fill_n(total, width, T(0));
    if (message == Message::kMax) std::fill_n(winner, width, -1);
    for (int64_t e = begin; e < end; ++e) {
      request_entry(lists, x, e + ahead);
      const T* __restrict row = x.values + int64_t(lists.rows[e]) * x.stride;
      const T* __restrict added = terms.at(e);
      if (message == Message::kMax && e == begin) {
        for (int64_t c = 0; c < width; ++c) total[c] = row[c] + added[c];
        std::fill_n(winner, width, 0);
        continue;
      }
      for (int64_t c = 0; c < width; ++c) {
        const T value = row[c] + added[c];
        if constexpr (message == Message::kMax) {  // as in max_rows: the first NaN wins
          const bool wins = value > total[c] || (value != value && total[c] == total[c]);
          total[c] = wins ? value : total[c];
          winner[c] = wins ? int32_t(e - begin) : winner[c];
        } else if constexpr (message == Message::kSumOfRelu) {
          total[c] += value < 0 ? T(0) : value;
        } else {
          total[c] += value * value;
        }
      }
    }
    if (mean && end - begin > 1) {
      const T scale = T(1) / T(end - begin);
      for (int64_t c = 0; c < width; ++c) total[c] *= scale;
    }
  }
}

// Gradient of act(value), times grad.
template <Message message, typename T>
HOPLOOM_INLINE T through_act(T value, T grad) {
  if constexpr (message == Message::kSumOfRelu) return value > 0 ? grad : T(0);
  return T(2) * value * grad;
}

template <int64_t kLanes, Message message, typename T, typename Id>
HOPLOOM_INLINE void message_backward_range(const RowLists<Id>& lists, const Matrix<T>& x, const EdgeTerm<T>& term,
                                           const PaddedWeight<T>& weight, const Matrix<T>& grad, int64_t from,
                                           int64_t to, T* out) {
  const int64_t width = x.width, ahead = entries_ahead(width * int64_t(sizeof(T)));
  Terms<kLanes, T> terms(term, weight, lists.places, width, lists.indptr[from], lists.indptr[to]);
  for (int64_t s = from; s < to; ++s) {
    T* __restrict total = out + s * width;
    const T* __restrict row = x.values + s * x.stride;
    std::fill_n(total, width, T(0));
    for (int64_t e = lists.indptr[s]; e < lists.indptr[s + 1]; ++e) {
      request_entry(lists, grad, e + ahead);
      const T* __restrict sent = grad.values + int64_t(lists.rows[e]) * grad.stride;
      const T* __restrict added = terms.at(e);
      for (int64_t c = 0; c < width; ++c) total[c] += through_act<message>(row[c] + added[c], sent[c]);
    }
  }
}

template <int64_t kLanes, Message message, typename T, typename Id>
HOPLOOM_INLINE void message_terms_range(const RowLists<Id>& lists, const Matrix<T>& x, const EdgeTerm<T>& term,
                                        const PaddedWeight<T>& weight, const Matrix<T>& grad, const int32_t* winners,
                                        int64_t from, int64_t to, const TermGradient<T>& out, T* shared) {
  const int64_t width = x.width, ahead = entries_ahead(width * int64_t(sizeof(T)));
  Terms<kLanes, T> terms(term, weight, nullptr, width, lists.indptr[from], lists.indptr[to]);
  for (int64_t i = from; i < to; ++i) {
    const T* __restrict sent = grad.values + i * grad.stride;
    for (int64_t e = lists.indptr[i]; e < lists.indptr[i + 1]; ++e) {
      const T* __restrict added = terms.at(e);
      T* __restrict found = terms.gradient_at(e, out);
      if constexpr (message == Message::kMax) {
        const int32_t* __restrict winner = winners + i * width;
        for (int64_t c = 0; c < width; ++c) found[c] = winner[c] == e - lists.indptr[i] ? sent[c] : T(0);
      } else {
        request_entry(lists, x, e + ahead);
        const T* __restrict row = x.values + int64_t(lists.rows[e]) * x.stride;
        for (int64_t c = 0; c < width; ++c) found[c] = through_act<message>(row[c] + added[c], sent[c]);
      }
      terms.wrote_gradient(e, out, shared);
    }
  }
}

template <typename T>
HOPLOOM_INLINE T score_of(const T* __restrict own, const T* __restrict row, const T* __restrict added,
                          const T* __restrict att, T slope, int64_t width) {
  Lanes<T> part = {};  // in a fixed order, as in dot_rows
  const auto lanes = [](const T* at) __attribute__((always_inline)) { return reinterpret_cast<const Lanes<T>*>(at); };
  int64_t c = 0;
  for (; c + kBlock <= width; c += kBlock) {
    const Lanes<T> value = *lanes(row + c) + *lanes(own + c) + *lanes(added + c);
    part += *lanes(att + c) * (value > T(0) ? value : slope * value);
  }
  for (int64_t k = 0; c < width; ++c, ++k) {
    const T value = row[c] + own[c] + added[c];
    part[k] += att[c] * (value > 0 ? value : slope * value);
  }
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

template <typename T>
HOPLOOM_INLINE void add_slopes(const T* __restrict own, const T* __restrict row, const T* __restrict added, T sent,
                               T slope, int64_t width, T* __restrict total) {
  const T below = sent * slope;
  for (int64_t c = 0; c < width; ++c) total[c] += row[c] + own[c] + added[c] > 0 ? sent : below;
}

template <typename T>
HOPLOOM_INLINE void add_score_gradients(const T* __restrict own, const T* __restrict row, const T* __restrict added,
                                        const T* __restrict att, T sent, T slope, int64_t width, T* __restrict total,
                                        T* __restrict grad_att, T* __restrict found) {
  const T below = sent * slope;
  for (int64_t c = 0; c < width; ++c) {
    const T value = row[c] + own[c] + added[c], change = value > 0 ? sent : below;
    total[c] += change;
    grad_att[c] += change * value;
    found[c] = change * att[c];
  }
}

template <int64_t kLanes, typename T, typename Id>
HOPLOOM_INLINE void scores_range(const RowLists<Id>& lists, const Matrix<T>& left, const Matrix<T>& right,
                                 const EdgeTerm<T>& term, const PaddedWeight<T>& weight, const Scorer<T>& scorer,
                                 int64_t from, int64_t to, T* out) {
  const int64_t width = left.width, heads = scorer.heads, share = width / heads;
  const int64_t ahead = entries_ahead(width * int64_t(sizeof(T)));
  Terms<kLanes, T> terms(term, weight, nullptr, width, lists.indptr[from], lists.indptr[to]);
  for (int64_t i = from; i < to; ++i) {
    const T* __restrict own = right.values + i * right.stride;
    for (int64_t e = lists.indptr[i]; e < lists.indptr[i + 1]; ++e) {
      request_entry(lists, left, e + ahead);
      const T* __restrict row = left.values + int64_t(lists.rows[e]) * left.stride;
      const T* __restrict added = terms.at(e);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t c = h * share;
        out[e * heads + h] = score_of(own + c, row + c, added + c, scorer.att + c, scorer.slope, share);
      }
    }
  }
}

template <int64_t kLanes, typename T, typename Id>
HOPLOOM_INLINE void scores_left_range(const RowLists<Id>& lists, const Matrix<T>& left, const Matrix<T>& right,
                                      const EdgeTerm<T>& term, const PaddedWeight<T>& weight, const Scorer<T>& scorer,
                                      const T* grad, int64_t from, int64_t to, T* out) {
  const int64_t width = left.width, heads = scorer.heads, share = width / heads;
  const int64_t ahead = entries_ahead(width * int64_t(sizeof(T)));
  Terms<kLanes, T> terms(term, weight, lists.places, width, lists.indptr[from], lists.indptr[to]);
  for (int64_t s = from; s < to; ++s) {
    T* __restrict total = out + s * width;
    const T* __restrict own = left.values + s * left.stride;
    std::fill_n(total, width, T(0));
    for (int64_t e = lists.indptr[s]; e < lists.indptr[s + 1]; ++e) {
      request_entry(lists, right, e + ahead);
      const T* __restrict row = right.values + int64_t(lists.rows[e]) * right.stride;
      const T* __restrict added = terms.at(e);
      const T* __restrict sent = grad + (lists.places ? lists.places[e] : e) * heads;
      if (lists.places && e + ahead < lists.num_entries) request(grad + lists.places[e + ahead] * heads, 1);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t c = h * share;
        add_slopes(own + c, row + c, added + c, sent[h], scorer.slope, share, total + c);
      }
    }
    for (int64_t c = 0; c < width; ++c) total[c] *= scorer.att[c];
  }
}

template <int64_t kLanes, typename T, typename Id>
HOPLOOM_INLINE void scores_right_range(const RowLists<Id>& lists, const Matrix<T>& left, const Matrix<T>& right,
                                       const EdgeTerm<T>& term, const PaddedWeight<T>& weight, const Scorer<T>& scorer,
                                       const T* grad, int64_t from, int64_t to, T* out, T* __restrict grad_att,
                                       const TermGradient<T>& grad_term, T* shared) {
  const int64_t width = left.width, heads = scorer.heads, share = width / heads;
  const int64_t ahead = entries_ahead(width * int64_t(sizeof(T)));
  Terms<kLanes, T> terms(term, weight, nullptr, width, lists.indptr[from], lists.indptr[to]);
  for (int64_t i = from; i < to; ++i) {
    T* __restrict total = out + i * width;
    const T* __restrict own = right.values + i * right.stride;
    std::fill_n(total, width, T(0));
    for (int64_t e = lists.indptr[i]; e < lists.indptr[i + 1]; ++e) {
      request_entry(lists, left, e + ahead);
      const T* __restrict row = left.values + int64_t(lists.rows[e]) * left.stride;
      const T* __restrict added = terms.at(e);
      T* __restrict found = terms.gradient_at(e, grad_term);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t c = h * share;
        add_score_gradients(own + c, row + c, added + c, scorer.att + c, grad[e * heads + h], scorer.slope, share,
                            total + c, grad_att + c, found + c);
      }
      terms.wrote_gradient(e, grad_term, shared);
    }
    for (int64_t c = 0; c < width; ++c) total[c] *= scorer.att[c];
  }
}

// Calls work(part, from, to) for the lists of each part.
template <typename Work>
void in_parts(const int64_t* indptr, int64_t num_lists, int threads, int64_t width, Work work) {
  const int used = useful(std::min(threads, kParts), indptr[num_lists] * width);
  on_threads(used, [&](int t) {
    for (int part = t; part < kParts; part += used)
      work(part, first_list(indptr, num_lists, part, kParts), first_list(indptr, num_lists, part + 1, kParts));
  });
}

// Sums of `size` values for each part.
template <typename T>
struct PartSums {
  int64_t size;
  Blocks<T> blocks;

  explicit PartSums(int64_t values) : size(int64_t(blocks_of(values)) * kWide), blocks(kParts * blocks_of(values)) {}
  T* of(int part) { return values_of(blocks) + part * size; }
  const T* total() {
    for (int part = 1; part < kParts; ++part)
      for (int64_t k = 0; k < size; ++k) of(0)[k] += of(part)[k];
    return of(0);
  }
};

template <typename T>
void write_weight(const PaddedWeight<T>& weight, PartSums<T>& sums, int64_t columns, int64_t num_features, T* out) {
  const T* total = sums.total();
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t k = 0; k < num_features; ++k) out[c * num_features + k] = total[k * weight.width + c];
}

// Calls body with the message as a constant.
template <typename Body>
void for_message(Message message, Body body) {
  if (message == Message::kSumOfRelu) body.template operator()<Message::kSumOfRelu>();
  else if (message == Message::kSumOfSquare) body.template operator()<Message::kSumOfSquare>();
  else body.template operator()<Message::kMax>();
}

}  // namespace

template <typename T, typename Id>
void message_rows(const RowLists<Id>& lists, const Matrix<T>& x, const EdgeTerm<T>& term, Message message, bool mean,
                  int threads, T* out, int32_t* winners) {
  const PaddedWeight<T> weight(term, x.width);
  for_message(message, [&]<Message of>() {
    in_shares(lists.indptr, lists.num_lists, threads, x.width, [&](int64_t from, int64_t to) {
      run_widest<message_range<kBlock, of, T, Id>, message_range<kWide, of, T, Id>>(lists, x, term, weight, mean, from,
                                                                                    to, out, winners);
    });
  });
}

template <typename T, typename Id>
void message_rows_backward(const RowLists<Id>& transposed, const Matrix<T>& x, const EdgeTerm<T>& term, Message message,
                           const Matrix<T>& grad, int threads, T* out) {
  const PaddedWeight<T> weight(term, x.width);
  for_message(message, [&]<Message of>() {
    in_shares(transposed.indptr, transposed.num_lists, threads, x.width, [&](int64_t from, int64_t to) {
      run_widest<message_backward_range<kBlock, of, T, Id>, message_backward_range<kWide, of, T, Id>>(
          transposed, x, term, weight, grad, from, to, out);
    });
  });
}

template <typename T, typename Id>
void message_terms_backward(const RowLists<Id>& lists, const Matrix<T>& x, const EdgeTerm<T>& term, Message message,
                            const Matrix<T>& grad, const int32_t* winners, int threads, const TermGradient<T>& out) {
  const PaddedWeight<T> weight(term, x.width);
  PartSums<T> sums(out.weight ? weight.num_features * weight.width : 0);
  for_message(message, [&]<Message of>() {
    in_parts(lists.indptr, lists.num_lists, threads, x.width, [&](int part, int64_t from, int64_t to) {
      T* const shared = out.weight ? sums.of(part) : nullptr;
      run_widest<message_terms_range<kBlock, of, T, Id>, message_terms_range<kWide, of, T, Id>>(
          lists, x, term, weight, grad, winners, from, to, out, shared);
    });
  });
  if (out.weight) write_weight(weight, sums, x.width, term.num_features, out.weight);
}

template <typename T, typename Id>
void pair_scores(const RowLists<Id>& lists, const Matrix<T>& left, const Matrix<T>& right, const EdgeTerm<T>& term,
                 const Scorer<T>& scorer, int threads, T* out) {
  const PaddedWeight<T> weight(term, left.width);
  in_shares(lists.indptr, lists.num_lists, threads, left.width, [&](int64_t from, int64_t to) {
    run_widest<scores_range<kBlock, T, Id>, scores_range<kWide, T, Id>>(lists, left, right, term, weight, scorer, from,
                                                                        to, out);
  });
}

template <typename T, typename Id>
void pair_scores_backward_left(const RowLists<Id>& transposed, const Matrix<T>& left, const Matrix<T>& right,
                               const EdgeTerm<T>& term, const Scorer<T>& scorer, const T* grad, int threads, T* out) {
  const PaddedWeight<T> weight(term, left.width);
  in_shares(transposed.indptr, transposed.num_lists, threads, left.width, [&](int64_t from, int64_t to) {
    run_widest<scores_left_range<kBlock, T, Id>, scores_left_range<kWide, T, Id>>(transposed, left, right, term, weight,
                                                                                  scorer, grad, from, to, out);
  });
}

template <typename T, typename Id>
void pair_scores_backward_right(const RowLists<Id>& lists, const Matrix<T>& left, const Matrix<T>& right,
                                const EdgeTerm<T>& term, const Scorer<T>& scorer, const T* grad, int threads, T* out,
                                T* grad_att, const TermGradient<T>& grad_term) {
  const PaddedWeight<T> weight(term, left.width);
  PartSums<T> sums(grad_term.weight ? weight.num_features * weight.width : 0), of_att(padded(left.width));
  in_parts(lists.indptr, lists.num_lists, threads, left.width, [&](int part, int64_t from, int64_t to) {
    T* const shared = grad_term.weight ? sums.of(part) : nullptr;
    run_widest<scores_right_range<kBlock, T, Id>, scores_right_range<kWide, T, Id>>(
        lists, left, right, term, weight, scorer, grad, from, to, out, of_att.of(part), grad_term, shared);
  });
  std::copy_n(of_att.total(), left.width, grad_att);
  if (grad_term.weight) write_weight(weight, sums, left.width, term.num_features, grad_term.weight);
}

#define HOPLOOM_INSTANCES(T, Id)                                                                                       \
  template void message_rows(const RowLists<Id>&, const Matrix<T>&, const EdgeTerm<T>&, Message, bool, int, T*,        \
                             int32_t*);                                                                                \
  template void message_rows_backward(const RowLists<Id>&, const Matrix<T>&, const EdgeTerm<T>&, Message,              \
                                      const Matrix<T>&, int, T*);                                                      \
  template void message_terms_backward(const RowLists<Id>&, const Matrix<T>&, const EdgeTerm<T>&, Message,             \
                                       const Matrix<T>&, const int32_t*, int, const TermGradient<T>&);                 \
  template void pair_scores(const RowLists<Id>&, const Matrix<T>&, const Matrix<T>&, const EdgeTerm<T>&,               \
                            const Scorer<T>&, int, T*);                                                                \
  template void pair_scores_backward_left(const RowLists<Id>&, const Matrix<T>&, const Matrix<T>&, const EdgeTerm<T>&, \
                                          const Scorer<T>&, const T*, int, T*);                                        \
  template void pair_scores_backward_right(const RowLists<Id>&, const Matrix<T>&, const Matrix<T>&,                    \
                                           const EdgeTerm<T>&, const Scorer<T>&, const T*, int, T*, T*,                \
                                           const TermGradient<T>&);
HOPLOOM_INSTANCES(float, int32_t)
HOPLOOM_INSTANCES(float, int64_t)
HOPLOOM_INSTANCES(double, int32_t)
HOPLOOM_INSTANCES(double, int64_t)
#undef HOPLOOM_INSTANCES

}  // namespace hoploom
