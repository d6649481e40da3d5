// Barriers in memory and between warps, and the asynchronous work that hangs on them.
#pragma once

#include <string>

#include "machine.h"

namespace emulator {

void arrive_once(Warp& w, const Inst& in, uint32_t address);
// complete_tx on the mbarrier at `address` of the block.
void complete_bytes(Block& b, uint32_t address, uint32_t bytes);
// Does now what a bulk copy to one of the block's barriers still has to do; all barriers if `address` is 0.
bool finish_bulk(Block& b, uint32_t address);

// A warp of the block has ended or come to the cluster's barrier: opens what waits for nobody else.
void recheck(Block& b);

// cp.async of a warp: does the oldest groups until `left` remain.
void finish_copy_groups(Warp& w, size_t left);
// The warp ends: its copies as well.
void finish_copies(Warp& w);
// All warps have ended: nothing may be on its way any more.
void check_end(Cluster& c);
// What a warp waits for that looks at an mbarrier in vain.
std::string describe_wait(const Warp& w);
uint32_t special_value(Special special, const Warp& w, uint32_t thread);

}  // namespace emulator
