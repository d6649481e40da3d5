#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "dependence.h"
#include "races.h"

namespace emulator {
namespace {

constexpr size_t kGuard = 512;

std::mutex mutex;
std::map<uint64_t, Region> regions;                           // by their lowest address
std::map<const void*, std::pair<char*, size_t>> allocations;  // what device_malloc took

bool unchecked() {
  static const bool off = std::getenv("EMU_UNCHECKED") != nullptr;
  return off;
}

}  // namespace

void add_region(const void* data, size_t bytes, const char* what, bool read_only) {
  const std::lock_guard<std::mutex> lock(mutex);
  const uint64_t low = reinterpret_cast<uint64_t>(data);
  regions[low] = {low, low + bytes, what, read_only};
}

void remove_region(const void* data) {
  const std::lock_guard<std::mutex> lock(mutex);
  regions.erase(reinterpret_cast<uint64_t>(data));
}

const Region* find_region(uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto after = regions.upper_bound(address);
  if (after == regions.begin()) return nullptr;
  const Region& r = std::prev(after)->second;
  return address < r.high ? &r : nullptr;
}

std::string describe_address(uint64_t address) {
  std::ostringstream text;
  text << std::hex << "0x" << address << std::dec;
  const std::lock_guard<std::mutex> lock(mutex);
  auto after = regions.upper_bound(address);
  if (after != regions.begin()) {
    const Region& r = std::prev(after)->second;
    if (address >= r.high) {
      text << ", " << address - r.high << " bytes past the end of " << r.high - r.low << " bytes of " << r.what;
    } else {
      text << ", at byte " << address - r.low << " of " << r.high - r.low << " bytes of " << r.what;
    }
  }
  if (after != regions.end()) {
    const Region& r = after->second;
    text << ", " << r.low - address << " bytes before " << r.high - r.low << " bytes of " << r.what;
  }
  return text.str();
}

void* device_malloc(size_t bytes) {
  const size_t whole = (bytes + 255) / 256 * 256;
  char* taken = static_cast<char*>(std::aligned_alloc(256, whole + 2 * kGuard));
  if (!taken) return nullptr;
  std::memset(taken, 0xff, whole + 2 * kGuard);
  add_region(taken + kGuard, bytes, "device memory");
  const std::lock_guard<std::mutex> lock(mutex);
  allocations[taken + kGuard] = {taken, bytes};
  return taken + kGuard;
}

bool device_free(void* data) {
  if (!data) return true;
  char* taken = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = allocations.find(data);
    if (found == allocations.end()) return false;
    taken = found->second.first;
    allocations.erase(found);
  }
  remove_region(data);
  std::free(taken);
  return true;
}

// The instruction's next accesses to the region of these bytes need no search.
static void enter_region(Warp& w, const Inst& in, uint64_t address, uint64_t bytes, bool write) {
  const Region* r = find_region(address);
  if (!r || address + bytes > r->high) {
    fault(w, in,
          (write ? "illegal write of " : "illegal read of ") + std::to_string(bytes) + " bytes at " +
              describe_address(address));
  }
  if (write && r->read_only) fault(w, in, std::string("write to ") + r->what);
  in.low = r->low, in.high = r->high;
}

char* global_address(Warp& w, const Inst& in, uint64_t address, unsigned bytes, bool write) {
  if (machine.dependence) note_global(w, in, address, bytes, write);
  if (address >= in.low && address + bytes <= in.high && !(address & (bytes - 1))) {
    return reinterpret_cast<char*>(address);
  }
  if (address & (bytes - 1)) {
    fault(w, in, "misaligned address " + describe_address(address) + " for " + std::to_string(bytes) + " bytes");
  }
  if (unchecked()) return reinterpret_cast<char*>(address);
  enter_region(w, in, address, bytes, write);
  return reinterpret_cast<char*>(address);
}

void check_range(Warp& w, const Inst& in, uint64_t address, uint64_t bytes, bool write) {
  if (machine.dependence) note_global(w, in, address, bytes, write);
  if ((address >= in.low && address + bytes <= in.high) || unchecked()) return;
  enter_region(w, in, address, bytes, write);
}

char* shared_location(const Warp& w, const Inst& in, uint32_t address, unsigned bytes, Block** owner) {
  Block* b = w.block;
  const uint32_t rank = address >> kRankShift, offset = address & kOffsetMask;
  if (rank) {  // an address that mapa has made
    if (rank > b->cluster->blocks.size()) fault(w, in, "shared address of block " + std::to_string(rank - 1));
    b = b->cluster->blocks[rank - 1].get();
    if (!b->running) fault(w, in, "shared memory of a block of the cluster that has ended");
  }
  if (offset & (bytes - 1)) {
    fault(w, in, "misaligned shared offset " + std::to_string(offset) + " for " + std::to_string(bytes) + " bytes");
  }
  if (offset < kSharedStart || offset + bytes > b->shared_end) {
    fault(w, in,
          "shared offset " + std::to_string(int64_t{offset} - kSharedStart) + " of " +
              std::to_string(b->shared_end - kSharedStart) + " bytes");
  }
  if (owner) *owner = b;
  return b->shared.data() + offset;
}

char* shared_address(const Warp& w, const Inst& in, uint32_t address, unsigned bytes, bool write) {
  Block* owner = nullptr;
  char* at = shared_location(w, in, address, bytes, &owner);
  if (machine.races) touch(w, *owner, in, address & kOffsetMask, bytes, write ? kWrite : kRead);
  return at;
}

char* local_address(const Warp& w, const Inst& in, uint64_t offset, unsigned bytes, int lane) {
  const uint64_t size = machine.launch.kernel->local_bytes;
  if (offset & (bytes - 1)) fault(w, in, "misaligned local offset " + std::to_string(offset));
  if (offset + bytes > size) fault(w, in, "local offset " + std::to_string(offset) + " of " + std::to_string(size));
  return w.local + lane * size + offset;
}

char* generic_address(Warp& w, const Inst& in, uint64_t address, unsigned bytes, bool write, int lane) {
  switch (address >> 56) {
    case kSharedWindow >> 56:
      return shared_address(w, in, static_cast<uint32_t>(address), bytes, write);
    case kLocalWindow >> 56:
      return local_address(w, in, address & 0xffffffff, bytes, lane);
    default:
      return global_address(w, in, address, bytes, write);
  }
}

void count_shared(const Inst& in, const uint64_t* addresses, uint32_t lanes, unsigned bytes) {
  // 8 and 16 bytes a lane go by halves and quarters of the warp. In each, lanes at the same word share it.
  const int at_once = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  ++machine.counters.shared_accesses;
  for (int first = 0; first < kLanes; first += at_once) {
    uint64_t words[32][8];
    int used[32] = {}, most = 0, distinct = 0;
    for (int i = first; i < first + at_once; ++i) {
      if (!(lanes >> i & 1)) continue;
      for (uint64_t word = addresses[i] / 4; word <= (addresses[i] + bytes - 1) / 4; ++word) {
        const int bank = static_cast<int>(word % 32);
        const int known = std::min(used[bank], 8);
        if (std::find(words[bank], words[bank] + known, word) != words[bank] + known) continue;
        if (used[bank] < 8) words[bank][used[bank]] = word;
        most = std::max(most, ++used[bank]), ++distinct;
      }
    }
    machine.counters.shared_wavefronts += most, machine.counters.shared_least += (distinct + 31) / 32;
    if (in.kind != Kind::kCopy) machine.launch.kernel->work[in.source] += most;  // whose work is its sectors
  }
}

void count_global(const Inst& in, const uint64_t* addresses, uint32_t lanes, unsigned bytes) {
  uint64_t sectors[128];
  int count = 0;
  for (int i = 0; i < kLanes; ++i) {
    if (!(lanes >> i & 1)) continue;
    for (uint64_t s = addresses[i] / 32; s <= (addresses[i] + bytes - 1) / 32 && count < 128; ++s) {
      if (count == 0 || sectors[count - 1] != s) sectors[count++] = s;
    }
  }
  std::sort(sectors, sectors + count);
  ++machine.counters.global_accesses;
  const auto distinct = std::unique(sectors, sectors + count) - sectors;
  machine.counters.global_sectors += distinct;
  machine.launch.kernel->work[in.source] += distinct;
}

}  // namespace emulator
