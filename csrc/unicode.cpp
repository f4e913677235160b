#include "unicode.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "unicode_tables.h"

namespace unicode {

const uint8_t* split_classes() {
  static const std::vector<uint8_t> classes = [] {
    std::vector<uint8_t> spread(kNumCodes);
    for (size_t i = 0; i < std::size(kSplitClasses); ++i) {
      const uint32_t stop = i + 1 < std::size(kSplitClasses) ? kSplitClasses[i + 1].first : kNumCodes;
      std::fill(spread.begin() + kSplitClasses[i].first, spread.begin() + stop, kSplitClasses[i].value);
    }
    return spread;
  }();
  return classes.data();
}

}  // namespace unicode
