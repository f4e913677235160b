#include "wordpiece.h"

#include <algorithm>
#include <map>
#include <stdexcept>

// A tree of maps, laid out level by level so that a node's children are neighbours in the order of their bytes.
class Wordpiece::Builder {
 public:
  struct Tree {
    std::map<uint8_t, std::unique_ptr<Tree>> children;
    int64_t id = -1;
  };

  void add(size_t root, const std::string& piece, uint32_t id) {
    Tree* at = &roots_[root];
    for (const char c : piece) {
      auto& child = at->children[static_cast<uint8_t>(c)];
      if (!child) child = std::make_unique<Tree>();
      at = child.get();
    }
    at->id = id;
  }

  void lay_out(std::vector<Node>& nodes, std::vector<uint8_t>& labels) const {
    std::vector<const Tree*> order = {&roots_[0], &roots_[1]};
    labels = {0, 0};
    for (size_t i = 0; i < order.size(); ++i) {
      nodes.push_back({static_cast<uint32_t>(order.size()), static_cast<uint32_t>(order[i]->children.size()), order[i]->id});
      for (const auto& [label, child] : order[i]->children) {
        order.push_back(child.get());
        labels.push_back(label);
      }
    }
  }

 private:
  Tree roots_[2];
};

Wordpiece::Wordpiece(std::shared_ptr<const BertRules> rules, const std::unordered_map<std::string, uint32_t>& vocab,
                     const std::string& unknown, const std::string& prefix, size_t most_characters)
    : rules_(std::move(rules)), most_characters_(most_characters) {
  const auto found = vocab.find(unknown);
  if (found == vocab.end()) throw std::invalid_argument("the unknown piece is not in the vocabulary");
  unknown_ = found->second;
  Builder builder;
  for (const auto& [piece, id] : vocab) {
    if (!piece.empty()) builder.add(0, piece, id);
    if (piece.size() > prefix.size() && piece.compare(0, prefix.size(), prefix) == 0) {
      builder.add(1, piece.substr(prefix.size()), id);
    }
  }
  builder.lay_out(nodes_, labels_);
}

// The id of the longest piece at p, which moves behind it; -1 if there is none.
int64_t Wordpiece::longest(uint32_t root, const uint8_t*& p, const uint8_t* end) const {
  const Node* node = &nodes_[root];
  const uint8_t* behind = p;
  int64_t id = -1;
  for (const uint8_t* at = p; at < end; ++at) {
    const uint8_t* first = labels_.data() + node->first_child;
    const uint8_t* last = first + node->num_children;
    const uint8_t* label = std::lower_bound(first, last, *at);
    if (label == last || *label != *at) break;
    node = &nodes_[static_cast<size_t>(label - labels_.data())];
    if (node->id >= 0) {
      id = node->id;
      behind = at + 1;
    }
  }
  p = behind;
  return id;
}

size_t Wordpiece::encode_word(const uint8_t* word, size_t n, uint32_t* ids, Scratch&) const {
  const uint8_t* const end = word + n;
  const auto num_characters = std::count_if(word, end, [](uint8_t c) { return (c & 0xC0) != 0x80; });
  size_t count = 0;
  if (static_cast<size_t>(num_characters) <= most_characters_) {
    for (const uint8_t* p = word; p < end; ++count) {
      const int64_t id = longest(count ? 1 : 0, p, end);
      if (id < 0) {
        count = 0;
        break;
      }
      ids[count] = static_cast<uint32_t>(id);
    }
  }
  if (count == 0) ids[count++] = unknown_;
  return count;
}
