// Random numbers by name instead of by state: draw i (from 0) of stream `key` is mix(key + (i + 1) * golden), which is
// splitmix64's rule, so that any draw can be made without those before it. Twin: lmtrain/data/samples/group_sentences_into_samples.py.
#pragma once

#include <cstdint>

namespace lmtrain {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

inline uint64_t mix(uint64_t x) {  // splitmix64's finish
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline uint64_t stream(uint64_t seed, uint64_t number) { return mix(mix(seed) + number * kGolden); }

inline uint64_t draw_at(uint64_t key, uint64_t i) { return mix(key + (i + 1) * kGolden); }

struct Draws {
  uint64_t key, i = 0;

  uint64_t next() { return draw_at(key, i++); }
  uint64_t below(uint64_t n) { return ((next() >> 32) * n) >> 32; }  // n <= 2^32; a bias below n / 2^32
};

}  // namespace lmtrain
