// A small coverage-guided fuzzer, for compilers without libFuzzer: inputs that reach new edges of the program are kept
// and changed again. Built with -fsanitize-coverage=trace-pc by `make fuzz`.
//
//   build/fuzz SECONDS [SEED] [FILE...]    fuzz, starting from these files; or, with 0 seconds, only run them

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr size_t kEdges = 1 << 16;
constexpr size_t kLongest = 4096;
uint8_t counts[kEdges];
uintptr_t last_block = 0;

using Bytes = std::vector<uint8_t>;

const std::vector<std::string> kPieces = {
    "{\"text\":\"", "\"}", "\"text\"", "\\u0041", "\\ud83d\\ude00", "\\ud800", "\\n", "\\\"", "null", "true", "-1.5e3", "[1,2]",
    "\n", "\r\n", "    ", " the", "'s", "'re", "'\xc5\xbf", "'LL", "123", "\xc3\xa9", "\xe2\x80\x9c", "\xc2\xa0", "\xe3\x80\x80",
    "\xe4\xbd\xa0", "\xf0\x9f\x98\x80", "\xcc\x81", "\xe3\x80\xae", "\xf0\x9d\x85\xa5", "\xea\xb0\x81", "\xef\xbb\xbf", "\xc4\xb0",
    "\xe2\x80\xa8", "(word", "a.b", "...\n\n", "\t\t", "\xd9\xa3\xd9\xa4\xd9\xa5\xd9\xa6", "##", "[UNK]"};

std::string crash_path;
Bytes current;

void keep_current() {  // before the sanitizers or an abort end the process
  std::ofstream(crash_path, std::ios::binary).write(reinterpret_cast<const char*>(current.data()),
                                                    static_cast<std::streamsize>(current.size()));
}

// How often an edge was passed, in steps: once, twice, three times, a few, many.
uint8_t bucket(uint8_t n) { return n < 4 ? n : n < 8 ? 4 : n < 16 ? 8 : n < 32 ? 16 : n < 128 ? 32 : 64; }

bool runs_anew(uint8_t* seen) {
  std::memset(counts, 0, sizeof counts);
  last_block = 0;
  LLVMFuzzerTestOneInput(current.data(), current.size());
  bool anew = false;
  for (size_t i = 0; i < kEdges; ++i) {
    const uint8_t now = bucket(counts[i]);
    if ((now & ~seen[i]) == 0) continue;
    seen[i] |= now;
    anew = true;
  }
  return anew;
}

size_t up_to(std::mt19937_64& rng, size_t most) { return rng() % (most + 1); }

void change(std::mt19937_64& rng, const std::vector<Bytes>& corpus) {
  for (size_t times = 1 + up_to(rng, 4); times; --times) {
    const size_t at = up_to(rng, current.size());
    const auto here = current.begin() + static_cast<ptrdiff_t>(at);
    switch (up_to(rng, 5)) {
      case 0: {
        const std::string& piece = kPieces[up_to(rng, kPieces.size() - 1)];
        current.insert(here, piece.begin(), piece.end());
        break;
      }
      case 1:
        if (at < current.size()) current[at] = static_cast<uint8_t>(rng());
        break;
      case 2:
        current.erase(here, here + static_cast<ptrdiff_t>(up_to(rng, std::min<size_t>(current.size() - at, 16))));
        break;
      case 3: {  // a part again, so that runs grow long
        const Bytes part(here, here + static_cast<ptrdiff_t>(up_to(rng, std::min<size_t>(current.size() - at, 80))));
        for (size_t n = 1 + up_to(rng, 3); n; --n) {
          current.insert(current.begin() + static_cast<ptrdiff_t>(at), part.begin(), part.end());
        }
        break;
      }
      case 4:
        if (at < current.size()) current[at] ^= static_cast<uint8_t>(1u << up_to(rng, 7));
        break;
      default: {
        const Bytes& other = corpus[up_to(rng, corpus.size() - 1)];
        current.resize(at);
        current.insert(current.end(), other.begin() + static_cast<ptrdiff_t>(up_to(rng, other.size())), other.end());
      }
    }
  }
  if (current.size() > kLongest) current.resize(kLongest);
}

}  // namespace

extern "C" __attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc() {
  const auto block = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& count = counts[(block ^ last_block) & (kEdges - 1)];
  if (count < 255) ++count;
  last_block = block >> 1;
}

extern "C" const char* __asan_default_options() { return "handle_abort=1"; }  // so that an input that aborts is kept

extern "C" void __sanitizer_set_death_callback(void (*callback)());

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 60;
  std::mt19937_64 rng(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  crash_path = std::string(argv[0]) + ".crash";
  __sanitizer_set_death_callback(keep_current);
  std::vector<Bytes> corpus = {{}, {'a'}};
  for (int i = 3; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::vector<uint8_t> seen(kEdges);
  for (const Bytes& input : corpus) {
    current = input;
    runs_anew(seen.data());
  }
  const std::time_t began = std::time(nullptr);
  size_t runs = 0;
  for (std::time_t told = began; std::difftime(std::time(nullptr), began) < seconds; ++runs) {
    current = corpus[up_to(rng, corpus.size() - 1)];
    change(rng, corpus);
    if (runs_anew(seen.data())) corpus.push_back(current);
    if (std::difftime(std::time(nullptr), told) >= 30) {
      told = std::time(nullptr);
      std::printf("%.0f s: %zu runs, %zu inputs kept\n", std::difftime(told, began), runs, corpus.size());
      std::fflush(stdout);
    }
  }
  size_t edges = 0;
  for (const uint8_t s : seen) edges += s != 0;
  std::printf("%zu runs, %zu inputs kept, %zu edges reached, nothing wrong\n", runs, corpus.size(), edges);
}
