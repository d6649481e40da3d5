// ldmatrix, stmatrix, movmatrix and mma.sync. In fragments, lane = 4 * group + part.
#include <algorithm>

#include "decode.h"
#include "lanes.h"
#include "memory.h"
#include "small_floats.h"

namespace emulator {
namespace {

void whole_warp(Warp& w, const Inst& in, uint32_t lanes) {
  if (lanes != kAllLanes) fault(w, in, "not all lanes of the warp take part");
}

// 8x8 matrices of 16-bit values: lane holds row lane / 4, columns 2 * (lane % 4) and the next. list: registers.
template <bool Store>
void matrices(Warp& w, const Inst& in, uint32_t lanes) {
  if (!gather(w, in, kAllLanes)) return;
  whole_warp(w, in, lanes);
  uint64_t addresses[kLanes];
  lane_addresses(w, in, in.r[4], addresses);
  const int count = static_cast<int>(in.list.size());
  if (machine.statistics) {
    for (int m = 0; m < count; ++m) count_shared(in, addresses, 0xffu << (8 * m), 16);
    machine.counters.shared_accesses -= count - 1;
  }
  for (int m = 0; m < count; ++m) {
    uint32_t* cell = w.row32(in.list[m]);
    for (int row = 0; row < 8; ++row) {
      uint16_t* at =
          reinterpret_cast<uint16_t*>(shared_address(w, in, static_cast<uint32_t>(addresses[8 * m + row]), 16, Store));
      for (int col = 0; col < 8; ++col) {
        const int lane = in.count ? 4 * col + row / 2 : 4 * row + col / 2, half = in.count ? row % 2 : col % 2;
        if (Store) {
          at[col] = static_cast<uint16_t>(cell[lane] >> (16 * half));
        } else {
          cell[lane] = half ? (cell[lane] & 0xffff) | uint32_t{at[col]} << 16 : (cell[lane] & 0xffff0000) | at[col];
        }
      }
    }
  }
}

void transpose(Warp& w, const Inst& in, uint32_t lanes) {
  if (!gather(w, in, kAllLanes)) return;
  whole_warp(w, in, lanes);
  const uint32_t* a = w.row32(in.r[1]);
  uint32_t out[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int row = i / 4, col = 2 * (i % 4);
    auto element = [&](int r, int c) { return a[4 * r + c / 2] >> (16 * (c % 2)) & 0xffff; };
    out[i] = element(col, row) | element(col + 1, row) << 16;
  }
  store_cells(w.row32(in.r[0]), out, lanes);
}

enum Format { kF16, kBf16, kTf32, kE4m3, kE5m2, kS8, kU8 };

template <Format F>
inline float element(uint32_t bits) {
  if (F == kF16) return from_half(static_cast<uint16_t>(bits));
  if (F == kBf16) return from_bfloat16(static_cast<uint16_t>(bits));
  if (F == kTf32) return to_tf32(bits_float(bits));
  if (F == kE4m3) return from_e4m3(static_cast<uint8_t>(bits));
  if (F == kE5m2) return from_e5m2(static_cast<uint8_t>(bits));
  if (F == kS8) return static_cast<int8_t>(bits);
  return static_cast<uint8_t>(bits);
}
constexpr int bits_of(Format f) { return f == kTf32 ? 32 : f == kF16 || f == kBf16 ? 16 : 8; }

// Spreads A's registers over 16 rows and K columns, and B's over K rows and 8 columns. A register holds as many
// neighbours along K as fit; registers alternate between the rows' halves first, then go along K.
template <Format F, int K>
void open_a(const Warp& w, const Ref* regs, float (*a)[K]) {
  constexpr int per = 32 / bits_of(F), count = K / per / 2;
  for (int r = 0; r < count; ++r) {
    const uint32_t* cell = w.row32(regs[r]);
    for (int i = 0; i < kLanes; ++i) {
      const int row = i / 4 + 8 * (r % 2), col = per * (i % 4) + 4 * per * (r / 2);
      for (int j = 0; j < per; ++j) a[row][col + j] = element<F>(cell[i] >> (bits_of(F) * j));
    }
  }
}
template <Format F, int K>
void open_b(const Warp& w, const Ref* regs, float (*b)[8]) {
  constexpr int per = 32 / bits_of(F), count = K / per / 4;
  for (int r = 0; r < count; ++r) {
    const uint32_t* cell = w.row32(regs[r]);
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < per; ++j) b[per * (i % 4) + 4 * per * r + j][i / 4] = element<F>(cell[i] >> (bits_of(F) * j));
    }
  }
}

// list: A, B and C; more: D. HalfSums: C and D are pairs of float16.
template <Format FA, Format FB, int K, bool HalfSums, bool IntegerSums>
void multiply(Warp& w, const Inst& in, uint32_t lanes) {
  if (!gather(w, in, kAllLanes)) return;
  whole_warp(w, in, lanes);
  constexpr int a_regs = K * bits_of(FA) / 64, b_regs = K * bits_of(FB) / 128;
  alignas(64) float a[16][K], b[K][8], sum[16][8];
  alignas(64) int32_t whole[16][8];
  open_a<FA, K>(w, in.list.data(), a);
  open_b<FB, K>(w, in.list.data() + a_regs, b);
  const Ref* c = in.list.data() + a_regs + b_regs;
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int row = i / 4 + 8 * (j / 2), col = 2 * (i % 4) + j % 2;
      if (IntegerSums) {
        whole[row][col] = static_cast<int32_t>(w.row32(c[j])[i]);
        sum[row][col] = 0;
      } else {
        sum[row][col] = HalfSums ? from_half(static_cast<uint16_t>(w.row32(c[j / 2])[i] >> (16 * (j % 2))))
                                 : bits_float(w.row32(c[j])[i]);
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int col = 0; col < 8; ++col) sum[row][col] += a[row][k] * b[k][col];
    }
  }
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int row = i / 4 + 8 * (j / 2), col = 2 * (i % 4) + j % 2;
      if (IntegerSums) {
        w.row32(in.more[j])[i] =
            static_cast<uint32_t>(whole[row][col]) + static_cast<uint32_t>(static_cast<int32_t>(sum[row][col]));
      } else if (HalfSums) {
        uint32_t& cell = w.row32(in.more[j / 2])[i];
        const uint32_t h = to_half(sum[row][col]);
        cell = j % 2 ? (cell & 0xffff) | h << 16 : (cell & 0xffff0000) | h;
      } else {
        w.row32(in.more[j])[i] = float_bits(sum[row][col]);
      }
    }
  }
  machine.counters.tensor_flops += 2.0 * 16 * 8 * K;
}

// number: M; count: K.
void multiply_double(Warp& w, const Inst& in, uint32_t lanes) {
  if (!gather(w, in, kAllLanes)) return;
  whole_warp(w, in, lanes);
  const int halves = static_cast<int>(in.number) / 8, ks = in.count;
  double a[16][16], b[16][8], sum[16][8];
  auto cell = [&](size_t r, int i) {
    double x;
    std::memcpy(&x, &w.row64(in.list[r])[i], 8);
    return x;
  };
  size_t r = 0;
  for (int k = 0; k < ks; k += 4) {
    for (int h = 0; h < halves; ++h, ++r) {
      for (int i = 0; i < kLanes; ++i) a[i / 4 + 8 * h][k + i % 4] = cell(r, i);
    }
  }
  for (int k = 0; k < ks; k += 4, ++r) {
    for (int i = 0; i < kLanes; ++i) b[k + i % 4][i / 4] = cell(r, i);
  }
  for (int j = 0; j < 2 * halves; ++j, ++r) {
    for (int i = 0; i < kLanes; ++i) sum[i / 4 + 8 * (j / 2)][2 * (i % 4) + j % 2] = cell(r, i);
  }
  for (int row = 0; row < 8 * halves; ++row) {
    for (int col = 0; col < 8; ++col) {
      for (int k = 0; k < ks; ++k) sum[row][col] = __builtin_fma(a[row][k], b[k][col], sum[row][col]);
    }
  }
  for (int j = 0; j < 2 * halves; ++j) {
    for (int i = 0; i < kLanes; ++i)
      std::memcpy(&w.row64(in.more[j])[i], &sum[i / 4 + 8 * (j / 2)][2 * (i % 4) + j % 2], 8);
  }
  machine.counters.tensor_flops += 2.0 * in.number * 8 * ks;
}

template <Format F, int K>
Handler floats(bool half_sums) {
  return half_sums ? multiply<F, F, K, true, false> : multiply<F, F, K, false, false>;
}

Handler pick(const std::string& shape, const std::string& a, const std::string& b, const std::string& sums) {
  const bool half = sums == "f16";
  if (sums == "s32") {
    const bool sa = a == "s8", sb = b == "s8";
    if ((!sa && a != "u8") || (!sb && b != "u8")) return nullptr;
    if (shape == "m16n8k32") {
      return sa   ? sb ? multiply<kS8, kS8, 32, false, true> : multiply<kS8, kU8, 32, false, true>
             : sb ? multiply<kU8, kS8, 32, false, true>
                  : multiply<kU8, kU8, 32, false, true>;
    }
    if (shape == "m16n8k16") {
      return sa   ? sb ? multiply<kS8, kS8, 16, false, true> : multiply<kS8, kU8, 16, false, true>
             : sb ? multiply<kU8, kS8, 16, false, true>
                  : multiply<kU8, kU8, 16, false, true>;
    }
    return nullptr;
  }
  if (a != b) return nullptr;
  if (a == "f16")
    return shape == "m16n8k16" ? floats<kF16, 16>(half) : shape == "m16n8k8" ? floats<kF16, 8>(half) : nullptr;
  if (half && a[0] != 'e') return nullptr;
  if (a == "bf16")
    return shape == "m16n8k16" ? floats<kBf16, 16>(false) : shape == "m16n8k8" ? floats<kBf16, 8>(false) : nullptr;
  if (a == "tf32") return shape == "m16n8k8" ? floats<kTf32, 8>(false) : nullptr;
  if (a == "e4m3" && shape == "m16n8k32") return floats<kE4m3, 32>(half);
  if (a == "e5m2" && shape == "m16n8k32") return floats<kE5m2, 32>(half);
  return nullptr;
}

bool lower_mma(Lowering& l) {
  // mma.sync.aligned.SHAPE.row.col[.satfinite].D.A.B.C
  const size_t n = l.in.op.size();
  if (n < 10 || l.op(4) != "row" || l.op(5) != "col" || l.has("xor")) return false;
  const std::string &shape = l.op(3), &d = l.op(n - 4), &a = l.op(n - 3), &b = l.op(n - 2), &c = l.op(n - 1);
  if (d != c) return false;
  const int bytes = d == "f64" ? 8 : 4;
  for (int i = 1; i < 4; ++i) {
    const Operand& o = l.arg(i);
    if (o.kind == Operand::kVector) {
      for (const Operand& part : o.parts) l.out.list.push_back(l.value(part, bytes));
    } else {
      l.out.list.push_back(l.value(o, bytes));
    }
  }
  if (l.arg(0).kind != Operand::kVector) return false;
  for (const Operand& part : l.arg(0).parts) l.out.more.push_back(l.target(part, bytes));
  if (d == "f64") {
    l.out.number = shape[1] == '8' ? 8 : 16;
    l.out.count = static_cast<uint8_t>(std::stoi(shape.substr(shape.find('k') + 1)));
    if (shape != "m8n8k4" && shape.rfind("m16n8k", 0) != 0) return false;
    l.run(multiply_double, Kind::kTensor);
    return true;
  }
  const Handler h = pick(shape, a, b, d);
  if (h) l.run(h, Kind::kTensor);
  return h != nullptr;
}

}  // namespace

bool lower_matrix(Lowering& l) {
  const std::string& op = l.in.op[0];
  if (op == "mma") return lower_mma(l);
  if (op == "movmatrix") {
    l.out.r[0] = l.target(l.arg(0), 4), l.out.r[1] = l.value(l.arg(1), 4);
    l.run(transpose, Kind::kShuffle);
    return l.has("m8n8") && l.has("trans") && l.type() == "b16";
  }
  if (op != "ldmatrix" && op != "stmatrix") return false;
  if (!l.has("m8n8") || l.type() != "b16") return false;
  const bool store = op == "stmatrix";
  const Operand& registers = l.arg(store ? 1 : 0);
  l.address(l.arg(store ? 0 : 1), 4);
  l.out.count = l.has("trans");
  auto add = [&](const Operand& o) { l.out.list.push_back(store ? l.value(o, 4) : l.target(o, 4)); };
  if (registers.kind == Operand::kVector) {
    for (const Operand& o : registers.parts) add(o);
  } else {
    add(registers);
  }
  l.run(store ? matrices<true> : matrices<false>, store ? Kind::kSharedStore : Kind::kSharedLoad);
  return true;
}

}  // namespace emulator
