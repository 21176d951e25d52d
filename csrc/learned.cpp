// Gradients are sorted by id first: then equal ids are neighbours, and rows are visited in the order of their
// addresses.
#include "learned.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <numbers>
#include <string>
#include <vector>

#include "gather.h"
#include "mapped_file.h"
#include "processor.h"
#include "random.h"
#include "threads.h"

namespace hoploom {
namespace {

constexpr int kDigitBits = 11;
constexpr uint32_t kInfinite = 0x7F800000;  // the exponent of numbers that are not finite
constexpr int64_t kSmall = 1 << 15;         // values; for fewer, another thread costs more than it saves
constexpr int64_t kAhead = 6;               // rows that are requested before they are changed
constexpr int64_t kReadAhead = 20;          // before they are read
constexpr int kFileThreads = 32;            // each waits for one record at a time
constexpr int64_t kLanes = 16;              // partial sums, so that every processor adds up in one order

struct Entry {
  uint64_t row;   // counted from the first
  int64_t place;  // of its gradient
};

// Returns the gradients' places, sorted by row; those of one row in the order given.
std::vector<Entry> sorted_by_row(const RowGradients& given, int64_t first, int64_t num_rows) {
  check_ids(given.ids, given.count, first, num_rows);
  std::vector<Entry> entries(size_t(given.count));
  for (int64_t i = 0; i < given.count; ++i) entries[size_t(i)] = {uint64_t(given.ids[i] - first), i};
  if (std::is_sorted(given.ids, given.ids + given.count)) return entries;
  std::vector<Entry> other(entries.size());
  const int bits = num_rows > 1 ? 64 - std::countl_zero(uint64_t(num_rows - 1)) : 0;
  for (int shift = 0; shift < bits; shift += kDigitBits) {
    const auto digit = [shift](const Entry& entry) { return entry.row >> shift & ((1u << kDigitBits) - 1); };
    std::vector<size_t> begins((1u << kDigitBits) + 1);
    for (const Entry& entry : entries) ++begins[digit(entry) + 1];
    for (size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
    for (const Entry& entry : entries) other[begins[digit(entry)]++] = entry;
    entries.swap(other);
  }
  return entries;
}

// Reads or writes bytes of the record of row `id`. A mapping of the file would cost more: the kernel protects each page
// that it writes to the disk, on all processors.
template <typename T, typename Call, typename Bytes>
void transfer(Call call, const LearnedRows<T>& rows, int64_t id, Bytes* bytes, int64_t count) {
  for (int64_t done = 0; done < count;) {
    const ssize_t result = call(rows.file, bytes + done, size_t(count - done), off_t(id * rows.record_bytes() + done));
    if (result < 0 && errno == EINTR) continue;
    if (result <= 0)
      throw DamagedFile("row " + std::to_string(id) + " in the file of learned rows: " +
                        (result < 0 ? std::strerror(errno) : "the file ends before it") +
                        "; check the disk of the folder that Embedding was given");
    done += result;
  }
}

HOPLOOM_INLINE float widened(float value) { return value; }
HOPLOOM_INLINE float widened(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Rounds up or down at random, so that the expected value is exact: small updates would vanish otherwise.
HOPLOOM_INLINE uint16_t rounded(float value, uint32_t random) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & kInfinite) != kInfinite) bits += random & 0xFFFFu;  // neither infinite nor NaN
  return uint16_t(bits >> 16);
}

HOPLOOM_INLINE void store(const float* from, float* to, int64_t width, uint64_t) { std::copy(from, from + width, to); }
HOPLOOM_INLINE void store(const float* from, uint16_t* to, int64_t width, uint64_t key) {
  for (int64_t c = 0; c < width; c += 4) {
    const uint64_t random = mix(key, uint64_t(c));
    for (int64_t i = c; i < std::min(c + 4, width); ++i) to[i] = rounded(from[i], uint32_t(random >> 16 * (i - c)));
  }
}

// Returns the scaled sum of a row's gradients, in `out` unless it is the only gradient itself.
HOPLOOM_INLINE const float* add_up(const RowGradients& given, const Entry* begin, const Entry* end, int64_t width,
                                   double scale, double* sums, float* out) {
  const float* only = given.gradients + begin->place * given.stride;
  if (end - begin == 1 && scale == 1) return only;
  std::fill(sums, sums + width, 0.0);
  for (const Entry* entry = begin; entry < end; ++entry) {
    const float* gradient = given.gradients + entry->place * given.stride;
    for (int64_t c = 0; c < width; ++c) sums[c] += gradient[c];
  }
  for (int64_t c = 0; c < width; ++c) out[c] = float(sums[c] * scale);
  return out;
}

HOPLOOM_INLINE float mean_square(const float* gradient, int64_t width) {
  float lanes[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes)
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] += gradient[c + i] * gradient[c + i];
  for (int64_t i = 0; c + i < width; ++i) lanes[i] += gradient[c + i] * gradient[c + i];
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0] / float(width);
}

// Changes a row by its gradient, in the arithmetic of torch.optim's sparse optimizers.
HOPLOOM_INLINE void follow(float* row, const float* gradient, float* state, int64_t width, const RowStep& step) {
  const float rate = float(step.rate), eps = float(step.eps);
  if (step.rule == RowRule::kSgd) {
    for (int64_t c = 0; c < width; ++c) row[c] -= rate * gradient[c];
  } else if (step.rule == RowRule::kRowwiseAdagrad) {
    state[0] += mean_square(gradient, width);
    const float factor = rate / (std::sqrt(state[0]) + eps);
    for (int64_t c = 0; c < width; ++c) row[c] -= factor * gradient[c];
  } else if (step.rule == RowRule::kAdagrad) {
    for (int64_t c = 0; c < width; ++c) {
      state[c] += gradient[c] * gradient[c];
      row[c] -= rate * (gradient[c] / (std::sqrt(state[c]) + eps));
    }
  } else {
    float *first = state, *second = state + width, *count = state + 2 * width;
    *count += 1;
    const double corrected = std::sqrt(1 - std::pow(step.beta2, *count)) / (1 - std::pow(step.beta1, *count));
    const float size = float(step.rate * corrected);
    const float keep1 = float(1 - step.beta1), keep2 = float(1 - step.beta2);
    for (int64_t c = 0; c < width; ++c) {
      first[c] += (gradient[c] - first[c]) * keep1;
      second[c] += (gradient[c] * gradient[c] - second[c]) * keep2;
      row[c] -= size * (first[c] / (std::sqrt(second[c]) + eps));
    }
  }
}

template <typename T>
struct Share {
  LearnedRows<T> rows;
  LearnedRows<float> state;
  RowGradients given;
  RowStep step;
  const Entry *begin, *end;  // begins and ends between two rows
  int64_t* broken;           // a row that would not be finite, or its state
};

HOPLOOM_INLINE bool is_finite(const float* values, int64_t width) {
  uint32_t found = 0;
  for (int64_t c = 0; c < width; ++c) found |= uint32_t((std::bit_cast<uint32_t>(values[c]) & kInfinite) == kInfinite);
  return !found;
}

// The ids of one thread, and where their rows go.
template <typename T>
struct Reading {
  LearnedRows<const T> rows;
  const int64_t* ids;
  int64_t begin, end;
  float* out;
};

template <typename T>
HOPLOOM_INLINE void read_share(const Reading<T>& share) {
  const int64_t width = share.rows.width, bytes = width * int64_t(sizeof(T));
  const bool is_in_memory = share.rows.file < 0;
  std::vector<T> read(size_t(is_in_memory ? 0 : width));
  const auto row_of = [&](int64_t i) { return share.rows.row(share.ids[i] - share.rows.first); };
  for (int64_t i = share.begin; i < share.end; ++i) {
    if (is_in_memory && i + kReadAhead < share.end) request(row_of(i + kReadAhead), bytes);
    if (!is_in_memory) transfer(pread, share.rows, share.ids[i], reinterpret_cast<uint8_t*>(read.data()), bytes);
    const T* row = is_in_memory ? row_of(i) : read.data();
    for (int64_t c = 0; c < width; ++c) share.out[i * width + c] = widened(row[c]);
  }
}

template <typename T>
HOPLOOM_INLINE void update_share(const Share<T>& share) {
  const LearnedRows<T>& rows = share.rows;
  const int64_t width = rows.width, state_width = share.state.width;
  const bool is_in_memory = rows.file < 0, has_state = state_width > 0;  // the address of none may be null
  const int64_t state_at =
      has_state ? (reinterpret_cast<char*>(share.state.values) - reinterpret_cast<char*>(rows.values)) / 4 : 0;
  std::vector<float> record(size_t(is_in_memory ? 0 : rows.record_bytes() / 4));
  auto* bytes = reinterpret_cast<uint8_t*>(record.data());
  std::vector<double> sums(static_cast<size_t>(width));
  std::vector<float> values(size_t(2 * width + state_width));
  float *sum = values.data(), *row = sum + width, *state = row + width;
  for (const Entry* entry = share.begin; entry < share.end;) {
    if (entry + kAhead < share.end) {
      const Entry& coming = entry[kAhead];
      if (is_in_memory) {
        request<1>(rows.row(int64_t(coming.row)), width * int64_t(sizeof(T)));
        if (has_state) request<1>(share.state.row(int64_t(coming.row)), state_width * 4);
      }
      request(share.given.gradients + coming.place * share.given.stride, width * 4);
    }
    const Entry* next = entry + 1;
    while (next < share.end && next->row == entry->row) ++next;
    const float* gradient = add_up(share.given, entry, next, width, share.step.scale, sums.data(), sum);
    const int64_t id = int64_t(entry->row) + rows.first;
    if (!is_in_memory) transfer(pread, rows, id, bytes, rows.record_bytes());
    T* own = is_in_memory ? rows.row(int64_t(entry->row)) : reinterpret_cast<T*>(bytes);
    float* own_state = is_in_memory && has_state ? share.state.row(int64_t(entry->row)) : record.data() + state_at;
    entry = next;
    for (int64_t c = 0; c < width; ++c) row[c] = widened(own[c]);
    std::copy_n(own_state, state_width, state);
    follow(row, gradient, state, width, share.step);
    if (!is_finite(row, width + state_width)) {
      *share.broken = id;
      continue;
    }
    store(row, own, width, mix(share.step.key, uint64_t(id)));
    std::copy_n(state, state_width, own_state);
    if (!is_in_memory) transfer(pwrite, rows, id, bytes, rows.record_bytes());
  }
}

int useful_threads(int64_t num_values, int threads) {
  return int(std::clamp<int64_t>(num_values / kSmall, 1, std::max(threads, 1)));
}

// Those that visit `count` rows.
template <typename T>
int useful_threads(const LearnedRows<T>& rows, int64_t count, int threads) {
  return rows.file < 0 ? useful_threads(count * rows.width, threads) : int(std::clamp<int64_t>(count, 1, kFileThreads));
}

}  // namespace

int64_t state_width(RowRule rule, int64_t width) {
  const int64_t widths[] = {0, 1, width, 2 * width + 1};
  return widths[int(rule)];
}

template <typename T>
int64_t update_rows(const LearnedRows<T>& rows, const LearnedRows<float>& state, const RowGradients& given,
                    const RowStep& step, int threads) {
  const std::vector<Entry> entries = sorted_by_row(given, rows.first, rows.num_rows);
  const int64_t used = useful_threads(rows, given.count, threads);
  const auto bound = [&](int64_t t) {
    size_t at = size_t(given.count * t / used);
    while (at > 0 && at < entries.size() && entries[at].row == entries[at - 1].row) ++at;
    return entries.data() + at;
  };
  std::vector<int64_t> broken(size_t(used), -1);
  on_threads(int(used), [&](int t) {
    run_fastest<update_share<T>>(Share<T>{rows, state, given, step, bound(t), bound(t + 1), &broken[size_t(t)]});
  });
  return *std::max_element(broken.begin(), broken.end());
}

template <typename T>
void look_up_rows(const LearnedRows<const T>& rows, const int64_t* ids, int64_t count, int threads, float* out) {
  check_ids(ids, count, rows.first, rows.num_rows);
  const int64_t used = useful_threads(rows, count, threads);
  on_threads(int(used), [&](int t) {
    run_fastest<read_share<T>>(Reading<T>{rows, ids, count * t / used, count * (t + 1) / used, out});
  });
}

template <typename T>
void draw_rows(const LearnedRows<T>& rows, const int64_t* ids, uint64_t key, bool normal, double spread, int threads) {
  const int64_t used = useful_threads(rows.num_rows * rows.width, threads);
  on_threads(int(used), [&](int t) {
    std::vector<float> values(static_cast<size_t>(rows.width));
    for (int64_t i = rows.num_rows * t / used; i < rows.num_rows * (t + 1) / used; ++i) {
      const uint64_t id = uint64_t(ids[i]);
      for (int64_t c = 0; c < rows.width; c += 4) {
        uint32_t words[4];
        philox(key, uint32_t(id), uint32_t(id >> 32), 0, uint32_t(c / 4), words);
        for (int64_t j = c; j < std::min(c + 4, rows.width); ++j) {
          const uint32_t word = words[j - c];
          if (!normal) {
            values[size_t(j)] = float((double(word) * 0x1p-31 - 1) * spread);
            continue;
          }
          const double radius = std::sqrt(-2 * std::log((double(words[(j - c) & ~1]) + 0.5) * 0x1p-32));
          const double angle = 2 * std::numbers::pi * double(words[(j - c) | 1]) * 0x1p-32;
          values[size_t(j)] = float(spread * radius * ((j - c) & 1 ? std::sin(angle) : std::cos(angle)));
        }
      }
      store(values.data(), rows.row(i), rows.width, mix(key, id));
    }
  });
}

template int64_t update_rows(const LearnedRows<float>&, const LearnedRows<float>&, const RowGradients&, const RowStep&,
                             int);
template int64_t update_rows(const LearnedRows<uint16_t>&, const LearnedRows<float>&, const RowGradients&,
                             const RowStep&, int);
template void look_up_rows(const LearnedRows<const float>&, const int64_t*, int64_t, int, float*);
template void look_up_rows(const LearnedRows<const uint16_t>&, const int64_t*, int64_t, int, float*);
template void draw_rows(const LearnedRows<float>&, const int64_t*, uint64_t, bool, double, int);
template void draw_rows(const LearnedRows<uint16_t>&, const int64_t*, uint64_t, bool, double, int);

}  // namespace hoploom
