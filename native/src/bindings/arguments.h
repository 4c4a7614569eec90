// What comes from Python, checked: a wrong array raises ValueError, whatever it holds.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <climits>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../batch.h"

namespace trioengine {

namespace nb = nanobind;

using AnyArray = nb::ndarray<nb::ro>;
using Masks = std::vector<std::pair<int64_t, std::vector<int64_t>>>;

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(what); }

inline void check_array(const AnyArray& array, const char* name, nb::dlpack::dtype type, std::size_t ndim) {
  if (array.device_type() != nb::device::cpu::value) refuse(std::string(name) + " is not on the CPU");
  if (array.dtype() != type) refuse(std::string(name) + " has the wrong dtype");
  if (array.ndim() != ndim) {
    refuse(std::string(name) + " must have " + std::to_string(ndim) + " dimensions, has " +
           std::to_string(array.ndim()));
  }
  for (std::size_t d = 0; d < ndim; ++d) {
    if (array.shape(d) > INT_MAX) refuse(std::string(name) + " is too large");
  }
  if (reinterpret_cast<std::uintptr_t>(array.data()) % array.itemsize() != 0) {
    refuse(std::string(name) + " is not aligned");
  }
}

inline bool is_dense(const AnyArray& array, std::size_t from) {
  int64_t expected = 1;
  for (std::size_t d = array.ndim(); d-- > from;) {
    if (array.shape(d) > 1 && array.stride(d) != expected) return false;
    expected *= static_cast<int64_t>(array.shape(d));
  }
  return true;
}

// A C-contiguous array of T with `ndim` dimensions.
template <class T>
const T* dense(const AnyArray& array, const char* name, std::size_t ndim) {
  check_array(array, name, nb::dtype<T>(), ndim);
  if (!is_dense(array, 0)) refuse(std::string(name) + " is not C-contiguous");
  return static_cast<const T*>(array.data());
}

// As above, one-dimensional with `count` elements.
template <class T>
const T* dense(const AnyArray& array, const char* name, int count) {
  const T* data = dense<T>(array, name, std::size_t{1});
  if (array.shape(0) != static_cast<std::size_t>(count)) {
    refuse(std::string(name) + " has " + std::to_string(array.shape(0)) + " elements, expected " +
           std::to_string(count));
  }
  return data;
}

template <class T>
std::vector<T> copy_of(const AnyArray& array, const char* name) {
  const T* data = dense<T>(array, name, std::size_t{1});
  return std::vector<T>(data, data + array.shape(0));
}

template <class T>
std::vector<T> copy_of(const std::optional<AnyArray>& array, const char* name) {
  return array.has_value() ? copy_of<T>(*array, name) : std::vector<T>();
}

// A new numpy array that owns its memory.
template <class T>
nb::ndarray<nb::numpy, T> make_array(std::vector<std::size_t> shape) {
  std::size_t count = 1;
  for (const std::size_t n : shape) count *= n;
  auto owned = std::make_unique<T[]>(count);
  T* data = owned.get();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  owned.release();
  return nb::ndarray<nb::numpy, T>(data, shape.size(), shape.data(), owner);
}

inline int32_t to_int32(int64_t value, const char* name) {
  if (value < INT32_MIN || value > INT32_MAX) {
    refuse(std::string(name) + " " + std::to_string(value) + " is out of range");
  }
  return static_cast<int32_t>(value);
}

inline std::vector<TokenMask> to_masks(const Masks& masks) {
  std::vector<TokenMask> out;
  for (const auto& [row, ids] : masks) {
    TokenMask mask{to_int32(row, "masked_token_ids: row"), {}};
    for (const int64_t id : ids) mask.token_ids.push_back(to_int32(id, "masked_token_ids: id"));
    out.push_back(std::move(mask));
  }
  return out;
}

}  // namespace trioengine
