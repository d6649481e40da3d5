// setp, set, selp, slct, testp.
#include <cmath>

#include "decode.h"
#include "lanes.h"
#include "small_floats.h"

namespace emulator {
namespace {

enum Order { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

template <class T, Order O>
inline bool compare(T a, T b) {
  const bool nan = a != a || b != b;
  switch (O) {
    case kEq:
      return a == b;
    case kNe:
      return a != b && !nan;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    case kEqu:
      return nan || a == b;
    case kNeu:
      return nan || a != b;
    case kLtu:
      return nan || a < b;
    case kLeu:
      return nan || a <= b;
    case kGtu:
      return nan || a > b;
    case kGeu:
      return nan || a >= b;
    case kNum:
      return !nan;
    case kNan:
      return nan;
  }
  return false;
}

struct HalfCell {
  uint16_t bits;
  static float open(HalfCell h) { return from_half(h.bits); }
};
struct BfloatCell {
  uint16_t bits;
  static float open(BfloatCell h) { return from_bfloat16(h.bits); }
};
template <class T>
inline T open(T x) {
  return x;
}
inline float open(HalfCell x) { return HalfCell::open(x); }
inline float open(BfloatCell x) { return BfloatCell::open(x); }

template <class T, Order O>
uint32_t comparison(Warp& w, const Inst& in) {
  const Cell<T>*a = cells<T>(w, in.r[2]), *b = cells<T>(w, in.r[3]);
  alignas(64) int32_t flags[kLanes];
  for (int i = 0; i < kLanes; ++i)
    flags[i] = compare<decltype(open(T())), O>(open(from_cell<T>(a[i])), open(from_cell<T>(b[i])));
  return to_mask(flags);
}

// count: 0 alone, else 'a', 'o' or 'x' with the predicate r[4].
template <class T, Order O>
void setp(Warp& w, const Inst& in, uint32_t lanes) {
  const uint32_t c = comparison<T, O>(w, in);
  auto joined = [&](uint32_t x) {
    if (!in.count) return x;
    const uint32_t p = predicate(w, in.r[4]);
    return in.count == 'a' ? x & p : in.count == 'o' ? x | p : x ^ p;
  };
  const uint32_t first = joined(c), second = joined(~c);
  set_predicate(w, in.r[0], first, lanes);
  if (in.writes_second) set_predicate(w, in.r[1], second, lanes);
}

template <class T, Order O>
void set_word(Warp& w, const Inst& in, uint32_t lanes) {  // set: all ones or 1.0
  const uint32_t c = comparison<T, O>(w, in);
  uint32_t out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = c >> i & 1 ? static_cast<uint32_t>(in.number) : 0;
  store_cells(w.row32(in.r[0]), out, lanes);
}

template <class T>
void selp(Warp& w, const Inst& in, uint32_t lanes) {
  const Cell<T>*a = cells<T>(w, in.r[1]), *b = cells<T>(w, in.r[2]);
  const uint32_t p = predicate(w, in.r[3]);
  alignas(64) Cell<T> out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = p >> i & 1 ? a[i] : b[i];
  store_cells(cells<T>(w, in.r[0]), out, lanes);
}

struct Slct {
  uint32_t operator()(uint32_t a, uint32_t b, int32_t c) const { return c >= 0 ? a : b; }
};

void select_predicate(Warp& w, const Inst& in, uint32_t lanes) {
  const uint32_t a = predicate(w, in.r[1]), b = predicate(w, in.r[2]), p = predicate(w, in.r[3]);
  set_predicate(w, in.r[0], (a & p) | (b & ~p), lanes);
}

template <class T, template <class, Order> class Make>
Handler pick(const std::string& order) {
  if (order == "eq") return Make<T, kEq>::get();
  if (order == "ne") return Make<T, kNe>::get();
  if (order == "lt" || order == "lo") return Make<T, kLt>::get();
  if (order == "le" || order == "ls") return Make<T, kLe>::get();
  if (order == "gt" || order == "hi") return Make<T, kGt>::get();
  if (order == "ge" || order == "hs") return Make<T, kGe>::get();
  if constexpr (!std::is_integral_v<T>) {
    if (order == "equ") return Make<T, kEqu>::get();
    if (order == "neu") return Make<T, kNeu>::get();
    if (order == "ltu") return Make<T, kLtu>::get();
    if (order == "leu") return Make<T, kLeu>::get();
    if (order == "gtu") return Make<T, kGtu>::get();
    if (order == "geu") return Make<T, kGeu>::get();
    if (order == "num") return Make<T, kNum>::get();
    if (order == "nan") return Make<T, kNan>::get();
  }
  return nullptr;
}
template <class T, Order O>
struct MakeSetp {
  static Handler get() { return setp<T, O>; }
};
template <class T, Order O>
struct MakeSet {
  static Handler get() { return set_word<T, O>; }
};

template <template <class, Order> class Make>
Handler by_type(const std::string& type, const std::string& order) {
  if (type == "s32") return pick<int32_t, Make>(order);
  if (type == "u32" || type == "b32") return pick<uint32_t, Make>(order);
  if (type == "s64") return pick<int64_t, Make>(order);
  if (type == "u64" || type == "b64") return pick<uint64_t, Make>(order);
  if (type == "s16") return pick<int16_t, Make>(order);
  if (type == "u16" || type == "b16") return pick<uint16_t, Make>(order);
  if (type == "f32") return pick<float, Make>(order);
  if (type == "f64") return pick<double, Make>(order);
  if (type == "f16") return pick<HalfCell, Make>(order);
  if (type == "bf16") return pick<BfloatCell, Make>(order);
  return nullptr;
}

}  // namespace

bool lower_compare(Lowering& l) {
  const std::string &op = l.in.op[0], &type = l.type();
  const int bytes = type_bytes(type);
  if (op == "setp") {
    l.out.r[0] = l.truth_target(l.arg(0));
    if (l.arg(0).second >= 0) {
      Operand second = l.arg(0);
      second.reg = second.second;
      l.out.r[1] = l.truth_target(second);
      l.out.writes_second = true;
    }
    l.out.r[2] = l.value(l.arg(1), bytes), l.out.r[3] = l.value(l.arg(2), bytes);
    l.out.count = 0;
    if (l.size() == 4) {
      l.out.count = static_cast<uint8_t>(l.op(2)[0]);
      l.out.r[4] = l.truth(l.arg(3));
    }
    const Handler h = by_type<MakeSetp>(type, l.op(1));
    if (!h) return false;
    l.run(h, type == "f64" ? Kind::kDouble : type[0] == 'f' || type == "bf16" ? Kind::kFloat : Kind::kInteger);
    return true;
  }
  if (op == "set" && l.size() == 3) {
    l.out.r[0] = l.target(l.arg(0), 4);
    l.out.r[2] = l.value(l.arg(1), bytes), l.out.r[3] = l.value(l.arg(2), bytes);
    const std::string& to = l.in.op[l.in.op.size() - 2];
    l.out.number = to == "f32" ? 0x3f800000 : 0xffffffff;
    const Handler h = type_bytes(to) == 4 ? by_type<MakeSet>(type, l.op(1)) : nullptr;
    if (h) l.run(h, Kind::kInteger);
    return h != nullptr;
  }
  if (op == "selp" && bytes == 0) {
    l.out.r[0] = l.truth_target(l.arg(0));
    for (int i = 1; i < 4; ++i) l.out.r[i] = l.truth(l.arg(i));
    l.run(select_predicate, Kind::kInteger);
    return true;
  }
  if (op == "selp") {
    l.out.r[0] = l.target(l.arg(0), bytes);
    l.out.r[1] = l.value(l.arg(1), bytes), l.out.r[2] = l.value(l.arg(2), bytes);
    l.out.r[3] = l.truth(l.arg(3));
    l.run(bytes == 8 ? selp<uint64_t> : selp<uint32_t>, type == "f32" ? Kind::kFloat : Kind::kInteger);
    return true;
  }
  if (op == "slct" && type == "s32" && bytes == 4 && type_bytes(l.op(1)) == 4) {
    l.out.r[0] = l.target(l.arg(0), 4);
    for (int i = 1; i < 4; ++i) l.out.r[i] = l.value(l.arg(i), 4);
    l.run(map3<uint32_t, uint32_t, uint32_t, int32_t, Slct>, Kind::kInteger);
    return true;
  }
  return false;
}

}  // namespace emulator
