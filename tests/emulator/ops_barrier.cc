// bar, barrier.cluster and mbarrier.
#include <algorithm>
#include <sstream>

#include "decode.h"
#include "lanes.h"
#include "memory.h"
#include "races.h"
#include "synchronize.h"

namespace emulator {
namespace {

// An mbarrier's 64 bits.
struct State {
  uint32_t pending, expected;  // arrivals
  int32_t bytes;
  bool parity;
};
constexpr uint64_t kValid = uint64_t{1} << 62;
constexpr int kCountBits = 20, kBytesBits = 21;

uint64_t pack(const State& s) {
  return kValid | uint64_t{s.parity} << 61 |
         (uint64_t(s.bytes + (1 << (kBytesBits - 1))) & ((1 << kBytesBits) - 1)) << 40 |
         uint64_t{s.expected} << kCountBits | s.pending;
}

char* location(const Warp& w, const Inst& in, uint32_t address) { return shared_location(w, in, address, 8); }

State read(const Warp& w, const Inst& in, uint32_t address) {
  uint64_t bits;
  std::memcpy(&bits, location(w, in, address), 8);
  if (bits >> 62 != 1) fault(w, in, "no mbarrier was initialised at shared offset " + std::to_string(address));
  const uint32_t mask = (1u << kCountBits) - 1;
  return {static_cast<uint32_t>(bits) & mask, static_cast<uint32_t>(bits >> kCountBits) & mask,
          static_cast<int32_t>(bits >> 40 & ((1 << kBytesBits) - 1)) - (1 << (kBytesBits - 1)), (bits >> 61 & 1) != 0};
}

void write(char* at, State s) {
  if (s.pending == 0 && s.bytes == 0) {
    s.parity = !s.parity, s.pending = s.expected;
    ++machine.progress;
  }
  const uint64_t bits = pack(s);
  std::memcpy(at, &bits, 8);
}

uint32_t address_of(const Warp& w, const Inst& in, int lane) {
  return static_cast<uint32_t>((in.wide ? w.row64(in.r[4])[lane] : w.row32(in.r[4])[lane]) + in.number);
}

Clock& clock_of(const Warp& w, uint32_t address) {
  const uint32_t rank = address >> kRankShift;
  Block& b = rank ? *w.block->cluster->blocks[rank - 1] : *w.block;
  return b.clocks[address & kOffsetMask];
}

template <class F>
void each_lane(uint32_t lanes, F f) {
  for (uint32_t rest = lanes; rest; rest &= rest - 1) f(__builtin_ctz(rest));
}

void init(Warp& w, const Inst& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    const uint32_t count = w.row32(in.r[1])[i];
    if (count == 0 || count >> kCountBits) fault(w, in, "an mbarrier of " + std::to_string(count) + " arrivals");
    char* at = location(w, in, address_of(w, in, i));
    const uint64_t bits = pack({count, count, 0, false});
    std::memcpy(at, &bits, 8);
  });
}

void invalidate(Warp& w, const Inst& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) { std::memset(location(w, in, address_of(w, in, i)), 0xff, 8); });
}

// shared_constant: 1 expects bytes, 2 arrives, 3 both; r[1] bytes, r[2] arrivals if count; r[0] the state before.
void arrive(Warp& w, const Inst& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    const uint32_t address = address_of(w, in, i);
    State s = read(w, in, address);
    if (in.writes_second) w.row64(in.r[0])[i] = pack(s);
    if (in.shared_constant & 1) s.bytes += static_cast<int32_t>(w.row32(in.r[1])[i]);
    if (in.shared_constant & 2) {
      const uint32_t count = in.count ? w.row32(in.r[2])[i] : 1;
      if (count > s.pending) {
        fault(w, in, std::to_string(count) + " arrivals at an mbarrier that waits for " + std::to_string(s.pending));
      }
      s.pending -= count;
    }
    write(location(w, in, address), s);
    if (machine.races && (in.shared_constant & 2)) release(w, &clock_of(w, address));
  });
}

void complete(Warp& w, const Inst& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) { complete_bytes(*w.block, address_of(w, in, i), w.row32(in.r[1])[i]); });
}

// Whether the phase has ended: of that parity, or the one that a state was taken in.
template <bool Parity>
void wait(Warp& w, const Inst& in, uint32_t lanes) {
  uint32_t over = 0;
  each_lane(lanes, [&](int i) {
    const uint32_t address = address_of(w, in, i);
    State s = read(w, in, address);
    const bool phase = Parity ? w.row32(in.r[1])[i] & 1 : w.row64(in.r[1])[i] >> 61 & 1;
    if (s.parity == phase && finish_bulk(*w.block, address)) s = read(w, in, address);
    over |= static_cast<uint32_t>(s.parity != phase) << i;
    if (machine.races && s.parity != phase) acquire(w, clock_of(w, address));
  });
  set_predicate(w, in.r[0], over, lanes);
  if (over & lanes) w.waited |= w.block->waited;
  if ((over & lanes) != lanes) {
    w.failed_wait = true;
    w.barrier = static_cast<int>(address_of(w, in, __builtin_ctz(lanes & ~over)));
    pause(w);
  }
}

void open_barrier(NamedBarrier& bar) {
  ++machine.progress;
  for (Warp* each : bar.waiting) {
    each->state = WarpState::kReady;
    if (machine.races) acquire(*each, bar.clock);
    each->waited |= bar.waited;
    auto& before = each->block->unfenced;
    before.insert(before.end(), each->unfenced.begin(), each->unfenced.end());
    each->unfenced.clear();
    const Inst& own = *(each->pc - 1);
    if (own.number == 'p') {
      std::fill_n(each->row32(own.r[2]), kLanes, bar.reduction);
    } else if (own.number >= 2) {
      set_predicate(*each, own.r[2], bar.reduction ? kAllLanes : 0, each->lanes);
    }
  }
  bar.waiting.clear();
  bar.arrived = 0;
}

// Named barriers of the block. number: 0 sync, 1 arrive, 2 and more reductions.
void named(Warp& w, const Inst& in, uint32_t lanes) {
  if (!gather(w, in, kAllLanes)) return;
  if (lanes != w.lanes) fault(w, in, "not all lanes of the warp come to this barrier");
  const int first = __builtin_ctz(lanes);
  const uint32_t id = w.row32(in.r[0])[first];
  if (id > 15) fault(w, in, "named barrier " + std::to_string(id));
  Block& b = *w.block;
  NamedBarrier& bar = b.barriers[id];
  uint32_t threads = in.count ? w.row32(in.r[1])[first] : 0;
  if (threads % 32) fault(w, in, "a barrier of " + std::to_string(threads) + " threads");
  // Without a count: all warps that have not ended.
  const uint32_t expected = threads ? threads / 32 : static_cast<uint32_t>(b.running) | 1u << 31;
  if (bar.arrived && (bar.expected >> 31) == (expected >> 31) && !(expected >> 31) && bar.expected != expected) {
    fault(w, in,
          "barrier " + std::to_string(id) + " of " + std::to_string(32 * expected) + " threads, " +
              std::to_string(32 * bar.expected) + " elsewhere");
  }
  bar.expected = expected;
  if (in.number >= 2) {
    const uint32_t yes = predicate(w, in.r[3]) & lanes;
    if (!bar.arrived) bar.reduction = in.number == 'a' ? 1 : 0;
    if (in.number == 'a') bar.reduction &= yes == lanes;
    if (in.number == 'o') bar.reduction |= yes != 0;
    if (in.number == 'p') bar.reduction += __builtin_popcount(yes);
  }
  ++bar.arrived;
  if (machine.races) release(w, &bar.clock);
  bar.waited |= w.waited;
  if (in.number != 1) {
    w.state = WarpState::kBarrier, w.barrier = static_cast<int>(id);
    bar.waiting.push_back(&w);
    pause(w);
  }
  if (bar.arrived >= (expected & ~(1u << 31))) open_barrier(bar);
}

void cluster_arrive(Warp& w, const Inst& in, uint32_t) {
  if (!gather(w, in, kAllLanes)) return;
  Cluster& c = *w.block->cluster;
  w.cluster_phase = c.phase;
  if (machine.races) release(w, &c.clock);
  ++c.arrived;
  recheck(*w.block);
}

void cluster_wait(Warp& w, const Inst& in, uint32_t) {
  if (!gather(w, in, kAllLanes)) return;
  if (w.block->cluster->phase != w.cluster_phase) {
    if (machine.races) acquire(w, w.block->cluster->clock);
    return;
  }
  w.state = WarpState::kClusterBarrier;
  pause(w);
}

bool lower_mbarrier(Lowering& l) {
  const std::string& what = l.op(1);
  if (what == "init") {
    l.address(l.arg(0), 4);
    l.out.r[1] = l.value(l.arg(1), 4);
    l.run(init, Kind::kBarrier);
  } else if (what == "inval") {
    l.address(l.arg(0), 4);
    l.run(invalidate, Kind::kBarrier);
  } else if (what == "arrive" || what == "expect_tx" || what == "arrive_drop") {
    if (what == "arrive_drop") return false;
    size_t i = l.arg(0).kind == Operand::kMemory ? 0 : 1;
    if (i == 1 && l.arg(0).kind == Operand::kRegister) {
      l.out.r[0] = l.target(l.arg(0), 8);
      l.out.writes_second = true;
    }
    l.address(l.arg(i++), 4);
    const bool bytes = l.has("expect_tx");
    l.out.shared_constant = (bytes ? 1u : 0u) | (what == "arrive" ? 2u : 0u);
    l.out.count = 0;
    if (bytes) {
      l.out.r[1] = l.value(l.arg(i), 4);
    } else if (i < l.size()) {
      l.out.r[2] = l.value(l.arg(i), 4), l.out.count = 1;
    }
    l.run(arrive, Kind::kBarrier);
  } else if (what == "complete_tx") {
    l.address(l.arg(0), 4);
    l.out.r[1] = l.value(l.arg(1), 4);
    l.run(complete, Kind::kBarrier);
  } else if (what == "try_wait" || what == "test_wait") {
    l.out.r[0] = l.truth_target(l.arg(0));
    l.address(l.arg(1), 4);
    const bool parity = l.has("parity");
    l.out.r[1] = l.value(l.arg(2), parity ? 4 : 8);
    l.run(parity ? wait<true> : wait<false>, Kind::kBarrier);
  } else {
    return false;
  }
  return true;
}

}  // namespace

void recheck(Block& b) {
  for (NamedBarrier& bar : b.barriers) {
    if (bar.arrived && bar.expected >> 31 && bar.arrived >= static_cast<uint32_t>(b.running)) open_barrier(bar);
  }
  Cluster& c = *b.cluster;
  if (!c.arrived || c.arrived < static_cast<uint32_t>(c.running)) return;
  c.arrived = 0, ++c.phase, ++machine.progress;
  for (auto& block : c.blocks) {
    for (Warp& each : block->warps) {
      if (each.state != WarpState::kClusterBarrier) continue;
      each.state = WarpState::kReady;
      if (machine.races) acquire(each, c.clock);
    }
  }
}

void arrive_once(Warp& w, const Inst& in, uint32_t address) {
  State s = read(w, in, address);
  if (s.pending == 0) fault(w, in, "an arrival too many at an mbarrier");
  --s.pending;
  write(location(w, in, address), s);
  if (machine.races) release(w, &clock_of(w, address));
}

void complete_bytes(Block& b, uint32_t address, uint32_t bytes) {
  Block& owner = address >> kRankShift ? *b.cluster->blocks[(address >> kRankShift) - 1] : b;
  Warp& any = owner.warps[0];
  const Inst& in = *any.pc;
  State s = read(any, in, address & kOffsetMask);
  s.bytes -= static_cast<int32_t>(bytes);
  write(location(any, in, address & kOffsetMask), s);
}

bool finish_bulk(Block& b, uint32_t address) {
  bool found = false;
  for (size_t i = 0; i < machine.bulk.size();) {
    PendingBulk& each = machine.bulk[i];
    if (each.block != &b || (address && (each.barrier & kOffsetMask) != (address & kOffsetMask))) {
      ++i;
      continue;
    }
    const auto copy = std::move(each.copy);
    machine.bulk.erase(machine.bulk.begin() + i);
    copy();
    found = true;
  }
  return found;
}

void check_end(Cluster& c) {
  for (auto& b : c.blocks) {
    for (const PendingBulk& each : machine.bulk) {
      if (each.block == b.get())
        throw Fault("block " + std::to_string(b->number) + " of kernel " + machine.launch.kernel->name +
                    " ended while a bulk copy was on its way into it");
    }
  }
}

std::string describe_wait(const Warp& w) {
  if (w.barrier < 0) return "running";
  std::ostringstream text;
  text << "waiting for an mbarrier at shared offset " << (w.barrier & kOffsetMask) - kSharedStart;
  uint64_t bits;
  std::memcpy(&bits, w.block->shared.data() + (w.barrier & kOffsetMask), 8);
  if (!(w.barrier >> kRankShift) && bits >> 62 == 1) {
    const uint32_t mask = (1u << kCountBits) - 1;
    text << " (" << (bits & mask) << " of " << (bits >> kCountBits & mask) << " arrivals and "
         << static_cast<int32_t>(bits >> 40 & ((1 << kBytesBits) - 1)) - (1 << (kBytesBits - 1))
         << " bytes to come, parity " << (bits >> 61 & 1) << ")";
  }
  return text.str();
}

bool lower_barrier(Lowering& l) {
  const std::string& op = l.in.op[0];
  if (op == "mbarrier") return lower_mbarrier(l);
  if (op == "barrier" && l.op(1) == "cluster") {
    l.run(l.op(2) == "arrive" ? cluster_arrive : cluster_wait, Kind::kBarrier);
    return l.op(2) == "arrive" || l.op(2) == "wait";
  }
  if (op != "bar" && op != "barrier") return false;
  std::string what = l.op(1);
  if (what == "cta") what = l.op(2);
  size_t i = 0;
  if (what == "red") {
    l.out.number = l.has("popc") ? 'p' : l.has("and") ? 'a' : 'o';
    l.out.r[2] = l.out.number == 'p' ? l.target(l.arg(0), 4) : l.truth_target(l.arg(0));
    l.out.r[3] = l.truth(l.arg(l.size() - 1));
    i = 1;
  } else if (what == "arrive") {
    l.out.number = 1;
  } else if (what != "sync") {
    return false;
  }
  l.out.r[0] = l.value(l.arg(i), 4);
  const size_t rest = l.size() - i - (what == "red" ? 1 : 0);
  l.out.count = rest > 1;
  if (rest > 1) l.out.r[1] = l.value(l.arg(i + 1), 4);
  l.run(named, Kind::kBarrier);
  return true;
}

}  // namespace emulator
