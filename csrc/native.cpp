// The loops Python is too slow for, as the module lmtrain._native. Each has a twin in Python that gives the same
// answer (csrc/README.md lists them), so that lmtrain works, only slower, where this was not compiled.

#include "bind.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "Compiled helpers of lmtrain; see csrc/README.md.";
  module.attr("interface") = 3;  // counted on with INTERFACE in lmtrain/runtime/compiled_helpers.py
  bind_blocks(module);
  bind_crc32c(module);
  bind_encoder(module);
  bind_index(module);
  bind_mapped(module);
  bind_masked(module);
  bind_minhash(module);
  bind_permute(module);
  bind_rows(module);
  bind_sentence_pairs(module);
  bind_sentences(module);
}
