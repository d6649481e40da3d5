// mov, cvta, mapa and what reads clocks.
#include <algorithm>

#include "decode.h"
#include "lanes.h"

namespace emulator {
namespace {

template <class T>
void move(Warp& w, const Inst& in, uint32_t lanes) {
  alignas(64) T out[kLanes];
  std::memcpy(out, cells<T>(w, in.r[1]), sizeof(out));
  store_cells(cells<T>(w, in.r[0]), out, lanes);
}

void move_predicate(Warp& w, const Inst& in, uint32_t lanes) {
  set_predicate(w, in.r[0], predicate(w, in.r[1]), lanes);
}

template <class T>
struct AddWindow {
  T operator()(T a, T window) const { return a + window; }
};
struct DropWindow {
  uint64_t operator()(uint64_t a) const { return a & 0xffffffff; }
};
struct Mapa {
  uint32_t operator()(uint32_t a, uint32_t rank) const { return (a & kOffsetMask) | (rank + 1) << kRankShift; }
};
struct Mapa64 {
  uint64_t operator()(uint64_t a, uint32_t rank) const {
    return (a & ~uint64_t{0xff000000}) | uint64_t{rank + 1} << kRankShift;
  }
};

// Several pieces into one register, and one into several; 16, 32 or 64 bits each.
void join(Warp& w, const Inst& in, uint32_t lanes) {
  uint64_t out[kLanes] = {};
  const int bits = in.number;
  for (size_t j = 0; j < in.list.size(); ++j) {
    const uint32_t* piece = w.row32(in.list[j]);
    for (int i = 0; i < kLanes; ++i) out[i] |= uint64_t{piece[i]} << (bits * j);
  }
  if (in.wide) return store_cells(w.row64(in.r[0]), out, lanes);
  uint32_t low[kLanes];
  for (int i = 0; i < kLanes; ++i) low[i] = static_cast<uint32_t>(out[i]);
  store_cells(w.row32(in.r[0]), low, lanes);
}
void split(Warp& w, const Inst& in, uint32_t lanes) {
  uint64_t whole[kLanes];
  if (in.wide) {
    std::memcpy(whole, w.row64(in.r[1]), sizeof(whole));
  } else {
    std::copy_n(w.row32(in.r[1]), kLanes, whole);
  }
  const int bits = in.number;
  const uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
  for (size_t j = 0; j < in.list.size(); ++j) {
    uint32_t piece[kLanes];
    for (int i = 0; i < kLanes; ++i) piece[i] = static_cast<uint32_t>(whole[i] >> (bits * j)) & mask;
    store_cells(w.row32(in.list[j]), piece, lanes);
  }
}

void clock(Warp& w, const Inst& in, uint32_t lanes) {
  uint64_t out[kLanes];
  std::fill_n(out, kLanes, w.block->executed + w.executed + 1);
  if (in.wide) return store_cells(w.row64(in.r[0]), out, lanes);
  uint32_t low[kLanes];
  for (int i = 0; i < kLanes; ++i) low[i] = static_cast<uint32_t>(out[i]);
  store_cells(w.row32(in.r[0]), low, lanes);
}

bool moves(Lowering& l) {
  const int bytes = type_bytes(l.type());
  l.run(move<uint32_t>, Kind::kInteger);
  if (l.arg(0).kind == Operand::kVector || l.arg(1).kind == Operand::kVector) {
    const bool splits = l.arg(0).kind == Operand::kVector;
    const auto& parts = l.arg(splits ? 0 : 1).parts;
    const int piece = bytes / static_cast<int>(parts.size());
    if (piece != 2 && piece != 4 && piece != 1) return false;
    for (const Operand& o : parts) l.out.list.push_back(splits ? l.target(o, piece) : l.value(o, piece));
    l.out.number = 8 * piece;
    l.out.wide = bytes == 8;
    if (splits) {
      l.out.r[1] = l.value(l.arg(1), bytes);
    } else {
      l.out.r[0] = l.target(l.arg(0), bytes);
    }
    l.run(splits ? split : join, Kind::kInteger);
    return true;
  }
  if (bytes == 0) {
    l.out.r[0] = l.truth_target(l.arg(0)), l.out.r[1] = l.truth(l.arg(1));
    l.run(move_predicate, Kind::kInteger);
    return true;
  }
  l.out.r[0] = l.target(l.arg(0), bytes);
  const std::string& name = l.arg(1).name;
  if (l.arg(1).kind == Operand::kName && (name.rfind("%clock", 0) == 0 || name.rfind("%globaltimer", 0) == 0)) {
    l.out.wide = bytes == 8;
    l.run(clock, Kind::kOther);
    return true;
  }
  l.out.r[1] = l.value(l.arg(1), bytes);
  l.run(bytes == 8 ? move<uint64_t> : move<uint32_t>, Kind::kInteger);
  return true;
}

}  // namespace

bool lower_move(Lowering& l) {
  const std::string& op = l.in.op[0];
  if (op == "mov") return moves(l);
  if (op == "cvta") {
    const bool to = l.op(1) == "to";
    const std::string& space = l.op(to ? 2 : 1);
    if (type_bytes(l.type()) != 8) return false;
    l.out.r[0] = l.target(l.arg(0), 8), l.out.r[1] = l.value(l.arg(1), 8);
    const bool windowed = space.rfind("shared", 0) == 0 || space == "local";
    if (!windowed) {
      l.run(move<uint64_t>, Kind::kInteger);
    } else if (to) {
      l.run(map1<uint64_t, uint64_t, DropWindow>, Kind::kInteger);
    } else {
      Operand window;
      window.kind = Operand::kImmediate, window.bits = space == "local" ? kLocalWindow : kSharedWindow;
      l.out.r[2] = l.value(window, 8);
      l.run(map2<uint64_t, uint64_t, uint64_t, AddWindow<uint64_t>>, Kind::kInteger);
    }
    return true;
  }
  if (op == "mapa") {
    const int bytes = type_bytes(l.type());
    l.out.r[0] = l.target(l.arg(0), bytes), l.out.r[1] = l.value(l.arg(1), bytes), l.out.r[2] = l.value(l.arg(2), 4);
    l.run(bytes == 8 ? map2<uint64_t, uint64_t, uint32_t, Mapa64> : map2<uint32_t, uint32_t, uint32_t, Mapa>,
          Kind::kInteger);
    return true;
  }
  return false;
}

}  // namespace emulator
