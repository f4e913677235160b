// Where the sentences of a UTF-8 text begin and end. Called by the binding in sentences.cpp and by preprocessing.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace lmtrain {

struct Span {
  size_t begin, end;  // bytes
};

// Appends to `out`. Every byte that is not white space lies in exactly one span, in order; the text need not be valid.
// `newlines`: every line ends a sentence, as in text with one sentence a line.
void split_sentences(std::string_view text, bool newlines, std::vector<Span>& out);

}  // namespace lmtrain
