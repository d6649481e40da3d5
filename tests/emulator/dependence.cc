#include "dependence.h"

#include <memory>
#include <unordered_set>

namespace emulator {
namespace {

// What a launch has touched, in words, and what it was not ordered after.
struct Footprint {
  std::string name;
  std::unordered_set<uint64_t> read, written;
  std::vector<std::shared_ptr<Footprint>> before_wait, after_wait;  // launches that may run at the same time
  uint64_t blocks = 0, waited = 0;                                  // blocks that have waited
  bool early = false;                                               // let the next begin before it had waited itself
};

std::shared_ptr<Footprint> current, previous;

}  // namespace

void begin_dependence() {
  current = std::make_shared<Footprint>();
  current->name = machine.launch.kernel->name;
  current->blocks = machine.launch.grid.count();
  if (!machine.launch.programmatic || !previous) return;
  current->before_wait.push_back(previous);
  // What the previous launch did not wait for may be going on as well.
  const bool ordered = previous->waited == previous->blocks;
  if (!ordered || previous->early) {
    const auto& more = previous->before_wait;
    current->before_wait.insert(current->before_wait.end(), more.begin(), more.end());
  }
  if (!ordered) current->after_wait = previous->before_wait;
}

void end_dependence() {
  if (current->before_wait.empty()) current->waited = current->blocks;  // it began after all others
  previous = std::move(current);
}

void forget_dependence() { previous.reset(); }

void note_global(Warp& w, const Inst& in, uint64_t address, uint64_t bytes, bool write) {
  for (uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    for (const auto& other : w.waited ? current->after_wait : current->before_wait) {
      if (other->written.count(word) || (write && other->read.count(word))) {
        fault(w, in,
              std::string(write ? "write" : "read") + " of global memory that launch " + other->name +
                  " touches, which may still be running: no griddepcontrol.wait orders them");
      }
    }
    if (w.block->let) {
      (write ? current->written : current->read).insert(word);
    } else if (write) {
      w.unfenced.push_back(word);
    }
  }
}

void wait_for_launches(Warp& w) {
  w.waited = true;
  if (!w.block->waited) ++current->waited;
  w.block->waited = true;
}

void end_block(Block& b) {
  if (b.let) return;
  b.let = true;
  auto add = [](std::vector<uint64_t>* words) {
    current->written.insert(words->begin(), words->end());
    words->clear();
  };
  for (Warp& w : b.warps) add(&w.unfenced);
  add(&b.unfenced);
}

void let_launches(Warp& w) {
  if (!w.waited) current->early = true;
  end_block(*w.block);
}

void fence_global(Warp& w) {
  w.unfenced.clear();
  w.block->unfenced.clear();  // what barriers have handed on
}

}  // namespace emulator
