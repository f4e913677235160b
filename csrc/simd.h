// Sixteen bytes at a time with SSE2, which every x86-64 has; plain loops with the same answers elsewhere, and where
// LMTRAIN_PORTABLE is defined.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__) && !defined(LMTRAIN_PORTABLE)
#define LMTRAIN_SSE2 1
#include <emmintrin.h>
#endif

namespace simd {

// How many bytes of p..end come before the first of `Stop`. `high` becomes true if one of them may be beyond ASCII.
template <class Stop>
inline size_t length_until(const uint8_t* p, const uint8_t* end, bool& high) {
  const uint8_t* const begin = p;
#ifdef LMTRAIN_SSE2
  __m128i seen = _mm_setzero_si128();
  for (; end - p >= 16; p += 16) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    seen = _mm_or_si128(seen, v);
    if (const int mask = _mm_movemask_epi8(Stop::among(v))) {
      high |= _mm_movemask_epi8(seen) != 0;
      return static_cast<size_t>(p - begin) + static_cast<size_t>(__builtin_ctz(static_cast<unsigned>(mask)));
    }
  }
  high |= _mm_movemask_epi8(seen) != 0;
#endif
  for (; p < end && !Stop::is(*p); ++p) high |= *p >= 0x80;
  return static_cast<size_t>(p - begin);
}

// Copies p..end up to the first character of `Stop`, returns how many bytes; up to 15 more may be written behind them.
template <class Stop>
inline size_t copy_until(uint8_t* out, const uint8_t* p, const uint8_t* end, bool& high) {
  const uint8_t* const begin = p;
#ifdef LMTRAIN_SSE2
  __m128i seen = _mm_setzero_si128();
  for (; end - p >= 16; p += 16, out += 16) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), v);
    seen = _mm_or_si128(seen, v);
    if (const int mask = _mm_movemask_epi8(Stop::among(v))) {
      high |= _mm_movemask_epi8(seen) != 0;
      return static_cast<size_t>(p - begin) + static_cast<size_t>(__builtin_ctz(static_cast<unsigned>(mask)));
    }
  }
  high |= _mm_movemask_epi8(seen) != 0;
#endif
  for (; p < end && !Stop::is(*p); ++p) high |= (*out++ = *p) >= 0x80;
  return static_cast<size_t>(p - begin);
}

struct Backslash {
  static bool is(uint8_t c) { return c == '\\'; }
#ifdef LMTRAIN_SSE2
  static __m128i among(__m128i v) { return _mm_cmpeq_epi8(v, _mm_set1_epi8('\\')); }
#endif
};

// What ends a run of plain characters in a JSON string: a quote, a backslash or a control character.
struct Special {
  static bool is(uint8_t c) { return c < 0x20 || c == '"' || c == '\\'; }
#ifdef LMTRAIN_SSE2
  static __m128i among(__m128i v) {
    const __m128i control = _mm_cmpeq_epi8(_mm_min_epu8(v, _mm_set1_epi8(0x1F)), v);
    return _mm_or_si128(control, _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('"')), Backslash::among(v)));
  }
#endif
};

}  // namespace simd
