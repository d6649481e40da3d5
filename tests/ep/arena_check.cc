// Drives the EP's arena on the CPU with a stand-in for the device: `arena_check SCENARIO`. Exits with 1 and a line
// where something is wrong.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../plugin/ep/arena.h"

namespace {

using deltafuse::ep::Arena;
constexpr size_t kMiB = size_t{1} << 20;

#define CHECK(condition)                                            \
  do {                                                              \
    if (!(condition)) {                                             \
      std::printf("line %d: not true: %s\n", __LINE__, #condition); \
      std::exit(1);                                                 \
    }                                                               \
  } while (false)

// Host memory in place of a device's, with so many bytes and not more.
struct Device {
  explicit Device(size_t bytes) : capacity(bytes) {}
  Arena::Backend backend() {
    return {this, [](void* self, size_t bytes) { return static_cast<Device*>(self)->Allocate(bytes); },
            [](void* self, void* block) { static_cast<Device*>(self)->Free(block); }};
  }
  void* Allocate(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    ++asked;
    if (held + bytes > capacity) return nullptr;
    void* block = std::aligned_alloc(Arena::kAlignment, bytes);
    blocks[block] = bytes;
    held += bytes;
    return block;
  }
  void Free(void* block) {
    const std::lock_guard<std::mutex> lock(mutex);
    CHECK(blocks.count(block) == 1);
    held -= blocks[block];
    blocks.erase(block);
    std::free(block);
  }

  std::mutex mutex;
  const size_t capacity;
  size_t held = 0;
  size_t asked = 0;
  std::map<void*, size_t> blocks;
};

// A block that is filled, so that one that overlaps another is found out (and one that leaves its region, by ASan).
struct Block {
  Block(Arena* arena, size_t bytes, unsigned char mark) : bytes(bytes), mark(mark) {
    data = static_cast<unsigned char*>(arena->Take(bytes));
    if (data) std::memset(data, mark, bytes);
  }
  void Check() const {
    for (size_t i = 0; i < bytes; i += bytes > 4096 ? 509 : 1) CHECK(data[i] == mark);
    CHECK(data[bytes - 1] == mark);
  }
  unsigned char* data;
  size_t bytes;
  unsigned char mark;
};

void Churn(Arena* arena, unsigned seed, int turns, size_t most) {
  std::mt19937 random(seed);
  std::vector<Block> out;
  for (int turn = 0; turn < turns; ++turn) {
    if (out.size() < 24 && random() % 3 != 0) {
      const size_t bytes = 1 + random() % (random() % 4 == 0 ? most : most / 64 + 1);
      const Block block(arena, bytes, static_cast<unsigned char>(seed * 37 + turn));
      CHECK(block.data && reinterpret_cast<uintptr_t>(block.data) % Arena::kAlignment == 0);
      out.push_back(block);
    } else if (!out.empty()) {
      const size_t which = random() % out.size();
      out[which].Check();
      arena->GiveBack(out[which].data);
      out.erase(out.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  for (const Block& block : out) {
    block.Check();
    arena->GiveBack(block.data);
  }
}

void Basics() {
  Device device(64 * kMiB);
  {
    Arena arena(device.backend(), 0, true);
    CHECK(arena.Take(0) == nullptr);
    CHECK(arena.GetStats().failures == 0);
    void* one = arena.Take(1);
    void* two = arena.Take(kMiB);
    CHECK(one && two && one != two);
    Arena::Stats stats = arena.GetStats();
    CHECK(stats.in_use == Arena::kAlignment + kMiB && stats.max_in_use == stats.in_use);
    CHECK(stats.blocks == 2 && stats.extensions == 1 && stats.total == device.held && stats.max_block == kMiB);
    arena.GiveBack(one);
    arena.GiveBack(one);  // once is enough
    arena.GiveBack(nullptr);
    int elsewhere = 0;
    arena.GiveBack(&elsewhere);
    arena.GiveBack(two);
    stats = arena.GetStats();
    CHECK(stats.in_use == 0 && stats.total == Arena::kSmallestRegion);
    void* reserved = arena.Reserve(3 * kMiB);
    CHECK(reserved && arena.GetStats().reserves == 1 && device.held == Arena::kSmallestRegion + 3 * kMiB);
    arena.GiveBack(reserved);
    CHECK(device.held == Arena::kSmallestRegion);
    arena.Shrink();
    CHECK(device.held == 0 && arena.GetStats().total == 0 && arena.GetStats().shrinkages == 2);
    CHECK(arena.Take(5));  // still out when the arena goes
  }
  CHECK(device.held == 0 && device.blocks.empty());
}

void MergesFreeNeighbours() {
  Device device(16 * kMiB);
  Arena arena(device.backend(), 0, true);
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(arena.Take(kMiB / 4));
  CHECK(arena.GetStats().extensions == 1);
  for (const int i : {1, 3, 5, 7, 0, 2, 6, 4}) arena.GiveBack(blocks[static_cast<size_t>(i)]);
  CHECK(arena.Take(2 * kMiB) == blocks[0]);  // one chunk again
  CHECK(arena.GetStats().extensions == 1);
}

void FragmentationIsBounded() {
  Device device(256 * kMiB);
  Arena arena(device.backend(), 0, true);
  Churn(&arena, 1, 4000, 2 * kMiB);
  const Arena::Stats before = arena.GetStats();
  for (unsigned seed = 2; seed < 12; ++seed) Churn(&arena, seed, 4000, 2 * kMiB);
  const Arena::Stats after = arena.GetStats();
  CHECK(after.in_use == 0);
  CHECK(after.total <= before.total + 32 * kMiB);
  CHECK(after.total <= 3 * after.max_in_use);
  arena.Shrink();
  CHECK(device.held == 0);
}

void SameSizesTakeNothingMore() {
  Device device(64 * kMiB);
  Arena arena(device.backend(), 0, true);
  size_t asked = 0;
  for (int run = 0; run < 10000; ++run) {
    void* a = arena.Take(70000);
    void* b = arena.Take(300 * 1024);
    arena.GiveBack(a);
    void* c = arena.Take(1000);
    arena.GiveBack(b);
    arena.GiveBack(c);
    if (run == 0) asked = device.asked;
  }
  CHECK(device.asked == asked);
}

void Limit() {
  Device device(256 * kMiB);
  Arena arena(device.backend(), 8 * kMiB, true);
  CHECK(arena.Take(8 * kMiB + 1) == nullptr && arena.GetStats().failures == 1);
  void* all = arena.Take(8 * kMiB);
  CHECK(all && device.held == 8 * kMiB);
  CHECK(arena.Take(1) == nullptr && arena.Reserve(1) == nullptr);
  arena.GiveBack(all);
  // What is kept goes back to the system where it does not fit.
  void* small = arena.Take(5 * kMiB);
  CHECK(small);
  void* rest = arena.Take(3 * kMiB);
  CHECK(rest && device.held == 8 * kMiB);
  arena.GiveBack(small);
  arena.GiveBack(rest);
  CHECK(arena.Reserve(7 * kMiB) && device.held <= 8 * kMiB);
  CHECK(arena.GetStats().limit == 8 * kMiB && arena.GetStats().failures == 3);
  CHECK(arena.Take(~size_t{0}) == nullptr && arena.Take(~size_t{0} - 300) == nullptr);
}

void ExhaustedDevice() {
  Device device(10 * kMiB);
  Arena arena(device.backend(), 0, true);
  void* kept = arena.Take(100);        // a region of 2 MiB
  void* large = arena.Take(7 * kMiB);  // no room for a larger region than asked for
  CHECK(kept && large && device.held == 9 * kMiB);
  CHECK(arena.Take(3 * kMiB) == nullptr);
  const Block still(&arena, 1000, 7);  // lives on
  CHECK(still.data);
  arena.GiveBack(large);
  void* other = arena.Take(8 * kMiB);  // in place of the free region
  CHECK(other && device.held == 10 * kMiB);
  still.Check();
}

void NothingKept() {
  Device device(64 * kMiB);
  Arena arena(device.backend(), 0, false);
  void* one = arena.Take(1000);
  void* two = arena.Take(5 * kMiB);
  CHECK(device.held == 1024 + 5 * kMiB);
  arena.GiveBack(one);
  arena.GiveBack(two);
  CHECK(device.held == 0 && arena.GetStats().extensions == 2);
}

void Threads() {
  Device device(1024 * kMiB);
  Arena arena(device.backend(), 0, true);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 6; ++seed) threads.emplace_back([&, seed] { Churn(&arena, seed, 1500, kMiB); });
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      arena.Shrink();
      CHECK(arena.GetStats().in_use <= arena.GetStats().max_in_use);
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop = true;
  other.join();
  CHECK(arena.GetStats().in_use == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> scenarios = {{"basics", Basics},
                                                       {"merging", MergesFreeNeighbours},
                                                       {"fragmentation", FragmentationIsBounded},
                                                       {"same_sizes", SameSizesTakeNothingMore},
                                                       {"limit", Limit},
                                                       {"exhausted", ExhaustedDevice},
                                                       {"nothing_kept", NothingKept},
                                                       {"threads", Threads}};
  const auto chosen = scenarios.find(argc == 2 ? argv[1] : "");
  if (chosen == scenarios.end()) {
    std::printf("no such scenario\n");
    return 2;
  }
  chosen->second();
  return 0;
}
