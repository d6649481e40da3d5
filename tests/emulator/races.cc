#include "races.h"

#include <algorithm>

namespace emulator {
namespace {

uint32_t number_of(const Warp& w) { return w.block->rank * static_cast<uint32_t>(w.block->warps.size()) + w.id; }

[[noreturn]] void race(const Warp& w, const Inst& in, uint32_t offset, bool write, bool other_wrote, uint32_t other,
                       int source) {
  const Kernel& k = *machine.launch.kernel;
  const Instruction& before = *k.instructions[source];
  const auto warps = static_cast<uint32_t>(w.block->warps.size());
  fault(w, in,
        std::string("race: ") + (write ? "write to" : "read of") + " shared offset " +
            std::to_string(offset - kSharedStart) + ", which warp " + std::to_string(other % warps) + " of block " +
            std::to_string(other / warps) + " of the cluster " + (other_wrote ? "wrote" : "read") + " (line " +
            std::to_string(before.line) + ", PTX line " + std::to_string(before.ptx_line) + ": " + before.mnemonic() +
            ") with no barrier between");
}

const Warp& warp_of(const Warp& w, uint32_t number) {
  const auto warps = static_cast<uint32_t>(w.block->warps.size());
  return w.block->cluster->blocks[number / warps]->warps[number % warps];
}

[[noreturn]] void unfenced(const Warp& w, const Inst& in, uint32_t offset, int source) {
  const Instruction& before = *machine.launch.kernel->instructions[source];
  fault(w, in,
        "asynchronous work on shared offset " + std::to_string(offset - kSharedStart) + ", which was written by " +
            before.mnemonic() + " (line " + std::to_string(before.line) + ", PTX line " +
            std::to_string(before.ptx_line) + ") with no fence.proxy.async between");
}

}  // namespace

void start_races(Cluster& c) {
  size_t warps = 0;
  for (auto& b : c.blocks) warps += b->warps.size();
  for (auto& b : c.blocks) {
    b->words = std::make_shared<Words>();
    b->words->words.resize(b->shared_end / 4 + 4);
    b->words->read.resize((b->shared_end / 4 + 4) * warps);
    for (Warp& w : b->warps) {
      w.clock.assign(warps, 0);
      w.clock[number_of(w)] = 1;
    }
  }
}

void touch(const Warp& w, Block& owner, const Inst& in, uint32_t offset, uint32_t bytes, Access access) {
  const bool write = access == kWrite || access == kAsyncWrite, async = access == kAsyncRead || access == kAsyncWrite;
  const uint32_t self = number_of(w);
  const size_t warps = w.clock.size();
  const int source = in.source;
  for (uint32_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
    Words::Word& x = owner.words->words[word];
    auto unknown = [&](uint32_t other, uint32_t time) { return time && other != self && time > w.clock[other]; };
    const bool seen = !write && x.again && !unknown(x.also, x.again);
    if (!seen && unknown(x.writer, x.written)) race(w, in, 4 * word, write, true, x.writer, x.write_source);
    if (async && x.order > std::max(w.fenced, warp_of(w, x.writer).fenced)) unfenced(w, in, 4 * word, x.write_source);
    uint32_t* read = &owner.words->read[word * warps];
    if (write) {
      for (uint32_t other = 0; other < warps; ++other) {
        if (other != self && read[other] > w.clock[other]) race(w, in, 4 * word, true, false, other, x.read_source);
      }
      x.writer = self, x.written = w.clock[self], x.again = 0, x.write_source = source;
      x.order = async ? 0 : ++machine.order;
    } else {
      read[self] = w.clock[self], x.read_source = source;
    }
  }
}

void touch_same(const Warp& w, Block& owner, uint32_t offset, uint32_t bytes) {
  for (uint32_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
    Words::Word& x = owner.words->words[word];
    x.also = number_of(w), x.again = w.clock[number_of(w)];
  }
}

void release(Warp& w, Clock* barrier) {
  barrier->resize(w.clock.size());
  for (size_t i = 0; i < w.clock.size(); ++i) (*barrier)[i] = std::max((*barrier)[i], w.clock[i]);
  ++w.clock[number_of(w)];
}

void acquire(Warp& w, const Clock& barrier) {
  for (size_t i = 0; i < barrier.size(); ++i) w.clock[i] = std::max(w.clock[i], barrier[i]);
}

}  // namespace emulator
