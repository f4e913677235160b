#include "utf8.h"

#include <cstring>

namespace utf8 {

namespace {

constexpr uint64_t kHighBits = 0x8080808080808080u;

bool follows(uint8_t byte) { return (byte & 0xC0) == 0x80; }

// The length of the character at p, of at most `left` bytes; 0 if it is none.
int valid_length(const uint8_t* p, ptrdiff_t left) {
  const uint8_t lead = p[0];
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return left >= 2 && follows(p[1]) ? 2 : 0;
  if (lead < 0xF0) {
    if (left < 3 || !follows(p[1]) || !follows(p[2])) return 0;
    if (lead == 0xE0 && p[1] < 0xA0) return 0;   // could be shorter
    if (lead == 0xED && p[1] >= 0xA0) return 0;  // half of a surrogate pair
    return 3;
  }
  if (lead > 0xF4 || left < 4 || !follows(p[1]) || !follows(p[2]) || !follows(p[3])) return 0;
  if (lead == 0xF0 && p[1] < 0x90) return 0;
  if (lead == 0xF4 && p[1] >= 0x90) return 0;
  return 4;
}

}  // namespace

bool is_valid(const uint8_t* p, const uint8_t* end) {
  while (p < end) {
    if (*p >= 0x80) {
      const int n = valid_length(p, end - p);
      if (n == 0) return false;
      p += n;
      continue;
    }
    uint64_t eight;
    while (end - p >= 8 && (std::memcpy(&eight, p, 8), (eight & kHighBits) == 0)) p += 8;
    while (p < end && *p < 0x80) ++p;
  }
  return true;
}

}  // namespace utf8
