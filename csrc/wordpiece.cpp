#include "wordpiece.h"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

namespace {

size_t num_characters(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

// The tree of all pieces, level by level, so that a node's children are neighbours in the order of their bytes. A node
// is a run of the sorted pieces that begin alike; nothing here goes as deep as a piece is long.
class Wordpiece::Builder {
 public:
  void add(size_t root, std::string_view piece, uint32_t id) { pieces_[root].emplace_back(piece, id); }

  void lay_out(std::vector<Node>& nodes, std::vector<uint8_t>& labels) {
    std::deque<Run> waiting;
    for (size_t root = 0; root < 2; ++root) {
      std::sort(pieces_[root].begin(), pieces_[root].end());
      waiting.push_back({root, 0, pieces_[root].size(), 0});
    }
    labels = {0, 0};
    for (; !waiting.empty(); waiting.pop_front()) {
      auto [root, at, end, depth] = waiting.front();
      const std::vector<Piece>& pieces = pieces_[root];
      Node node{static_cast<uint32_t>(labels.size()), 0, -1};
      if (at < end && pieces[at].first.size() == depth) node.id = pieces[at++].second;  // sorted before the longer ones
      while (at < end) {
        const size_t first = at;
        const char label = pieces[at].first[depth];
        while (at < end && pieces[at].first[depth] == label) ++at;
        waiting.push_back({root, first, at, depth + 1});
        labels.push_back(static_cast<uint8_t>(label));
        ++node.num_children;
      }
      nodes.push_back(node);
    }
  }

 private:
  using Piece = std::pair<std::string_view, uint32_t>;
  struct Run {
    size_t root, begin, end, depth;
  };
  std::vector<Piece> pieces_[2];
};

Wordpiece::Wordpiece(std::shared_ptr<const BertRules> rules, const std::unordered_map<std::string, uint32_t>& vocab,
                     const std::string& unknown, const std::string& prefix, size_t most_characters)
    : rules_(std::move(rules)), most_characters_(most_characters) {
  const auto found = vocab.find(unknown);
  if (found == vocab.end()) throw std::invalid_argument("the unknown piece is not in the vocabulary");
  unknown_ = found->second;
  // longer pieces are part of no word that is cut at all
  const auto fits = [&](std::string_view piece) { return !piece.empty() && num_characters(piece) <= most_characters; };
  Builder builder;
  for (const auto& [whole, id] : vocab) {
    const std::string_view piece = whole;
    if (fits(piece)) builder.add(0, piece, id);
    if (piece.substr(0, prefix.size()) == prefix && fits(piece.substr(prefix.size()))) {
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
  size_t count = 0;
  if (num_characters({reinterpret_cast<const char*>(word), n}) <= most_characters_) {
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
