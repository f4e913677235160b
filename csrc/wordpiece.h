// WordPiece: a word is cut into the longest pieces of the vocabulary, from its start to its end, or is unknown.
#pragma once

#include <string>
#include <unordered_map>

#include "bert_words.h"
#include "model.h"

class Wordpiece final : public Model {
 public:
  // `prefix` marks pieces that do not begin a word; words of more characters than `most_characters` are unknown.
  Wordpiece(std::shared_ptr<const BertRules> rules, const std::unordered_map<std::string, uint32_t>& vocab,
            const std::string& unknown, const std::string& prefix, size_t most_characters);

  std::unique_ptr<Cutter> make_cutter() const override { return std::make_unique<BertCutter>(rules_); }
  size_t encode_word(const uint8_t* word, size_t n, uint32_t* ids, Scratch& scratch) const override;

 private:
  struct Node {  // pieces that begin with the same bytes
    uint32_t first_child = 0, num_children = 0;
    int64_t id = -1;  // of the piece that ends here
  };
  class Builder;

  int64_t longest(uint32_t root, const uint8_t*& p, const uint8_t* end) const;

  std::shared_ptr<const BertRules> rules_;
  size_t most_characters_;
  uint32_t unknown_;
  std::vector<Node> nodes_;  // 0 and 1: the roots of pieces that begin words, and of those that do not
  std::vector<uint8_t> labels_;  // of node i: the byte that leads to it
};
