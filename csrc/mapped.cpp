// What happens when a mapped file cannot be read: it was cut short, or its disk has a fault. The system then sends
// SIGBUS, of which a process dies without a word. For the mappings named here zeros take the place of what is gone and
// the fault is noted, so that the reader can say which file it was. Twin: none; lmtrain/data/store/block_checksums.py then asks
// for the file's size alone.

#include <pybind11/numpy.h>

#include <csignal>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "bind.h"
#include "mapped.h"

namespace {

struct Mapping {
  std::atomic<uintptr_t> begin{0}, end{0};
  std::atomic<bool> failed{false};
};

constexpr int kMost = 1 << 14;  // because: a signal handler may not ask for memory
std::array<Mapping, kMost> mappings;
std::atomic<int> num_used{0}, num_failed{0};
struct sigaction before;

void on_bus(int number, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  const int used = num_used.load();
  for (int i = 0; i < used; ++i) {
    const uintptr_t begin = mappings[i].begin.load(), end = mappings[i].end.load();
    if (address < begin || address >= end) continue;
    const uintptr_t page = address & ~(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) - 1);
    // All that follows, too: a file that was cut has nothing behind its end.
    void* const zeros = mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) break;
    if (!mappings[i].failed.exchange(true)) ++num_failed;
    return;
  }
  if (before.sa_flags & SA_SIGINFO) {
    if (before.sa_sigaction) return before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    return before.sa_handler(number);
  }
  signal(SIGBUS, SIG_DFL);  // and the access that failed is tried again
}

// Keeps watch over a mapping; returns its number, or -1 where there are too many. The interpreter's lock is held.
int watch(uintptr_t begin, uintptr_t size) {
  struct sigaction now;
  if (sigaction(SIGBUS, nullptr, &now) == 0 && (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_bus)) {
    before = now;  // somebody else's, perhaps set since we were here last
    struct sigaction ours {};
    ours.sa_sigaction = on_bus;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
  }
  int slot = 0;
  while (slot < num_used && mappings[slot].begin.load()) ++slot;
  if (slot == kMost) return -1;
  mappings[slot].failed = false;
  mappings[slot].end = begin + size;
  mappings[slot].begin = begin;
  if (slot == num_used) ++num_used;
  return slot;
}

void unwatch(int slot) {
  if (slot < 0 || slot >= num_used) return;
  mappings[slot].end = 0;
  mappings[slot].begin = 0;
  if (mappings[slot].failed.exchange(false)) --num_failed;
}

bool failed(int slot) { return slot >= 0 && slot < kMost && mappings[slot].failed; }

struct Mapped {
  void* begin;
  size_t size;
  int slot;
};

// (all bytes of a file, the number under which they are watched)
py::tuple map_file(int fd, size_t size) {
  void* const begin = size ? mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
  if (begin == MAP_FAILED) throw std::runtime_error("the file cannot be mapped");
  auto* const held = new Mapped{begin, size, watch(reinterpret_cast<uintptr_t>(begin), size)};
  const py::capsule owner(held, [](void* pointer) {
    auto* const mapped = static_cast<Mapped*>(pointer);
    unwatch(mapped->slot);
    munmap(mapped->begin, mapped->size);
    delete mapped;
  });
  py::array_t<uint8_t> bytes(static_cast<py::ssize_t>(size), static_cast<const uint8_t*>(begin), owner);
  py::detail::array_proxy(bytes.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return py::make_tuple(bytes, held->slot);
}

}  // namespace

bool lmtrain::mapping_failed() { return num_failed.load(std::memory_order_relaxed) != 0; }

void bind_mapped(py::module_& module) {
  module.def("map_file", &map_file, py::arg("fd"), py::arg("size"), "A file's bytes, whose loss is survived.");
  module.def("map_failed", &failed, py::arg("number"), "Whether some of this mapping could not be read.");
  module.def("maps_failed", &lmtrain::mapping_failed, "Whether any mapping could not be read.");
}
