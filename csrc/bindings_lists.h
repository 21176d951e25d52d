// Lists of rows and matrices from Python's arrays.
#pragma once
#include "aggregate.h"
#include "bindings.h"

namespace hoploom {

template <typename T>
using Strided = nb::ndarray<const T, nb::ndim<2>, nb::device::cpu>;  // rows may have gaps between them, columns may not

template <typename T>
Matrix<T> matrix_of(const Strided<T>& rows) {
  require(rows.size() == 0 || rows.shape(1) == 1 || rows.stride(1) == 1,
          "the columns of a matrix must lie beside each other");
  return {rows.data(), int64_t(rows.shape(0)), int64_t(rows.shape(1)), int64_t(rows.stride(0))};
}

template <typename Id>
RowLists<Id> lists_of(const Array<int64_t>& indptr, const Array<Id>& rows, const Optional<int64_t>& places,
                      int64_t num_rows) {
  require(indptr.shape(0) >= 1, "indptr is empty");
  require(!places || places->shape(0) == rows.shape(0), "one place per edge is needed");
  RowLists<Id> lists{indptr.data(), rows.data(), int64_t(indptr.shape(0)) - 1, int64_t(rows.shape(0)), pointer(places)};
  check_lists(lists, num_rows);
  return lists;
}

}  // namespace hoploom
