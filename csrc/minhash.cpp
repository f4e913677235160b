// MinHash signatures. Twin: min_hashes_twin in data_tools/corpus/copies/dedupe.py.

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "bind.h"

namespace {

using Hashes = py::array_t<uint64_t, py::array::c_style>;
constexpr py::ssize_t kAtOnce = 4;  // functions whose minima stay in registers while the values pass by

template <py::ssize_t N>
void minima(const uint64_t* values, py::ssize_t size, const uint64_t* factors, const uint64_t* offsets, uint16_t* out) {
  uint64_t smallest[N];
  std::fill(smallest, smallest + N, std::numeric_limits<uint64_t>::max());
  for (py::ssize_t i = 0; i < size; ++i) {
    for (py::ssize_t k = 0; k < N; ++k) smallest[k] = std::min(smallest[k], factors[k] * values[i] + offsets[k]);
  }
  // the top bits of a minimum are nearly always zero, and tell no two texts apart
  for (py::ssize_t k = 0; k < N; ++k) out[k] = static_cast<uint16_t>(smallest[k] >> 16);
}

py::array_t<uint16_t> minhash(const Hashes& values, const Hashes& factors, const Hashes& offsets) {
  if (factors.size() != offsets.size()) throw std::invalid_argument("as many offsets as factors are needed");
  py::array_t<uint16_t> result(factors.size());
  const uint64_t *v = values.data(), *a = factors.data(), *b = offsets.data();
  uint16_t* out = result.mutable_data();
  const py::ssize_t size = values.size(), count = factors.size();
  py::gil_scoped_release release;
  py::ssize_t k = 0;
  for (; k + kAtOnce <= count; k += kAtOnce) minima<kAtOnce>(v, size, a + k, b + k, out + k);
  for (; k < count; ++k) minima<1>(v, size, a + k, b + k, out + k);
  return result;
}

}  // namespace

void bind_minhash(py::module_& module) {
  module.def("minhash", &minhash, py::arg("values"), py::arg("factors"), py::arg("offsets"),
             "Bits 16 to 31 of the smallest factor * value + offset, for each factor and offset.");
}
