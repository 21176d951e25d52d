// Helpers of the binding files: they check arrays that come from Python and unpack their arguments.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <array>

#include "mapped_file.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hoploom {

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Rows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Output = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Optional = std::optional<Array<T>>;

inline void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

template <typename T>
const T* pointer(const Optional<T>& array) {
  return array ? array->data() : nullptr;
}

// Arrays that may be in a mapped file: see read_maps().
template <typename... Arrays>
std::array<const void*, sizeof...(Arrays)> arrays_of(const Arrays&... arrays) {
  return {static_cast<const void*>(arrays.data())...};
}

// Binds NodeMap, NodeBudget, IdMap, IdRanks, SlotMap, gather, route, narrow, stitch and related functions.
void bind_ids(nb::module_& m);
// Binds sum_rows, max_rows, dot_rows, softmax_lists, keep_best, update_rows and related functions.
void bind_aggregates(nb::module_& m);
// Binds message_rows, pair_scores and their backward functions.
void bind_messages(nb::module_& m);
// Binds pack_records, place_column, take_column, order_records.
void bind_spool(nb::module_& m);
// Binds DiskFile, SparseArray, read_rows, read_lists.
void bind_disk(nb::module_& m);
// Binds assign_parts and count_cut.
void bind_partitioning(nb::module_& m);

}  // namespace hoploom
