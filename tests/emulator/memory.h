// The table of device memory, and the checks of every access.
#pragma once

#include <cstddef>
#include <cstdint>

#include "machine.h"

namespace emulator {

struct Region {
  uint64_t low = 0, high = 0;
  const char* what = "";
  bool read_only = false;
};

// Memory that kernels may touch. Between two regions there must be room, or an access past one's end is not seen.
void add_region(const void* data, size_t bytes, const char* what, bool read_only = false);
void remove_region(const void* data);
const Region* find_region(uint64_t address);
// The region that ends or begins nearest, for messages.
std::string describe_address(uint64_t address);

// cudaMalloc and cudaFree: filled with 0xFF, which is NaN in every format, and with guard zones around.
void* device_malloc(size_t bytes);
bool device_free(void* data);

// Where lane addresses lie on the host. Faults at what is not there, not aligned or not to be written.
char* global_address(Warp& w, const Inst& in, uint64_t address, unsigned bytes, bool write);
char* shared_address(const Warp& w, const Inst& in, uint32_t address, unsigned bytes, bool write);
// The same for what is no data: barriers and flags.
char* shared_location(const Warp& w, const Inst& in, uint32_t address, unsigned bytes, Block** owner = nullptr);
char* local_address(const Warp& w, const Inst& in, uint64_t offset, unsigned bytes, int lane);
char* generic_address(Warp& w, const Inst& in, uint64_t address, unsigned bytes, bool write, int lane);

// Addresses of the lanes of an instruction that has its address in operand `r` and its offset in `number`.
inline void lane_addresses(const Warp& w, const Inst& in, Ref r, uint64_t* out) {
  if (in.wide) {
    const uint64_t* base = w.row64(r);
    for (int i = 0; i < kLanes; ++i) out[i] = base[i] + in.number;
  } else {
    const uint32_t* base = w.row32(r);
    for (int i = 0; i < kLanes; ++i) out[i] = static_cast<uint32_t>(base[i] + in.number);
  }
}

// Faults unless the kernel may touch all of these bytes.
void check_range(Warp& w, const Inst& in, uint64_t address, uint64_t bytes, bool write);

// What the memory system has to do for an access of the warp: wavefronts of shared memory, sectors of global memory.
void count_shared(const Inst& in, const uint64_t* addresses, uint32_t lanes, unsigned bytes);
void count_global(const Inst& in, const uint64_t* addresses, uint32_t lanes, unsigned bytes);

}  // namespace emulator
