// What the lanes of a warp do together: shfl, vote, redux, match, elect, activemask.
#include <algorithm>

#include "decode.h"
#include "lanes.h"

namespace emulator {
namespace {

// The member mask of the lanes that are here. They must agree, or they would wait for each other.
uint32_t members(const Warp& w, const Inst& in, Ref mask, uint32_t lanes) {
  const uint32_t* masks = w.row32(mask);
  const uint32_t first = masks[__builtin_ctz(lanes)];
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    if (masks[i] != first) {
      // Several groups at once, each with its own mask.
      if (!(masks[i] >> i & 1)) fault(w, in, "a lane is not in its own member mask");
    }
  }
  return first;
}

bool together(Warp& w, const Inst& in, Ref mask, uint32_t lanes) {
  const uint32_t wanted = members(w, in, mask, lanes);
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    if (!(w.row32(mask)[i] >> i & 1)) fault(w, in, "lane " + std::to_string(i) + " is not in its own member mask");
  }
  if (wanted & ~w.exited & ~w.lanes) return gather(w, in, wanted);
  return true;
}

enum Shuffle { kUp, kDown, kButterfly, kIndex };

template <Shuffle S>
void shuffle(Warp& w, const Inst& in, uint32_t lanes) {
  if (!together(w, in, in.r[5], lanes)) return;
  const uint32_t *a = w.row32(in.r[2]), *b = w.row32(in.r[3]), *c = w.row32(in.r[4]);
  uint32_t out[kLanes];
  uint32_t inside = 0;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t lane = i, by = b[i] & 31, clamp = c[i] & 31, segment = c[i] >> 8 & 31;
    const uint32_t least = lane & segment, most = least | (clamp & ~segment);
    uint32_t j;
    bool valid;
    if (S == kUp) {
      j = lane - by;
      valid = static_cast<int32_t>(j) >= static_cast<int32_t>(most);
    } else if (S == kDown) {
      j = lane + by;
      valid = j <= most;
    } else if (S == kButterfly) {
      j = lane ^ by;
      valid = j <= most;
    } else {
      j = least | (by & ~segment);
      valid = j <= most;
    }
    if (!valid) j = lane;
    inside |= static_cast<uint32_t>(valid) << i;
    out[i] = a[j];
    if ((lanes >> i & 1) && !(lanes >> j & 1)) {
      fault(w, in, "lane " + std::to_string(i) + " reads lane " + std::to_string(j) + ", which takes no part");
    }
  }
  store_cells(w.row32(in.r[0]), out, lanes);
  if (in.writes_second) set_predicate(w, in.r[1], inside, lanes);
}

void vote(Warp& w, const Inst& in, uint32_t lanes) {
  if (!together(w, in, in.r[2], lanes)) return;
  const uint32_t yes = predicate(w, in.r[1]) & lanes;
  if (in.number == 'b') {
    uint32_t out[kLanes];
    std::fill_n(out, kLanes, yes);
    return store_cells(w.row32(in.r[0]), out, lanes);
  }
  const bool result = in.number == 'l' ? yes == lanes : in.number == 'n' ? yes != 0 : yes == 0 || yes == lanes;
  set_predicate(w, in.r[0], result ? kAllLanes : 0, lanes);
}

void reduce(Warp& w, const Inst& in, uint32_t lanes) {
  if (!together(w, in, in.r[2], lanes)) return;
  const uint32_t* a = w.row32(in.r[1]);
  uint32_t sum = a[__builtin_ctz(lanes)];
  for (uint32_t rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
    const uint32_t x = a[__builtin_ctz(rest)];
    const int32_t sx = static_cast<int32_t>(x), ss = static_cast<int32_t>(sum);
    switch (in.number) {
      case 'a':
        sum += x;
        break;
      case '&':
        sum &= x;
        break;
      case '|':
        sum |= x;
        break;
      case '^':
        sum ^= x;
        break;
      case 'm':
        sum = std::min(sum, x);
        break;
      case 'M':
        sum = std::max(sum, x);
        break;
      case 's':
        sum = static_cast<uint32_t>(std::min(ss, sx));
        break;
      case 'S':
        sum = static_cast<uint32_t>(std::max(ss, sx));
        break;
    }
  }
  uint32_t out[kLanes];
  std::fill_n(out, kLanes, sum);
  store_cells(w.row32(in.r[0]), out, lanes);
}

template <class T, bool All>
void match(Warp& w, const Inst& in, uint32_t lanes) {
  if (!together(w, in, in.r[3], lanes)) return;
  const Cell<T>* a = cells<T>(w, in.r[2]);
  uint32_t out[kLanes] = {};
  bool equal = true;
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) out[i] |= static_cast<uint32_t>((lanes >> j & 1) && a[j] == a[i]) << j;
    if (lanes >> i & 1) equal = equal && out[i] == lanes;
  }
  if (All) {
    std::fill_n(out, kLanes, equal ? lanes : 0);
    if (in.writes_second) set_predicate(w, in.r[1], equal ? kAllLanes : 0, lanes);
  }
  store_cells(w.row32(in.r[0]), out, lanes);
}

void active_mask(Warp& w, const Inst& in, uint32_t lanes) {
  uint32_t out[kLanes];
  std::fill_n(out, kLanes, lanes);
  store_cells(w.row32(in.r[0]), out, lanes);
}

void elect(Warp& w, const Inst& in, uint32_t lanes) {
  if (!together(w, in, in.r[2], lanes)) return;
  const int leader = __builtin_ctz(lanes);
  uint32_t out[kLanes];
  std::fill_n(out, kLanes, static_cast<uint32_t>(leader));
  store_cells(w.row32(in.r[0]), out, lanes);
  set_predicate(w, in.r[1], 1u << leader, lanes);
}

void warp_barrier(Warp& w, const Inst& in, uint32_t lanes) { together(w, in, in.r[0], lanes); }

void second_predicate(Lowering& l) {
  if (l.arg(0).second < 0) return;
  Operand o = l.arg(0);
  o.reg = o.second;
  l.out.r[1] = l.truth_target(o);
  l.out.writes_second = true;
}

}  // namespace

bool lower_warp(Lowering& l) {
  const std::string& op = l.in.op[0];
  if (op == "bar" && l.op(1) == "warp") {
    l.out.r[0] = l.value(l.arg(0), 4);
    l.run(warp_barrier, Kind::kShuffle);
    return true;
  }
  if (op == "activemask") {
    l.out.r[0] = l.target(l.arg(0), 4);
    l.run(active_mask, Kind::kShuffle);
    return true;
  }
  if (l.op(1) != "sync") {
    if (op != "match" && op != "elect") return false;
  }
  if (op == "shfl") {
    l.out.r[0] = l.target(l.arg(0), 4);
    second_predicate(l);
    for (int i = 1; i < 5; ++i) l.out.r[i + 1] = l.value(l.arg(i), 4);
    const std::string& mode = l.op(2);
    l.run(mode == "up"     ? shuffle<kUp>
          : mode == "down" ? shuffle<kDown>
          : mode == "bfly" ? shuffle<kButterfly>
                           : shuffle<kIndex>,
          Kind::kShuffle);
    return true;
  }
  if (op == "vote") {
    const std::string& mode = l.op(2);
    l.out.number = mode == "ballot" ? 'b' : mode == "all" ? 'l' : mode == "any" ? 'n' : 'u';
    l.out.r[0] = mode == "ballot" ? l.target(l.arg(0), 4) : l.truth_target(l.arg(0));
    l.out.r[1] = l.truth(l.arg(1));
    l.out.r[2] = l.value(l.arg(2), 4);
    l.run(vote, Kind::kShuffle);
    return true;
  }
  if (op == "redux") {
    const std::string& mode = l.op(2);
    const bool sign = l.type() == "s32";
    l.out.number = mode == "add"   ? 'a'
                   : mode == "and" ? '&'
                   : mode == "or"  ? '|'
                   : mode == "xor" ? '^'
                   : mode == "min" ? (sign ? 's' : 'm')
                   : mode == "max" ? (sign ? 'S' : 'M')
                                   : 0;
    if (!l.out.number || type_bytes(l.type()) != 4 || l.type()[0] == 'f') return false;
    l.out.r[0] = l.target(l.arg(0), 4);
    l.out.r[1] = l.value(l.arg(1), 4), l.out.r[2] = l.value(l.arg(2), 4);
    l.run(reduce, Kind::kShuffle);
    return true;
  }
  if (op == "match") {
    const bool all = l.has("all"), wide = type_bytes(l.type()) == 8;
    l.out.r[0] = l.target(l.arg(0), 4);
    second_predicate(l);
    l.out.r[2] = l.value(l.arg(1), wide ? 8 : 4), l.out.r[3] = l.value(l.arg(2), 4);
    l.run(wide  ? all ? match<uint64_t, true> : match<uint64_t, false>
          : all ? match<uint32_t, true>
                : match<uint32_t, false>,
          Kind::kShuffle);
    return true;
  }
  if (op == "elect") {
    l.out.r[0] = l.target(l.arg(0), 4);
    second_predicate(l);
    l.out.r[2] = l.value(l.arg(1), 4);
    l.run(elect, Kind::kShuffle);
    return true;
  }
  return false;
}

}  // namespace emulator
