// Runs a launch: blocks one after another (clusters together, cooperative grids all at once), warps in turn.
#include <algorithm>
#include <cstdlib>
#include <random>
#include <sstream>

#include "dependence.h"
#include "machine.h"
#include "memory.h"
#include "races.h"
#include "statistics.h"
#include "synchronize.h"

namespace emulator {

Machine machine;

namespace {

constexpr int kQuantum = 4096;          // instructions of a warp's turn
constexpr uint64_t kRoundsInVain = 64;  // turns of all warps with nothing but vain looks at barriers: a deadlock

std::string place(const Warp& w, const Inst& in) {
  const Kernel& k = *machine.launch.kernel;
  const Instruction& source = *k.instructions[in.source];
  std::ostringstream text;
  auto file = k.module->files.find(source.file);
  text << "kernel " << k.name << ", block (" << w.block->index.x << ", " << w.block->index.y << ", " << w.block->index.z
       << "), warp " << w.id << ", lanes " << std::hex << w.lanes << std::dec << ", ";
  if (file != k.module->files.end()) text << file->second << ":" << source.line << ", ";
  text << "PTX line " << source.ptx_line << ": " << source.mnemonic();
  return text.str();
}

}  // namespace

void fault(const Warp& w, const Inst& in, const std::string& what) { throw Fault(what + "\n  at " + place(w, in)); }

void pause(Warp& w) { w.budget = 0; }

namespace {

// Deeper calls first, then the lower address.
bool before(const Group& a, size_t depth, const Inst* pc) {
  return a.returns.size() != depth ? a.returns.size() > depth : a.pc < pc;
}

void save(Warp& w) { w.others.push_back({w.pc, w.lanes, w.returns}); }

void take(Warp& w, size_t i) {
  w.pc = w.others[i].pc, w.lanes = w.others[i].lanes, w.returns = std::move(w.others[i].returns);
  w.others.erase(w.others.begin() + i);
  for (size_t j = 0; j < w.others.size();) {
    if (w.others[j].pc == w.pc && w.others[j].returns == w.returns) {
      w.lanes |= w.others[j].lanes;
      w.others.erase(w.others.begin() + j);
    } else {
      ++j;
    }
  }
  w.meet = nullptr;
  for (const Group& g : w.others) {
    if (g.returns.size() == w.returns.size() && g.pc > w.pc && (!w.meet || g.pc < w.meet)) w.meet = g.pc;
  }
}

}  // namespace

void regroup(Warp& w) {
  if (w.others.empty() && w.lanes) {
    w.meet = nullptr;
    return;
  }
  if (w.lanes) save(w);
  if (w.others.empty()) return;
  size_t best = 0;
  for (size_t i = 1; i < w.others.size(); ++i) {
    if (before(w.others[i], w.others[best].returns.size(), w.others[best].pc)) best = i;
  }
  take(w, best);
}

void branch(Warp& w, const Inst* target, uint32_t taken) {
  if (taken == w.lanes) {
    w.pc = target;
    if (!w.others.empty()) regroup(w);
    return;
  }
  w.others.push_back({target, taken, w.returns});
  w.lanes &= ~taken;
  regroup(w);
}

void leave(Warp& w, uint32_t lanes) {
  w.exited |= lanes;
  w.lanes &= ~lanes;
  if (w.lanes) return;
  if (!w.others.empty()) return regroup(w);
  w.state = WarpState::kDone;
  ++machine.progress;
  finish_copies(w);
  Block& b = *w.block;
  --b.running, --b.cluster->running;
  if (machine.dependence && !b.running) end_block(b);
  recheck(b);
  pause(w);
}

bool gather(Warp& w, const Inst& in, uint32_t wanted) {
  const uint32_t missing = wanted & ~w.exited & ~w.lanes;
  if (!missing) return true;
  // Runs the others as long as they can still come here. If all that they do is to wait as well, nobody ever comes.
  w.in_vain = w.budget == w.gathered - 1 ? w.in_vain + 1 : 0;
  w.gathered = w.budget;
  w.pc = &in;
  save(w);
  w.lanes = 0;
  size_t best = w.others.size();
  for (size_t i = 0; i < w.others.size(); ++i) {
    const Group& g = w.others[i];
    if (g.pc == &in && g.returns == w.others.back().returns) continue;
    if (w.in_vain > 40) continue;
    if (best == w.others.size() || before(g, w.others[best].returns.size(), w.others[best].pc)) best = i;
  }
  if (best < w.others.size()) {
    take(w, best);
    w.meet = nullptr;
    for (const Group& g : w.others) {
      if (g.returns.size() == w.returns.size() && (g.pc > w.pc) && (!w.meet || g.pc < w.meet)) w.meet = g.pc;
    }
    return false;
  }
  take(w, w.others.size() - 1);
  if (!(wanted & ~w.exited & ~w.lanes)) return false;  // they were here already: once more, together
  std::ostringstream text;
  text << "lanes " << std::hex << missing << " are named here and do not come";
  fault(w, in, text.str());
}

namespace {

void start_warp(Warp& w, Block& b, int id) {
  const Launch& l = machine.launch;
  const Kernel& k = *l.kernel;
  w.block = &b, w.id = id;
  auto storage = [&](size_t bytes) {
    w.storage.emplace_back(new char[bytes + 64]());
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(w.storage.back().get()) + 63) & ~uintptr_t{63});
  };
  w.base[0] = storage(k.row_bytes);
  w.base[1] = const_cast<char*>(
      reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(k.constants.data()) + 63) & ~uintptr_t{63}));
  w.predicates = reinterpret_cast<uint32_t*>(storage(4 * k.predicates + 4));
  w.predicates[1] = kAllLanes;
  w.local = storage(kLanes * k.local_bytes);
  w.pc = k.code.data();
  const uint32_t threads = static_cast<uint32_t>(l.threads.count());
  const uint32_t here = std::min<uint32_t>(32, threads - 32 * id);
  w.lanes = here == 32 ? kAllLanes : (1u << here) - 1;
  w.exited = ~w.lanes;
  for (auto [special, ref] : k.specials) {
    for (uint32_t i = 0; i < 32; ++i) w.row32(ref)[i] = special_value(special, w, 32 * id + i);
  }
}

std::unique_ptr<Cluster> start_cluster(uint64_t number) {
  const Launch& l = machine.launch;
  const Kernel& k = *l.kernel;
  const Dim count{l.grid.x / l.cluster.x, l.grid.y / l.cluster.y, l.grid.z / l.cluster.z};
  std::unique_ptr<Cluster> c(new Cluster);
  c->index = {static_cast<uint32_t>(number % count.x), static_cast<uint32_t>(number / count.x % count.y),
              static_cast<uint32_t>(number / count.x / count.y)};
  const int warps = static_cast<int>((l.threads.count() + 31) / 32);
  for (uint32_t rank = 0; rank < l.cluster.count(); ++rank) {
    c->blocks.emplace_back(new Block);
    Block& b = *c->blocks.back();
    b.cluster = c.get(), b.rank = rank;
    b.index = {c->index.x * l.cluster.x + rank % l.cluster.x,
               c->index.y * l.cluster.y + rank / l.cluster.x % l.cluster.y,
               c->index.z * l.cluster.z + rank / l.cluster.x / l.cluster.y};
    b.number = (uint64_t{b.index.z} * l.grid.y + b.index.y) * l.grid.x + b.index.x;
    b.shared_end = k.dynamic_shared + l.dynamic_shared;
    b.shared.assign(b.shared_end + 64, '\xff');
    b.warps.resize(warps);
    b.running = warps, c->running += warps;
    for (int i = 0; i < warps; ++i) start_warp(b.warps[i], b, i);
  }
  if (machine.races) start_races(*c);
  return c;
}

// EMU_TRACE=lane: what the first warp of the first block does, with the lane's value of the first operand after it.
void trace(const Warp& w, const Inst& in, uint32_t lanes) {
  const int lane = std::atoi(std::getenv("EMU_TRACE"));
  const Instruction& source = *machine.launch.kernel->instructions[in.source];
  const uint64_t value = w.row32(in.r[0])[lane];
  std::fprintf(stderr, "%6d %-24s lanes %08x", source.ptx_line, source.mnemonic().c_str(), lanes);
  for (const Operand& o : source.args) std::fprintf(stderr, " %s", o.name.substr(0, 20).c_str());
  std::fprintf(stderr, " : %llx %llx\n", static_cast<unsigned long long>(value),
               static_cast<unsigned long long>(w.row64(in.r[0])[lane / 1]));
}

template <bool Trace>
void run_warp(Warp& w, int quantum) {
  Kernel& k = *machine.launch.kernel;
  const Inst* first = k.code.data();
  uint64_t* executed = k.executed.data();
  w.budget = quantum;
  w.failed_wait = false;
  int done = 0;
  while (w.budget > 0) {
    --w.budget;
    const Inst& in = *w.pc;
    uint32_t lanes = w.lanes;
    if (in.guard >= 0) {
      const uint32_t p = w.predicates[in.guard >> 1];
      lanes &= (in.guard & 1) ? ~p : p;
    }
    ++executed[w.pc - first];
    ++done;
    ++w.pc;
    if (lanes) in.run(w, in, lanes);
    if (Trace && w.id == 0 && w.block->number == 0) trace(w, in, lanes);
    if (w.pc == w.meet) regroup(w);
  }
  w.executed += done;
  w.block->executed += done;
  // Lanes that run apart take turns: one of them may wait for another.
  if (w.failed_wait && !w.others.empty() && w.state == WarpState::kReady) {
    save(w);
    take(w, 0);
  }
}

[[noreturn]] void deadlock(const std::vector<std::unique_ptr<Cluster>>& clusters) {
  std::ostringstream text;
  text << "deadlock: no warp of kernel " << machine.launch.kernel->name << " can go on";
  int shown = 0;
  for (const auto& c : clusters) {
    for (const auto& b : c->blocks) {
      for (const Warp& w : b->warps) {
        if (w.state == WarpState::kDone || ++shown > 24) continue;
        const Inst& in = w.state == WarpState::kReady ? *w.pc : *(w.pc - 1);
        text << "\n  "
             << (w.state == WarpState::kBarrier          ? "at named barrier " + std::to_string(w.barrier)
                 : w.state == WarpState::kClusterBarrier ? "at the cluster's barrier"
                                                         : describe_wait(w))
             << ": " << place(w, in);
      }
    }
  }
  throw Fault(text.str());
}

}  // namespace

void run_launch(const Launch& launch) {
  machine.launch = launch;
  machine.late = std::getenv("EMU_LATE") != nullptr;
  machine.statistics = std::getenv("EMU_STATS") != nullptr;
  machine.races = std::getenv("EMU_RACES") != nullptr;
  machine.dependence = std::getenv("EMU_PDL") != nullptr;
  machine.order = 0;
  if (machine.dependence) begin_dependence();
  machine.bulk.clear();
  machine.counters = {};
  Kernel& k = *launch.kernel;
  for (Inst& in : k.code) in.low = 1, in.high = 0;
  std::fill(k.executed.begin(), k.executed.end(), 0);
  std::fill(k.work.begin(), k.work.end(), 0);
  const char* seed = std::getenv("EMU_SHUFFLE");
  const bool traced = std::getenv("EMU_TRACE") != nullptr;
  std::mt19937 random(seed ? std::atoi(seed) : 0);
  const uint64_t count = launch.grid.count() / launch.cluster.count();
  Statistics statistics;
  std::vector<std::unique_ptr<Cluster>> clusters;
  uint64_t next = 0, in_vain = 0, turns = 0;
  std::vector<Warp*> order;
  while (next < count || !clusters.empty()) {
    // One cluster at a time. One that takes very long may be waiting for a later one: then that starts as well.
    const bool more = clusters.empty() || launch.cooperative || (turns > 20000 && clusters.size() < 132);
    if (more && next < count) {
      turns = 0;
      do {
        clusters.push_back(start_cluster(next++));
      } while (launch.cooperative && next < count);
    }
    order.clear();
    for (auto& c : clusters) {
      for (auto& b : c->blocks) {
        for (Warp& w : b->warps) order.push_back(&w);
      }
    }
    if (seed) std::shuffle(order.begin(), order.end(), random);
    const uint64_t progress = machine.progress;
    bool vain = true;
    for (Warp* w : order) {
      if (w->state != WarpState::kReady) continue;
      (traced ? run_warp<true> : run_warp<false>)(*w, seed ? 1 + static_cast<int>(random() % kQuantum) : kQuantum);
      ++turns;
      vain = vain && (w->failed_wait || w->state != WarpState::kReady);
    }
    if (vain && machine.progress == progress) {
      if (++in_vain > kRoundsInVain) deadlock(clusters);
    } else {
      in_vain = 0;
    }
    for (size_t i = 0; i < clusters.size();) {
      if (clusters[i]->running > 0) {
        ++i;
        continue;
      }
      check_end(*clusters[i]);
      if (machine.statistics) {
        for (auto& b : clusters[i]->blocks) statistics.block(*b);
      }
      clusters.erase(clusters.begin() + i);
    }
  }
  if (machine.dependence) end_dependence();
  if (machine.statistics) statistics.print();
}

}  // namespace emulator
