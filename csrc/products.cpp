// A panel is kPanel columns of all rows. Some rows of x times a panel are kept in registers. A product of columns is
// added up in parts, whose ends do not depend on the number of threads, kDepth rows at a time.
#include "products.h"

#include <algorithm>

#include "panels.h"
#include "threads.h"

namespace hoploom {
namespace {

constexpr int kVectors = 4;       // of a panel's row
constexpr int64_t kChunk = 48;    // rows that are in the cache for all panels; a multiple of kGroup
constexpr int64_t kDepth = 128;   // rows of a product of columns that are in the cache
constexpr int64_t kLeast = 1024;  // rows of a part
constexpr int64_t kMostParts = 16;
constexpr int64_t kSmallProduct = 1 << 20;  // for fewer multiplications, another thread costs more than it saves

template <int kLanes>
constexpr int64_t kPanel = kVectors * kLanes;
template <int kLanes>
constexpr int64_t kGroup = kLanes == 16 ? 6 : 2;  // rows in registers; 32 registers for AVX-512, else 16

struct RowProduct {
  Matrix<float> x;
  int64_t width;
  const float *panels, *bias;  // [panels][x.width, kPanel], [panels][kPanel]
  float* out;
};

struct ColumnProduct {
  Matrix<float> a, b;
  float *out, *sums;
};

// sums += kRows rows of a product. left[r * across + k * down] is row r's factor of row k of the panel `right`.
template <int kLanes, int kRows, int kUsed>
HOPLOOM_INLINE void add_products(const float* left, int64_t across, int64_t down, const float* right, int64_t depth,
                                 typename Vectors<kLanes>::Floats (&sums)[kRows][kUsed]) {
  for (int64_t k = 0; k < depth; ++k, right += kPanel<kLanes>)
    for (int r = 0; r < kRows; ++r) {
      const float value = left[r * across + k * down];
      for (int v = 0; v < kUsed; ++v) sums[r][v] += value * vectors_at<kLanes>(right)[v];
    }
}

// Writes `columns` of kRows rows, the part of a panel that is used.
template <int kLanes, int kRows, int kUsed>
HOPLOOM_INLINE void write_rows(const RowProduct& of, const float* left, const float* panel, const float* bias,
                               int64_t columns, float* out) {
  typename Vectors<kLanes>::Floats sums[kRows][kUsed];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kUsed; ++v) sums[r][v] = vectors_at<kLanes>(bias)[v];
  add_products<kLanes, kRows, kUsed>(left, of.x.stride, 1, panel, of.x.width, sums);
  for (int r = 0; r < kRows; ++r) std::copy_n(reinterpret_cast<const float*>(sums[r]), columns, out + r * of.width);
}

template <int kLanes, int kRows>
HOPLOOM_INLINE void write_panel(const RowProduct& of, int64_t row, int64_t panel) {
  const int64_t first = panel * kPanel<kLanes>, columns = std::min(of.width - first, kPanel<kLanes>);
  const float *left = of.x.values + row * of.x.stride, *right = of.panels + first * of.x.width;
  float* out = of.out + row * of.width + first;
  if (columns == kPanel<kLanes>)
    write_rows<kLanes, kRows, kVectors>(of, left, right, of.bias + first, kPanel<kLanes>, out);
  else if (columns > kLanes) write_rows<kLanes, kRows, kVectors>(of, left, right, of.bias + first, columns, out);
  else write_rows<kLanes, kRows, 1>(of, left, right, of.bias + first, columns, out);
}

template <int kLanes>
HOPLOOM_INLINE void row_range(const RowProduct& of, int64_t from, int64_t to) {
  constexpr int64_t kRows = kGroup<kLanes>;
  for (int64_t chunk = from; chunk < to; chunk += kChunk)
    for (int64_t panel = 0; panel < divided_up(of.width, kPanel<kLanes>); ++panel) {
      const int64_t end = std::min(chunk + kChunk, to);
      int64_t row = chunk;
      for (; row + kRows <= end; row += kRows) write_panel<kLanes, kRows>(of, row, panel);
      for (; row < end; ++row) write_panel<kLanes, 1>(of, row, panel);
    }
}

// Adds the product of the rows [from, to) to a part: [panels of b][a.width, in full groups, kPanel], then the sums of
// a's columns.
template <int kLanes>
HOPLOOM_INLINE void add_columns(const ColumnProduct& of, int64_t from, int64_t to, float* part) {
  constexpr int64_t kRows = kGroup<kLanes>;
  const int64_t groups = divided_up(of.a.width, kRows), panels = divided_up(of.b.width, kPanel<kLanes>);
  const Scratch scratch(kDepth * (groups * kRows + kPanel<kLanes>));
  float *const left = scratch.first + kDepth * kPanel<kLanes>, *const right = scratch.first;
  float* const sums = part + panels * groups * kRows * kPanel<kLanes>;
  for (int64_t at = from; at < to; at += kDepth) {
    const int64_t depth = std::min(kDepth, to - at);
    for (int64_t k = 0; k < depth; ++k) {
      const float* row = of.a.values + (at + k) * of.a.stride;
      for (int64_t c = 0; c < of.a.width; ++c) sums[c] += row[c];
      int64_t g = 0;
      for (; (g + 1) * kRows <= of.a.width; ++g)
        for (int64_t r = 0; r < kRows; ++r) left[(g * kDepth + k) * kRows + r] = row[g * kRows + r];
      for (int64_t r = 0; g < groups && r < kRows; ++r)
        left[(g * kDepth + k) * kRows + r] = g * kRows + r < of.a.width ? row[g * kRows + r] : 0.0f;
    }
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t columns = std::min(of.b.width - p * kPanel<kLanes>, kPanel<kLanes>);
      for (int64_t k = 0; k < depth; ++k) {
        const float* row = of.b.values + (at + k) * of.b.stride + p * kPanel<kLanes>;
        std::copy_n(row, columns, right + k * kPanel<kLanes>);
        std::fill_n(right + k * kPanel<kLanes> + columns, kPanel<kLanes> - columns, 0.0f);
      }
      for (int64_t g = 0; g < groups; ++g) {
        float* total = part + (p * groups + g) * kRows * kPanel<kLanes>;
        typename Vectors<kLanes>::Floats added[kRows][kVectors];
        for (int64_t r = 0; r < kRows; ++r)
          for (int v = 0; v < kVectors; ++v) added[r][v] = vectors_at<kLanes>(total + r * kPanel<kLanes>)[v];
        add_products<kLanes, kRows, kVectors>(left + g * kDepth * kRows, 1, kRows, right, depth, added);
        for (int64_t r = 0; r < kRows; ++r)
          for (int v = 0; v < kVectors; ++v) vectors_at<kLanes>(total + r * kPanel<kLanes>)[v] = added[r][v];
      }
    }
  }
}

int useful_threads(int threads, int64_t multiplications) {
  return int(std::clamp<int64_t>(multiplications / kSmallProduct, 1, std::max(threads, 1)));
}

template <int kLanes>
void run(RowProduct of, const float* by, bool turned, const float* bias, int threads,
         void (*range)(const RowProduct&, const int64_t&, const int64_t&)) {
  const int64_t depth = of.x.width, padded = divided_up(of.width, kPanel<kLanes>) * kPanel<kLanes>;
  const Scratch scratch((depth + 1) * padded);
  float *const panels = scratch.first, *const biases = panels + depth * padded;
  std::fill_n(panels, (depth + 1) * padded, 0.0f);
  for (int64_t c = 0; c < of.width; ++c) {
    float* column = panels + c / kPanel<kLanes> * kPanel<kLanes> * depth + c % kPanel<kLanes>;
    for (int64_t k = 0; k < depth; ++k) column[k * kPanel<kLanes>] = turned ? by[c * depth + k] : by[k * of.width + c];
    if (bias) biases[c] = bias[c];
  }
  of.panels = panels, of.bias = biases;
  const int64_t chunks = divided_up(of.x.num_rows, kChunk);
  const int used = useful_threads(threads, of.x.num_rows * depth * of.width);
  on_threads(used, [&](int t) {
    range(of, chunks * t / used * kChunk, std::min(chunks * (t + 1) / used * kChunk, of.x.num_rows));
  });
}

template <int kLanes>
void run(const ColumnProduct& of, int threads,
         void (*add)(const ColumnProduct&, const int64_t&, const int64_t&, float* const&)) {
  const int64_t rows = divided_up(of.a.width, kGroup<kLanes>) * kGroup<kLanes>;
  const int64_t product = divided_up(of.b.width, kPanel<kLanes>) * rows * kPanel<kLanes>;
  const int64_t size = product + divided_up(rows, kLanes) * kLanes, num_rows = of.a.num_rows;
  const int64_t num_parts = std::clamp<int64_t>(num_rows / kLeast, 1, kMostParts);
  const Scratch scratch(size * num_parts);
  const int used = useful_threads(threads, num_rows * of.a.width * of.b.width);
  on_threads(used, [&](int t) {
    for (int64_t p = t; p < num_parts; p += used) {
      std::fill_n(scratch.first + p * size, size, 0.0f);
      add(of, num_rows * p / num_parts, num_rows * (p + 1) / num_parts, scratch.first + p * size);
    }
  });
  for (int64_t p = 1; p < num_parts; ++p)
    for (int64_t k = 0; k < size; ++k) scratch.first[k] += scratch.first[p * size + k];
  for (int64_t r = 0; r < of.a.width; ++r)
    for (int64_t c = 0; c < of.b.width; c += kPanel<kLanes>)
      std::copy_n(scratch.first + (c / kPanel<kLanes> * rows + r) * kPanel<kLanes>,
                  std::min(kPanel<kLanes>, of.b.width - c), of.out + r * of.b.width + c);
  if (of.sums) std::copy_n(scratch.first + product, of.a.width, of.sums);
}

}  // namespace

bool has_fast_products() {
#if defined(HOPLOOM_AVX2)
  return has_avx512() && __builtin_cpu_is("amd");
#else
  return false;
#endif
}

void multiply_rows(const Matrix<float>& x, const float* by, int64_t width, bool turned, const float* bias, int threads,
                   float* out) {
  const RowProduct of{x, width, nullptr, nullptr, out};
#if defined(HOPLOOM_AVX2)
  if (has_avx512())
    return run<16>(of, by, turned, bias, threads,
                   run_with_avx512<row_range<16>, const RowProduct, const int64_t, const int64_t>);
#endif
  run<4>(of, by, turned, bias, threads,
         [](const RowProduct& of, const int64_t& from, const int64_t& to) { row_range<4>(of, from, to); });
}

void multiply_columns(const Matrix<float>& a, const Matrix<float>& b, int threads, float* out, float* sums) {
  const ColumnProduct of{a, b, out, sums};
#if defined(HOPLOOM_AVX2)
  if (has_avx512())
    return run<16>(of, threads,
                   run_with_avx512<add_columns<16>, const ColumnProduct, const int64_t, const int64_t, float* const>);
#endif
  run<4>(of, threads, [](const ColumnProduct& of, const int64_t& from, const int64_t& to, float* const& part) {
    add_columns<4>(of, from, to, part);
  });
}

}  // namespace hoploom
