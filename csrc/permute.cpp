// A keyed permutation of 0..n-1 that stores nothing. Twin: permute_twin in lmtrain/data/sample_dataset_interface.py.

#include <pybind11/numpy.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bind.h"

namespace {

constexpr int kRounds = 6;
constexpr int kMinHalfBits = 3;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

uint64_t mix(uint64_t x) {  // splitmix64's finish
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// A keyed one-to-one map of [0, n): a Feistel network over the next even power of two, walked until it is below n.
class Permutation {
 public:
  Permutation(uint64_t n, uint64_t seed) : n_(n) {
    int bits = 0;
    while (bits < 63 && (uint64_t{1} << bits) < n) ++bits;
    half_ = (bits + 1) / 2 > kMinHalfBits ? (bits + 1) / 2 : kMinHalfBits;
    for (int i = 0; i < kRounds; ++i) keys_[i] = mix(seed + static_cast<uint64_t>(i + 1) * kGolden);
  }

  uint64_t operator()(uint64_t x) const {
    do x = once(x); while (x >= n_);
    return x;
  }

 private:
  uint64_t once(uint64_t x) const {
    uint64_t left = x >> half_, right = x & ((uint64_t{1} << half_) - 1);
    for (uint64_t key : keys_) {
      uint64_t mixed = right ^ key;
      mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
      mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
      const uint64_t next = left ^ (mixed >> (64 - half_));
      left = right;
      right = next;
    }
    return (left << half_) | right;
  }

  uint64_t n_;
  int half_;
  std::array<uint64_t, kRounds> keys_{};
};

py::array_t<int64_t> permute(const py::array_t<int64_t, py::array::c_style>& ids, int64_t n, uint64_t seed) {
  py::array_t<int64_t> result(ids.size());
  const int64_t* in = ids.data();
  int64_t* out = result.mutable_data();
  const py::ssize_t size = ids.size();
  for (py::ssize_t i = 0; i < size; ++i) {  // an id outside would never walk back inside
    if (in[i] < 0 || in[i] >= n) throw std::invalid_argument("sample numbers must lie from 0 to " + std::to_string(n - 1));
  }
  py::gil_scoped_release release;
  const Permutation permutation(static_cast<uint64_t>(n), seed);
  for (py::ssize_t i = 0; i < size; ++i) out[i] = static_cast<int64_t>(permutation(static_cast<uint64_t>(in[i])));
  return result;
}

}  // namespace

void bind_permute(py::module_& module) {
  module.def("permute", &permute, py::arg("ids"), py::arg("n"), py::arg("seed"),
             "Where each id of 0..n-1 goes in the permutation of this seed.");
}
