// CRC-32C. Twin: in lmtrain/observe/tensorboard.py.

#include <array>
#include <cstdint>
#include <string_view>

#include "bind.h"

namespace {

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

void bind_crc32c(py::module_& module) {
  module.def("crc32c", &crc32c, py::arg("data"), py::arg("crc") = 0, "CRC-32C of data, continuing from crc.");
}
