// CRC-32C. Twin: in lmtrain/runtime/files/crc32c.py.

#include "crc32c.h"

#include <array>
#include <cstring>

#include "bind.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(LMTRAIN_PORTABLE)
#define LMTRAIN_SSE42 1
#include <nmmintrin.h>
#endif

namespace {

using Tables = std::array<std::array<uint32_t, 256>, 4>;

// Castagnoli's polynomial, four bytes a turn by four tables.
Tables make_tables() {
  Tables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0u);
    tables[0][i] = crc;
  }
  for (size_t t = 1; t < 4; ++t) {
    for (size_t i = 0; i < 256; ++i) tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 255];
  }
  return tables;
}

// `crc` is the register itself, not turned around, here and below.
uint32_t by_tables(const uint8_t* p, size_t left, uint32_t crc) {
  static const Tables tables = make_tables();
  for (; left >= 4; left -= 4, p += 4) {
    crc ^= static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
           static_cast<uint32_t>(p[3]) << 24;
    crc = tables[3][crc & 255] ^ tables[2][(crc >> 8) & 255] ^ tables[1][(crc >> 16) & 255] ^ tables[0][crc >> 24];
  }
  for (; left; --left, ++p) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 255];
  return crc;
}

#ifdef LMTRAIN_SSE42

// The instruction takes eight bytes in three cycles but can begin anew every cycle: three lanes at once. Each is more
// than a page long, so that the processor fetches all three ahead; four turns are a block of 64 KiB but for 64 bytes.
constexpr size_t kLane = 5456;

// What becomes of the register when kLane zero bytes follow: linear, so a table for each of its bytes says it.
Tables make_shift() {
  static const std::array<uint8_t, kLane> zeros{};
  std::array<uint32_t, 32> of_bit{};
  for (size_t bit = 0; bit < 32; ++bit) of_bit[bit] = by_tables(zeros.data(), kLane, uint32_t{1} << bit);
  Tables shift{};
  for (size_t t = 0; t < 4; ++t) {
    for (size_t i = 0; i < 256; ++i) {
      for (size_t bit = 0; bit < 8; ++bit) {
        if (i >> bit & 1) shift[t][i] ^= of_bit[8 * t + bit];
      }
    }
  }
  return shift;
}

uint64_t eight(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, 8);
  return value;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* p, size_t left, uint32_t start) {
  static const Tables shift = make_shift();
  const auto shifted = [](uint64_t crc) {
    return shift[0][crc & 255] ^ shift[1][(crc >> 8) & 255] ^ shift[2][(crc >> 16) & 255] ^ shift[3][crc >> 24];
  };
  uint64_t crc = start;
  for (; left >= 3 * kLane; left -= 3 * kLane, p += 3 * kLane) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      crc = _mm_crc32_u64(crc, eight(p + i));
      second = _mm_crc32_u64(second, eight(p + kLane + i));
      third = _mm_crc32_u64(third, eight(p + 2 * kLane + i));
    }
    crc = shifted(shifted(crc) ^ second) ^ third;
  }
  for (; left >= 8; left -= 8, p += 8) crc = _mm_crc32_u64(crc, eight(p));
  auto narrow = static_cast<uint32_t>(crc);
  for (; left; --left, ++p) narrow = _mm_crc32_u8(narrow, *p);
  return narrow;
}

#endif

uint32_t of_buffer(const py::buffer& data, uint32_t crc) {
  const py::buffer_info info = data.request();
  if (info.ndim != 1 || (info.shape[0] > 1 && info.strides[0] != info.itemsize)) {
    throw std::invalid_argument("bytes end to end are needed");
  }
  py::gil_scoped_release release;
  return lmtrain::crc32c(static_cast<const uint8_t*>(info.ptr), static_cast<size_t>(info.size * info.itemsize), crc);
}

}  // namespace

uint32_t lmtrain::crc32c(const uint8_t* data, size_t size, uint32_t crc) {
#ifdef LMTRAIN_SSE42
  static const bool known = __builtin_cpu_supports("sse4.2");
  if (known) return ~by_instruction(data, size, ~crc);
#endif
  return ~by_tables(data, size, ~crc);
}

void bind_crc32c(py::module_& module) {
  module.def("crc32c", &of_buffer, py::arg("data"), py::arg("crc") = 0, "CRC-32C of data, continuing from crc.");
}
