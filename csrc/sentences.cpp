// Sentence splitting by rule. The rules are told in data_tools/preprocess/encode_documents.py, the twin, which gives the same answer:
// what is changed here must be changed there.

#include "sentences.h"

#include <pybind11/numpy.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <unordered_set>

#include "bind.h"

namespace lmtrain {
namespace {

using Words = std::unordered_set<std::string_view>;

// Never the end of a sentence.
const Words kNever = {
    "Mr", "Mrs", "Ms", "Dr", "Prof", "Rev", "Gen", "Col", "Lt", "Capt", "Sgt", "Cpl", "Maj", "Cmdr", "Adm", "Hon",
    "Gov", "Sen", "Rep", "Pres", "Supt", "Insp", "Messrs", "Mme", "Mlle", "Mons", "Fr", "Hr", "Dra", "Sra", "Srta",
    "Mt", "Ft", "vs", "Vs", "v", "cf", "Cf", "viz", "e.g", "E.g", "i.e", "I.e", "approx", "ca", "bzw", "z.B", "d.h",
};
// The end of a sentence where a word follows that often begins one.
const Words kMay = {
    "Inc", "Ltd", "Co", "Corp", "Bros", "Jr", "Sr", "St", "Ave", "Blvd", "Rd", "al", "Ph.D", "M.Sc", "B.Sc", "Assn",
    "Dept", "dept", "Univ", "univ", "Esq", "Cia", "Ariz", "Calif", "Colo", "Conn", "Fla", "Ill", "Kan", "Mass", "Mich",
    "Minn", "Mo", "Mont", "Neb", "Nev", "Okla", "Ore", "Pa", "Tenn", "Tex", "Va", "Vt", "Wash", "Wis", "Wyo",
};
// Not the end of a sentence before a number.
const Words kBeforeNumber = {
    "No", "Nos", "no", "nos", "Nr", "nr", "Fig", "fig", "Figs", "figs", "Vol", "vol", "Vols", "vols", "Ch", "ch",
    "Chap", "chap", "Sec", "sec", "Art", "art", "Eq", "eq", "Eqs", "Ref", "Pt", "pt", "pp", "Op", "op", "Ver", "ver",
    "Jan", "Feb", "Mar", "Apr", "Jun", "Jul", "Aug", "Sep", "Sept", "Oct", "Nov", "Dec", "p", "b", "c", "d", "n", "l",
};
const Words kStarters = {
    "A", "After", "All", "Also", "Although", "An", "And", "Another", "Are", "As", "At", "Because", "Before", "Both",
    "But", "By", "Can", "Could", "Did", "Do", "Does", "During", "Each", "Every", "For", "From", "Had", "Has", "Have",
    "He", "Her", "Here", "His", "How", "However", "I", "If", "In", "Instead", "Is", "It", "Its", "Many", "Meanwhile",
    "Moreover", "Most", "My", "No", "Not", "Now", "On", "Once", "One", "Or", "Other", "Our", "Over", "Perhaps", "She",
    "Should", "Since", "So", "Some", "Such", "That", "The", "Their", "Then", "There", "These", "They", "This", "Those",
    "Thus", "To", "Two", "Under", "Until", "Was", "We", "Were", "What", "When", "Where", "Which", "While", "Who", "Why",
    "With", "Without", "Would", "Yes", "You", "Your",
};
constexpr int kLongestWord = 24;  // code points looked back over

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool in(char32_t c, std::u32string_view set) { return set.find(c) != set.npos; }

bool is_stop(char32_t c) { return c == '.' || c == '!' || c == '?' || c == 0x2026; }
bool is_full_stop(char32_t c) {  // of scripts that write no space after it, or use it for nothing else
  return c >= 0x580 && in(c, U"\u3002\uFF01\uFF1F\uFF61\u0964\u0965\u061F\u06D4\u0589\u1362\u17D4\u17D5\u104B");
}
bool is_closer(char32_t c) {
  return in(c, U"\"')]}\u00BB\u201D\u2019\uFF09\uFF3D\u300D\u300F\u3011\u300B\u3009\uFF02\uFF07");
}
bool is_opener(char32_t c) {
  return in(c, U"\"'([{\u00AB\u201C\u2018\u00BF\u00A1\u2014\u2013-*_\uFF08\u300C\u300E\u3010\u300A\u3008");
}
bool is_digit(char32_t c) { return c >= '0' && c <= '9'; }
bool ends_word(char32_t c) { return is_space(c) || is_opener(c) || is_closer(c) || in(c, U",;:/") || is_full_stop(c); }

// 'l' lower, 'u' upper, 0 neither, for Latin, Greek and Cyrillic letters.
char case_of(char32_t c) {
  if (c < 0x80) return c >= 'a' && c <= 'z' ? 'l' : c >= 'A' && c <= 'Z' ? 'u' : 0;
  if (c >= 0xC0 && c <= 0xFF) return c == 0xD7 || c == 0xF7 ? 0 : c >= 0xDF ? 'l' : 'u';
  if (c >= 0x100 && c <= 0x137) return c & 1 ? 'l' : 'u';
  if (c >= 0x139 && c <= 0x148) return c & 1 ? 'u' : 'l';
  if (c >= 0x14A && c <= 0x177) return c & 1 ? 'l' : 'u';
  if (c >= 0x179 && c <= 0x17E) return c & 1 ? 'u' : 'l';
  if (c >= 0x391 && c <= 0x3A9) return 'u';
  if (c >= 0x3AC && c <= 0x3CE) return 'l';
  if (c >= 0x400 && c <= 0x42F) return 'u';
  if (c >= 0x430 && c <= 0x45F) return 'l';
  return 0;
}

struct Char {
  char32_t code;
  size_t size;  // bytes; 0 at the end of the text
};

class Splitter {
 public:
  Splitter(std::string_view text, bool newlines, std::vector<Span>& out) : text_(text), newlines_(newlines), out_(out) {}

  void run() {
    static const auto kPlain = plain_bytes();
    begin_ = skip_spaces(0);
    for (size_t i = begin_; i < text_.size();) {
      const unsigned char byte = text_[i];
      if (kPlain[byte]) {
        ++i;
      } else if (byte == '\n' || byte == '\f') {
        i = at_line_end(i);
      } else if (byte == '.' || byte == '!' || byte == '?') {
        i = at_stop(i);
      } else {
        const Char c = at(i);
        if (is_stop(c.code) || is_full_stop(c.code)) i = at_stop(i);
        else i = c.code == 0x2029 ? at_line_end(i) : i + c.size;
      }
    }
    finish(text_.size(), text_.size());
  }

 private:
  static std::array<bool, 256> plain_bytes() {  // those that can be passed over unseen
    std::array<bool, 256> plain{};
    for (int byte = 0; byte < 0x80; ++byte) plain[byte] = byte == 0 || !std::strchr("\n\f.!?", byte);
    return plain;
  }

  Char at(size_t i) const {
    if (i >= text_.size()) return {0, 0};
    const auto byte = [&](size_t k) { return static_cast<unsigned char>(text_[k]); };
    const unsigned char lead = byte(i);
    const size_t size = lead < 0x80 ? 1 : lead >= 0xC2 && lead < 0xE0 ? 2 : lead >= 0xE0 && lead < 0xF0 ? 3
                        : lead >= 0xF0 && lead < 0xF5 ? 4 : 1;
    if (size == 1) return {lead < 0x80 ? lead : char32_t{0xFFFD}, 1};
    if (i + size > text_.size()) return {0xFFFD, 1};
    char32_t code = lead & (0x7F >> size);
    for (size_t k = 1; k < size; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80) return {0xFFFD, 1};
      code = code << 6 | (byte(i + k) & 0x3F);
    }
    return {code, size};
  }

  Char before(size_t i) const {  // the character that ends at byte i
    if (i == 0) return {0, 0};
    if (static_cast<unsigned char>(text_[i - 1]) < 0x80) return {static_cast<unsigned char>(text_[i - 1]), 1};
    for (size_t size = i < 4 ? i : 4; size > 1; --size) {
      const Char c = at(i - size);
      if (c.size == size) return c;
    }
    return {0xFFFD, 1};
  }

  size_t skip_spaces(size_t i) const {
    for (Char c = at(i); c.size && is_space(c.code); c = at(i)) i += c.size;
    return i;
  }

  void finish(size_t end, size_t next) {
    for (Char c = before(end); end > begin_ && is_space(c.code); c = before(end)) end -= c.size;
    if (end > begin_) out_.push_back({begin_, end});
    begin_ = next;
  }

  size_t at_line_end(size_t i) {
    int lines = 0;
    bool page = false;
    size_t next = i;
    for (Char c = at(next); c.size && is_space(c.code); c = at(next)) {
      lines += c.code == '\n';
      page |= c.code == '\f' || c.code == 0x2029;
      next += c.size;
    }
    if (newlines_ || page || lines > 1) finish(i, next);
    return next;
  }

  size_t at_stop(const size_t first) {
    size_t end = first;
    int num_stops = 0;
    bool strong = false, dots = true;
    for (Char c = at(end); is_stop(c.code) || is_full_stop(c.code); c = at(end)) {
      strong |= is_full_stop(c.code);
      dots &= c.code == '.';
      ++num_stops;
      end += c.size;
    }
    size_t close = skip_closers(end);
    if (strong) {
      const size_t next = skip_spaces(close);
      finish(close, next);
      return next;
    }
    close = skip_references(close);
    const Char gap = at(close);
    if (gap.size && !is_space(gap.code)) return end;
    const size_t next = skip_spaces(close);
    if (next == text_.size()) return next;
    if (!ends_sentence(first, dots && num_stops == 1, close > end, next)) return end;
    finish(close, next);
    return next;
  }

  size_t skip_closers(size_t i) const {
    for (;;) {
      Char c = at(i);
      size_t gap = 0;
      if (c.code == 0xA0 || c.code == 0x202F) {  // French sets its quotes off
        gap = c.size;
        c = at(i + gap);
        if (c.code != 0xBB) return i;
      }
      if (!c.size || !is_closer(c.code)) return i;
      i += gap + c.size;
    }
  }

  size_t skip_references(size_t i) const {  // [12] after the stop
    while (at(i).code == '[') {
      size_t k = i + 1;
      while (k < i + 4 && is_digit(at(k).code)) ++k;
      if (k == i + 1 || at(k).code != ']') break;
      i = k + 1;
    }
    return i;
  }

  bool ends_sentence(size_t stop, bool single, bool closed, size_t next) const {
    const bool opened = is_opener(at(next).code);
    for (Char c = at(next); c.size && is_opener(c.code); c = at(next)) next += c.size;
    if (next == text_.size()) return false;  // nothing but brackets and quotes is left
    const char32_t follows = at(next).code;
    if (case_of(follows) == 'l' || is_stop(follows) || in(follows, U",;:")) return false;
    const char32_t last = before(stop).code;
    if (!single) return last != '(' && last != '[';
    if (closed && opened) return true;
    size_t begin = stop;
    int length = 0;
    for (Char c = before(begin); c.size && !ends_word(c.code); c = before(begin)) {
      begin -= c.size;
      if (++length > kLongestWord) return true;
    }
    const std::string_view word = text_.substr(begin, stop - begin);
    if (length == 0 || kNever.count(word)) return length == 0;
    if (begin == begin_ && is_list_number(word)) return false;
    if (kBeforeNumber.count(word) && is_digit(follows)) return false;
    if (length == 1 ? case_of(at(begin).code) == 'u' : kMay.count(word) || is_acronym(word)) return is_starter(next);
    return true;
  }

  static bool is_list_number(std::string_view word) {
    return word.find_first_not_of("0123456789") == word.npos || word.find_first_not_of("IVXLC") == word.npos ||
           word.find_first_not_of("ivxlc") == word.npos;
  }

  static bool is_acronym(std::string_view word) {
    if (word.size() % 2 == 0) return false;
    for (size_t i = 0; i < word.size(); ++i) {
      const auto byte = static_cast<unsigned char>(word[i]);
      if (i % 2 ? byte != '.' : byte >= 0x80 || !case_of(byte)) return false;
    }
    return true;
  }

  bool is_starter(size_t i) const {
    size_t end = i;
    while (end < text_.size() && end < i + kLongestWord && static_cast<unsigned char>(text_[end]) < 0x80 &&
           case_of(text_[end])) ++end;
    const Char after = at(end);
    return kStarters.count(text_.substr(i, end - i)) && (!after.size || is_space(after.code) || after.code == ',');
  }

  std::string_view text_;
  bool newlines_;
  std::vector<Span>& out_;
  size_t begin_ = 0;  // of the sentence that is open
};

py::array_t<int64_t> sentence_spans(const py::bytes& text, bool newlines) {
  std::vector<Span> spans;
  {
    const std::string_view view = text;
    py::gil_scoped_release release;
    split_sentences(view, newlines, spans);
  }
  py::array_t<int64_t> result({static_cast<py::ssize_t>(spans.size()), py::ssize_t{2}});
  int64_t* out = result.mutable_data();
  for (const Span& span : spans) {
    *out++ = static_cast<int64_t>(span.begin);
    *out++ = static_cast<int64_t>(span.end);
  }
  return result;
}

}  // namespace

void split_sentences(std::string_view text, bool newlines, std::vector<Span>& out) {
  Splitter(text, newlines, out).run();
}

}  // namespace lmtrain

void bind_sentences(py::module_& module) {
  module.def("sentence_spans", &lmtrain::sentence_spans, py::arg("text"), py::arg("newlines") = false,
             "Begin and end, in bytes, of each sentence of a UTF-8 text: int64 [n, 2].");
}
