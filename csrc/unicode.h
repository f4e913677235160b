// What every character is to GPT-2's pattern, one byte each, spread from unicode_tables.h at first use.
#pragma once

#include <cstdint>

namespace unicode {

enum Class : uint8_t { kOther, kLetter, kNumber, kSpace };

constexpr uint32_t kNumCodes = 0x110000;

const uint8_t* split_classes();  // of all kNumCodes

}  // namespace unicode
