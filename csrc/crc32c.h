// CRC-32C of bytes, continuing from `crc`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmtrain {

uint32_t crc32c(const uint8_t* data, size_t size, uint32_t crc = 0);

}  // namespace lmtrain
