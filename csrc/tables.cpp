// Single-threaded: several threads make batches. Rows are prefetched some ids ahead, as in gather.cpp.
#include "tables.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "bfloat16.h"

namespace hoploom {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kAheadBytes = 9600;

HOPLOOM_INLINE float widened(float value) { return value; }

// Shifts exponent and fraction into place and corrects the bias by 2^112, also for subnormals.
struct Float16 {
  uint16_t bits;
};
HOPLOOM_INLINE float widened(Float16 value) {
  const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13, sign = uint32_t(value.bits & 0x8000) << 16;
  const float finite = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude | 0x7f800000;  // infinity, NaN
  const bool is_special = magnitude >= 0x0f800000;
  return std::bit_cast<float>((is_special ? special : std::bit_cast<uint32_t>(finite)) | sign);
}

class Address {
 public:
  Address(const std::vector<TableRows>& tables, int64_t row_bytes) : tables_(tables), row_bytes_(row_bytes) {}
  HOPLOOM_INLINE const uint8_t* of(int64_t id) const {
    const TableRows* table = &tables_.front();
    for (size_t i = 1; i < tables_.size() && id >= tables_[i].first; ++i) table = &tables_[i];
    return table->rows + (id - table->first) * row_bytes_;
  }

 private:
  const std::vector<TableRows>& tables_;
  int64_t row_bytes_;
};

template <typename In>
HOPLOOM_INLINE void sum_lists(const Address& address, const int64_t* ids, int64_t num_ids, const int64_t* indptr,
                              int64_t num_lists, int64_t width, bool mean, float* out) {
  const int64_t row_bytes = width * int64_t(sizeof(In));
  const int64_t ahead = std::clamp<int64_t>(kAheadBytes / std::max<int64_t>(row_bytes, 1), 2, 32);
  for (int64_t i = 0; i < num_lists; ++i) {
    float* __restrict total = out + i * width;
    std::fill_n(total, width, 0.0f);
    for (int64_t e = indptr[i]; e < indptr[i + 1]; ++e) {
      if (e + ahead < num_ids) {
        const uint8_t* next = address.of(ids[e + ahead]);
        for (int64_t at = 0; at < row_bytes; at += kLine) __builtin_prefetch(next + at, 0, 2);
      }
      const In* __restrict row = reinterpret_cast<const In*>(address.of(ids[e]));
      for (int64_t c = 0; c < width; ++c) total[c] += widened(row[c]);
    }
    const int64_t count = indptr[i + 1] - indptr[i];
    if (!mean || count < 2) continue;
    const float scale = 1.0f / float(count);
    for (int64_t c = 0; c < width; ++c) total[c] *= scale;
  }
}

void check_ids(const std::vector<TableRows>& tables, const int64_t* ids, int64_t num_ids) {
  for (size_t t = 1; t < tables.size(); ++t)
    if (tables[t].first < tables[t - 1].first + tables[t - 1].count)
      throw std::out_of_range("tables overlap, or do not ascend");
  const auto holds = [&](int64_t id) {
    for (const TableRows& table : tables)
      if (uint64_t(id) - uint64_t(table.first) < uint64_t(table.count)) return true;
    return false;
  };
  for (int64_t e = 0; e < num_ids; ++e)
    if (!holds(ids[e])) throw std::out_of_range("id " + std::to_string(ids[e]) + " is in no table");
}

}  // namespace

int64_t element_bytes(Element element) { return element == Element::kFloat32 ? 4 : 2; }

void sum_tables(const std::vector<TableRows>& tables, Element element, const int64_t* ids, int64_t num_ids,
                const int64_t* indptr, int64_t num_lists, int64_t width, bool mean, float* out) {
  check_ids(tables, ids, num_ids);
  const Address address(tables, width * element_bytes(element));
  switch (element) {
    case Element::kFloat32:
      return run_fastest<sum_lists<float>>(address, ids, num_ids, indptr, num_lists, width, mean, out);
    case Element::kFloat16:
      return run_fastest<sum_lists<Float16>>(address, ids, num_ids, indptr, num_lists, width, mean, out);
    case Element::kBfloat16:
      return run_fastest<sum_lists<Bfloat16>>(address, ids, num_ids, indptr, num_lists, width, mean, out);
  }
}

}  // namespace hoploom
