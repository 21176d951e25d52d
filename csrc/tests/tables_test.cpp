// sum_tables against a plain loop: one table and several, every element, ids that are in none.
#include "../tables.h"

#include <bit>
#include <cmath>
#include <limits>

#include "check.h"
#include "graphs.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

struct Cut {
  std::vector<std::vector<uint8_t>> kept;  // each exactly as large as its rows
  std::vector<TableRows> tables;
};

Cut cut(const std::vector<uint8_t>& rows, int64_t row_bytes, const std::vector<int64_t>& firsts) {
  Cut out;
  const int64_t count = row_bytes ? int64_t(rows.size()) / row_bytes : 0;
  for (size_t t = 0; t < firsts.size(); ++t) {
    const int64_t end = t + 1 < firsts.size() ? firsts[t + 1] : count;
    out.kept.emplace_back(rows.begin() + firsts[t] * row_bytes, rows.begin() + end * row_bytes);
    out.tables.push_back({out.kept.back().data(), firsts[t], end - firsts[t]});
  }
  return out;
}

// Values that every element holds exactly.
std::vector<uint8_t> packed(const std::vector<float>& values, Element element) {
  std::vector<uint8_t> out;
  for (float value : values) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    uint32_t word = bits;
    if (element == Element::kBfloat16) word = bits >> 16;
    if (element == Element::kFloat16)
      word = value == 0 ? 0 : (bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff);
    for (int64_t b = 0; b < element_bytes(element); ++b) out.push_back(uint8_t(word >> (8 * b)));
  }
  return out;
}

std::vector<float> sums(const Cut& rows, Element element, const std::vector<int64_t>& ids,
                        const std::vector<int64_t>& indptr, int64_t width, bool mean) {
  std::vector<float> out((indptr.size() - 1) * size_t(width), -7.0f);
  sum_tables(rows.tables, element, ids.data(), int64_t(ids.size()), indptr.data(), int64_t(indptr.size()) - 1, width,
             mean, out.data());
  return out;
}

}  // namespace

TEST(sums_of_tables_are_the_plain_loops_wherever_the_rows_lie) {
  constexpr int64_t kRows = 50, kWidth = 19;
  std::vector<float> values(kRows * kWidth);
  const std::vector<int64_t> drawn = scattered(kRows * kWidth, 41, 8), ids = scattered(300, kRows, 9);
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(drawn[i] - 20) / 4;
  const std::vector<int64_t> indptr = {0, 0, 1, 120, 120, 290, 300};
  for (Element element : {Element::kFloat32, Element::kFloat16, Element::kBfloat16})
    for (bool mean : {false, true})
      for (const std::vector<int64_t>& firsts :
           std::vector<std::vector<int64_t>>{{0}, {0, 0, 7, 50}, {0, 1, 2, 30, 49}}) {
        std::vector<float> wanted((indptr.size() - 1) * kWidth, 0.0f);
        for (size_t i = 0; i + 1 < indptr.size(); ++i)
          for (int64_t c = 0; c < kWidth; ++c) {
            float& total = wanted[i * kWidth + size_t(c)];
            for (int64_t e = indptr[i]; e < indptr[i + 1]; ++e) total += values[size_t(ids[size_t(e)] * kWidth + c)];
            const int64_t count = indptr[i + 1] - indptr[i];
            if (mean && count > 1) total *= 1.0f / float(count);
          }
        const Cut rows = cut(packed(values, element), kWidth * element_bytes(element), firsts);
        CHECK_EQUAL(sums(rows, element, ids, indptr, kWidth, mean), wanted);
      }
}

TEST(narrow_floats_are_widened_at_their_ends) {
  const auto widened = [](uint16_t bits, Element element) {
    const Cut rows = cut({uint8_t(bits), uint8_t(bits >> 8)}, 2, {0});
    return sums(rows, element, {0}, {0, 1}, 1, false)[0];
  };
  CHECK_EQUAL(widened(0x0001, Element::kFloat16), 0x1p-24f);  // the least subnormal
  CHECK_EQUAL(widened(0x83ff, Element::kFloat16), -0x1.ff8p-15f);
  CHECK_EQUAL(widened(0x7bff, Element::kFloat16), 65504.0f);
  CHECK_EQUAL(widened(0x7c00, Element::kFloat16), std::numeric_limits<float>::infinity());
  CHECK_EQUAL(widened(0xfc00, Element::kFloat16), -std::numeric_limits<float>::infinity());
  CHECK_EQUAL(std::isnan(widened(0x7e00, Element::kFloat16)), true);
  CHECK_EQUAL(widened(0x7f80, Element::kBfloat16), std::numeric_limits<float>::infinity());
  CHECK_EQUAL(std::isnan(widened(0x7fc0, Element::kBfloat16)), true);
}

TEST(an_id_that_is_in_no_table_is_refused) {
  const Cut rows = cut(std::vector<uint8_t>(40), 4, {2, 5});  // rows 2 to 9
  for (int64_t id : {int64_t(-1), int64_t(1), int64_t(10), std::numeric_limits<int64_t>::max()}) {
    bool is_refused = false;
    try {
      sums(rows, Element::kFloat32, {3, id}, {0, 2}, 1, false);
    } catch (const std::out_of_range&) {
      is_refused = true;
    }
    CHECK_EQUAL(is_refused, true);
  }
  CHECK_EQUAL(sums(cut({}, 0, {0}), Element::kFloat32, {}, {0, 0, 0}, 0, true).size(), size_t(0));
}
