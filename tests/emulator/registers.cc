// Which registers of a function may share a row: liveness over its jumps, then intervals from first to last.
#include <algorithm>

#include "decode.h"

namespace emulator {
namespace {

using Bits = std::vector<uint64_t>;
void set(Bits& b, int i) { b[i / 64] |= uint64_t{1} << (i % 64); }
void clear(Bits& b, int i) { b[i / 64] &= ~(uint64_t{1} << (i % 64)); }

void collect(const Operand& o, std::vector<int>* out) {
  if (o.reg >= 0) out->push_back(o.reg);
  if (o.second >= 0) out->push_back(o.second);
  for (const Operand& part : o.parts) collect(part, out);
}

bool has_target(const Instruction& in) {
  static const std::set<std::string> none = {
      "st",      "red",       "cp",       "fence",   "membar",        "prefetch",       "prefetchu",
      "call",    "ret",       "bra",      "exit",    "trap",          "griddepcontrol", "setmaxnreg",
      "barrier", "nanosleep", "stmatrix", "discard", "applypriority", "brkpt",          "pmevent"};
  const std::string& op = in.op[0];
  if (in.args.empty() || none.count(op)) return false;
  if (op == "bar") return in.has("red");
  if (op == "mbarrier") return in.args[0].kind == Operand::kRegister && in.args.size() > 1;
  if (op == "wgmma") return in.op[1] == "mma_async";
  return true;
}

struct Access {
  std::vector<int> reads, writes;
  bool certain = true;  // the writes happen in every lane that comes here
};

Access access(const Instruction& in) {
  Access a;
  a.certain = in.guard < 0;
  if (in.guard >= 0) a.reads.push_back(in.guard);
  for (size_t i = 0; i < in.args.size(); ++i) {
    const bool target = i == 0 && has_target(in);
    collect(in.args[i], target ? &a.writes : &a.reads);
    if (target && in.op[0] == "wgmma") collect(in.args[i], &a.reads);
  }
  return a;
}

}  // namespace

RegisterPlan plan_registers(const Function& f) {
  const int count = static_cast<int>(f.registers.size()), length = static_cast<int>(f.code.size());
  std::vector<Access> accesses;
  for (const Instruction& in : f.code) accesses.push_back(access(in));

  std::set<int> begins = {0};
  for (const auto& [name, at] : f.labels) begins.insert(at);
  auto jumps = [&](int i) { return f.code[i].op[0] == "bra" || f.code[i].op[0] == "ret" || f.code[i].op[0] == "exit"; };
  for (int i = 0; i < length; ++i) {
    if (jumps(i)) begins.insert(i + 1);
  }
  struct Part {
    int begin, end;
    std::vector<int> next;
    Bits in, out;
  };
  std::vector<Part> parts;
  std::vector<int> part_of(length + 1, -1);
  for (auto it = begins.begin(); it != begins.end(); ++it) {
    if (*it >= length) break;
    const int end = std::next(it) == begins.end() ? length : std::min(*std::next(it), length);
    part_of[*it] = static_cast<int>(parts.size());
    parts.push_back({*it, end, {}, Bits((count + 63) / 64), Bits((count + 63) / 64)});
  }
  for (Part& p : parts) {
    const Instruction& last = f.code[p.end - 1];
    const bool away = jumps(p.end - 1) && last.guard < 0;
    if (!away && p.end < length) p.next.push_back(part_of[p.end]);
    if (last.op[0] == "bra") {
      const int to = f.labels.at(last.args[0].name);
      if (to < length) p.next.push_back(part_of[to]);
    }
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = parts.size(); i-- > 0;) {
      Part& p = parts[i];
      for (int next : p.next) {
        for (size_t j = 0; j < p.out.size(); ++j) p.out[j] |= parts[next].in[j];
      }
      Bits live = p.out;
      for (int at = p.end; at-- > p.begin;) {
        if (accesses[at].certain) {
          for (int r : accesses[at].writes) clear(live, r);
        }
        for (int r : accesses[at].reads) set(live, r);
      }
      if (live != p.in) p.in = live, changed = true;
    }
  }

  struct Interval {
    int reg, first, last;
  };
  std::vector<Interval> intervals(count);
  for (int r = 0; r < count; ++r) intervals[r] = {r, length, -1};
  auto touch = [&](int r, int at) {
    intervals[r].first = std::min(intervals[r].first, at);
    intervals[r].last = std::max(intervals[r].last, at);
  };
  for (int i = 0; i < length; ++i) {
    for (int r : accesses[i].reads) touch(r, i);
    for (int r : accesses[i].writes) touch(r, i);
  }
  for (const Part& p : parts) {
    for (int r = 0; r < count; ++r) {
      if (p.in[r / 64] >> (r % 64) & 1) touch(r, p.begin);
      if (p.out[r / 64] >> (r % 64) & 1) touch(r, p.end - 1);
    }
  }
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.first < b.first; });

  RegisterPlan plan;
  plan.slot.assign(count, 0);
  std::vector<int> free_slots[3];           // predicates, 32 and 64 bits
  std::vector<std::pair<int, int>> active;  // last use, register; a heap
  auto pool = [&](int r) { return f.registers[r].bytes == 0 ? 0 : f.registers[r].bytes == 8 ? 2 : 1; };
  const auto later = [](const std::pair<int, int>& a, const std::pair<int, int>& b) { return a.first > b.first; };
  for (const Interval& v : intervals) {
    if (v.last < 0) continue;
    while (!active.empty() && active.front().first < v.first) {
      std::pop_heap(active.begin(), active.end(), later);
      free_slots[pool(active.back().second)].push_back(plan.slot[active.back().second]);
      active.pop_back();
    }
    auto& slots = free_slots[pool(v.reg)];
    if (!slots.empty()) {
      plan.slot[v.reg] = slots.back();
      slots.pop_back();
    } else if (pool(v.reg) == 0) {
      plan.slot[v.reg] = plan.predicates++;
    } else {
      plan.slot[v.reg] = static_cast<int>(plan.bytes);
      plan.bytes += (pool(v.reg) == 2 ? 8 : 4) * kLanes;
    }
    active.push_back({v.last, v.reg});
    std::push_heap(active.begin(), active.end(), later);
  }
  return plan;
}

}  // namespace emulator
