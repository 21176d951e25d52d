// Records by bucket for Python: checks shapes, releases the GIL, calls the core.
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "spool.h"

namespace hoploom {
namespace {

using Order = Array<uint32_t>;

Records records_of(const Rows<const uint8_t>& records) {
  require(records.shape(1) >= 4, "a record begins with its key in four bytes");
  require(records.shape(0) <= UINT32_MAX, "there are too many records at once");
  return {records.data(), int64_t(records.shape(0)), int64_t(records.shape(1))};
}

void check_column(const Records& records, int64_t offset, int64_t row_bytes) {
  require(offset >= 0 && row_bytes >= 0 && offset + row_bytes <= records.width, "a column leads out of the record");
}

void pack_records(Array<int64_t> keys, std::vector<Rows<const uint8_t>> columns, Array<int64_t> bounds,
                  Rows<uint8_t> records, Output<int64_t> counts) {
  std::vector<Column> packed;
  int64_t width = 4;
  for (const auto& column : columns) {
    require(column.shape(0) == keys.shape(0), "a column has not one row per key");
    packed.push_back({column.data(), int64_t(column.shape(1)), width});
    width += int64_t(column.shape(1));
  }
  require(records.shape(0) == keys.shape(0) && int64_t(records.shape(1)) == width, "the records have another shape");
  require(bounds.shape(0) >= 2 && counts.shape(0) + 1 == bounds.shape(0), "one count per bucket is needed");
  const int64_t* bound = bounds.data();
  for (size_t b = 0; b < counts.shape(0); ++b)
    require(bound[b] <= bound[b + 1] && uint64_t(bound[b + 1]) - uint64_t(bound[b]) <= UINT32_MAX,
            "bounds must not fall, nor be further apart than 32 bits");
  std::vector<const void*> arrays = {keys.data()};
  for (const Column& column : packed) arrays.push_back(column.values);
  nb::gil_scoped_release release;
  read_maps(arrays, [&] {
    pack(keys.data(), int64_t(keys.shape(0)), packed, width, bound, int64_t(counts.shape(0)), records.data(),
         counts.data());
  });
}

void place_column(Rows<const uint8_t> records, int64_t offset, Rows<uint8_t> out) {
  const Records all = records_of(records);
  check_column(all, offset, int64_t(out.shape(1)));
  nb::gil_scoped_release release;
  place(all, int64_t(out.shape(0)), offset, int64_t(out.shape(1)), out.data());
}

void take_column(Rows<const uint8_t> records, Order order, int64_t offset, Rows<uint8_t> out) {
  const Records all = records_of(records);
  check_column(all, offset, int64_t(out.shape(1)));
  require(order.shape(0) == out.shape(0), "one row per entry of the order is needed");
  nb::gil_scoped_release release;
  take(all, order.data(), int64_t(order.shape(0)), offset, int64_t(out.shape(1)), out.data());
}

int64_t order_records(Rows<const uint8_t> records, int64_t source_bytes, int64_t time_offset, bool canonical,
                      bool deduplicate, int threads, Output<int64_t> indptr, Output<uint32_t> order) {
  const Records all = records_of(records);
  require(source_bytes == 4 || source_bytes == 8, "a source takes 4 or 8 bytes");
  check_column(all, 4, source_bytes);
  if (time_offset >= 0) check_column(all, time_offset, 8);
  require(indptr.shape(0) >= 1, "indptr is empty");
  require(order.shape(0) == records.shape(0), "one entry of the order per record is needed");
  nb::gil_scoped_release release;
  return order_edges(all, int64_t(indptr.shape(0)) - 1, {source_bytes, time_offset, canonical, deduplicate}, threads,
                     indptr.data(), order.data());
}

}  // namespace

void bind_spool(nb::module_& m) {
  m.def("pack_records", &pack_records, nb::arg("keys").noconvert(), nb::arg("columns").noconvert(),
        nb::arg("bounds").noconvert(), nb::arg("records").noconvert(), nb::arg("counts").noconvert());
  m.def("place_column", &place_column, nb::arg("records").noconvert(), "offset"_a, nb::arg("out").noconvert());
  m.def("take_column", &take_column, nb::arg("records").noconvert(), nb::arg("order").noconvert(), "offset"_a,
        nb::arg("out").noconvert());
  m.def("order_records", &order_records, nb::arg("records").noconvert(), "source_bytes"_a, "time_offset"_a,
        "canonical"_a, "deduplicate"_a, "threads"_a, nb::arg("indptr").noconvert(), nb::arg("order").noconvert());
}

}  // namespace hoploom
