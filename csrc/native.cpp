// The loops Python is too slow for, as the module lmtrain._native. Each has a twin in Python that gives the same
// answer (csrc/README.md lists them), so that lmtrain works, only slower, where this was not compiled.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace py = pybind11;

namespace {

// ---- permute: twin is permute_twin in lmtrain/data/order.py ------------------------------------------------------

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
    if (in[i] < 0 || in[i] >= n) throw std::invalid_argument("ids must lie in 0..n-1");
  }
  py::gil_scoped_release release;
  const Permutation permutation(static_cast<uint64_t>(n), seed);
  for (py::ssize_t i = 0; i < size; ++i) out[i] = static_cast<int64_t>(permutation(static_cast<uint64_t>(in[i])));
  return result;
}

// ---- crc32c: twin is in lmtrain/observe/tensorboard.py -----------------------------------------------------------

// Castagnoli's polynomial, four bytes a turn by four tables.
std::array<std::array<uint32_t, 256>, 4> make_tables() {
  std::array<std::array<uint32_t, 256>, 4> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0u);
    tables[0][i] = crc;
  }
  for (int t = 1; t < 4; ++t) {
    for (uint32_t i = 0; i < 256; ++i) tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 255];
  }
  return tables;
}

uint32_t crc32c(const py::bytes& data, uint32_t crc) {
  static const auto tables = make_tables();
  const std::string_view view = data;
  const auto* p = reinterpret_cast<const unsigned char*>(view.data());
  size_t left = view.size();
  py::gil_scoped_release release;
  crc = ~crc;
  for (; left >= 4; left -= 4, p += 4) {
    crc ^= static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
           static_cast<uint32_t>(p[3]) << 24;
    crc = tables[3][crc & 255] ^ tables[2][(crc >> 8) & 255] ^ tables[1][(crc >> 16) & 255] ^ tables[0][crc >> 24];
  }
  for (; left; --left, ++p) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 255];
  return ~crc;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Compiled helpers of lmtrain; see csrc/README.md.";
  module.def("permute", &permute, py::arg("ids"), py::arg("n"), py::arg("seed"),
             "Where each id of 0..n-1 goes in the permutation of this seed.");
  module.def("crc32c", &crc32c, py::arg("data"), py::arg("crc") = 0, "CRC-32C of data, continuing from crc.");
}
