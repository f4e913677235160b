// From words to ids: what byte-level BPE and WordPiece have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "words.h"

// Memory that a model needs while it works on a long word; one for each thread.
struct Scratch {
  std::vector<uint32_t> next, previous, symbols, ranks;
  std::vector<uint64_t> heap;
};

// Shared by threads and never changed.
class Model {
 public:
  virtual ~Model() = default;
  virtual std::unique_ptr<Cutter> make_cutter() const = 0;
  // The ids of a word of n >= 1 bytes, at most n of them; 16 bytes behind the word may be read.
  virtual size_t encode_word(const uint8_t* word, size_t n, uint32_t* ids, Scratch& scratch) const = 0;
};
