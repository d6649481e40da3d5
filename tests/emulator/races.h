// EMU_RACES=1: shared memory that two warps touch, one of them writing, with no barrier between. Every warp has a clock
// of all warps of its cluster; barriers hand on what their arrivals knew. Also plain writes that asynchronous work
// reads or overwrites, where neither the writer after them nor the one who asks for the work has done
// fence.proxy.async.
#pragma once

#include "machine.h"

namespace emulator {

// What was last done to each word of a block's shared memory.
struct Words {
  struct Word {
    uint32_t writer = 0, written = 0;  // warp and its time; time 0: nobody yet
    uint32_t also = 0, again = 0;      // who wrote the same once more, and when
    uint64_t order = 0;                // Machine::order at a write that was not async, 0 otherwise
    int32_t write_source = 0, read_source = 0;
  };
  std::vector<Word> words;
  std::vector<uint32_t> read;  // the time of each warp's last read of each word
};

void start_races(Cluster& c);
// The block's bytes from `offset` on are read or written by the warp. Faults at a race.
enum Access { kRead, kWrite, kAsyncRead, kAsyncWrite };  // async: by wgmma and bulk copies
void touch(const Warp& w, Block& owner, const Inst& in, uint32_t offset, uint32_t bytes, Access access);
// A write of what is there already races with nobody, and the warp may count on it.
void touch_same(const Warp& w, Block& owner, uint32_t offset, uint32_t bytes);
// An arrival at a barrier, and the way through it.
void release(Warp& w, Clock* barrier);
void acquire(Warp& w, const Clock& barrier);

}  // namespace emulator
