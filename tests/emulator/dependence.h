// EMU_PDL=1: global memory that a kernel touches while an earlier one may still be at it. A launch with programmatic
// stream serialization begins before the one before it has ended; griddepcontrol.wait orders them. What a block did
// before its griddepcontrol.launch_dependents is over when the next launch begins, its writes if a fence followed them.
#pragma once

#include "machine.h"

namespace emulator {

void begin_dependence();  // of machine.launch
void end_dependence();
void forget_dependence();  // a copy or the like: all launches before it have ended
// An access to global memory. Faults if an earlier launch that may still run writes there, or reads there and this
// writes.
void note_global(Warp& w, const Inst& in, uint64_t address, uint64_t bytes, bool write);
void wait_for_launches(Warp& w);  // griddepcontrol.wait
void let_launches(Warp& w);       // griddepcontrol.launch_dependents
void fence_global(Warp& w);       // a fence for the whole GPU
void end_block(Block& b);

}  // namespace emulator
