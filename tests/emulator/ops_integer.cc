// Integer and bit instructions.
#include <algorithm>

#include "decode.h"
#include "lanes.h"

namespace emulator {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
struct WiderOf;
template <>
struct WiderOf<int16_t> {
  using type = int32_t;
};
template <>
struct WiderOf<uint16_t> {
  using type = uint32_t;
};
template <>
struct WiderOf<int32_t> {
  using type = int64_t;
};
template <>
struct WiderOf<uint32_t> {
  using type = uint64_t;
};
template <>
struct WiderOf<int64_t> {
  using type = __int128;
};
template <>
struct WiderOf<uint64_t> {
  using type = unsigned __int128;
};
template <class T>
using Wider = typename WiderOf<T>::type;

template <class T>
struct Add {
  T operator()(T a, T b) const { return static_cast<T>(Unsigned<T>(a) + Unsigned<T>(b)); }
};
template <class T>
struct Sub {
  T operator()(T a, T b) const { return static_cast<T>(Unsigned<T>(a) - Unsigned<T>(b)); }
};
template <class T>
struct MulLow {
  T operator()(T a, T b) const { return static_cast<T>(uint64_t(Unsigned<T>(a)) * uint64_t(Unsigned<T>(b))); }
};
template <class T>
struct MulHigh {
  T operator()(T a, T b) const { return static_cast<T>((Wider<T>(a) * Wider<T>(b)) >> (8 * sizeof(T))); }
};
template <class T>
struct MulWide {
  Wider<T> operator()(T a, T b) const { return Wider<T>(a) * Wider<T>(b); }
};
template <class T>
struct MadLow {
  T operator()(T a, T b, T c) const { return Add<T>()(MulLow<T>()(a, b), c); }
};
template <class T>
struct MadHigh {
  T operator()(T a, T b, T c) const { return Add<T>()(MulHigh<T>()(a, b), c); }
};
template <class T>
struct MadWide {
  Wider<T> operator()(T a, T b, Wider<T> c) const { return Add<Wider<T>>()(MulWide<T>()(a, b), c); }
};
template <class T>
struct Div {  // lanes that do not run may hold a 0
  T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(Unsigned<T>(0) - Unsigned<T>(a));
    return static_cast<T>(a / b);
  }
};
template <class T>
struct Rem {
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
template <class T>
struct Min {
  T operator()(T a, T b) const { return std::min(a, b); }
};
template <class T>
struct Max {
  T operator()(T a, T b) const { return std::max(a, b); }
};
template <class T>
struct Abs {
  T operator()(T a) const { return a < 0 ? static_cast<T>(Unsigned<T>(0) - Unsigned<T>(a)) : a; }
};
template <class T>
struct Neg {
  T operator()(T a) const { return static_cast<T>(Unsigned<T>(0) - Unsigned<T>(a)); }
};
template <class T>
struct Not {
  T operator()(T a) const { return static_cast<T>(~a); }
};
template <class T>
struct Logical {
  T operator()(T a) const { return a == 0; }
};
template <class T>
struct And {
  T operator()(T a, T b) const { return a & b; }
};
template <class T>
struct Or {
  T operator()(T a, T b) const { return a | b; }
};
template <class T>
struct Xor {
  T operator()(T a, T b) const { return a ^ b; }
};
template <class T>
struct Shl {
  T operator()(T a, uint32_t n) const { return n >= 8 * sizeof(T) ? 0 : static_cast<T>(Unsigned<T>(a) << n); }
};
template <class T>
struct Shr {
  T operator()(T a, uint32_t n) const {
    if (n >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : 0;
    return static_cast<T>(a >> n);
  }
};
struct Popc32 {
  uint32_t operator()(uint32_t a) const { return __builtin_popcount(a); }
};
struct Popc64 {
  uint32_t operator()(uint64_t a) const { return __builtin_popcountll(a); }
};
struct Clz32 {
  uint32_t operator()(uint32_t a) const { return a ? __builtin_clz(a) : 32; }
};
struct Clz64 {
  uint32_t operator()(uint64_t a) const { return a ? __builtin_clzll(a) : 64; }
};
template <class T>
struct Brev {
  T operator()(T a) const {
    T out = 0;
    for (size_t i = 0; i < 8 * sizeof(T); ++i) out = (out << 1) | (a >> i & 1);
    return out;
  }
};
template <class T, bool Shift>
struct Bfind {
  uint32_t operator()(T a) const {
    Unsigned<T> u = static_cast<Unsigned<T>>(a < 0 ? ~a : a);
    if (u == 0) return ~0u;
    const uint32_t top = 63 - __builtin_clzll(u);
    return Shift ? 8 * sizeof(T) - 1 - top : top;
  }
};
template <class T>
struct Bfe {
  T operator()(T a, uint32_t pos, uint32_t len) const {
    pos &= 255, len &= 255;
    constexpr uint32_t bits = 8 * sizeof(T);
    if (len == 0) return 0;
    const bool sign = std::is_signed_v<T> && (a >> std::min(pos + len - 1, bits - 1) & 1);
    Unsigned<T> out = pos >= bits ? 0 : Unsigned<T>(a) >> pos;
    if (len < bits) out &= (Unsigned<T>(1) << len) - 1;
    if (sign && len < bits) out |= ~((Unsigned<T>(1) << std::min(len, pos >= bits ? 0 : bits - pos)) - 1);
    return static_cast<T>(out);
  }
};
struct Prmt {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    const uint64_t both = uint64_t{b} << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t pick = c >> (4 * i) & 15;
      uint32_t byte = both >> (8 * (pick & 7)) & 255;
      if (pick & 8) byte = byte & 128 ? 255 : 0;
      out |= byte << (8 * i);
    }
    return out;
  }
};
template <bool Left, bool Wrap>
struct Shf {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t n) const {
    n = Wrap ? n & 31 : std::min(n, 32u);
    const uint64_t both = uint64_t{b} << 32 | a;
    return static_cast<uint32_t>(Left ? both << n >> 32 : both >> n);
  }
};
template <class A, class B>
struct Dp4a {
  int32_t operator()(uint32_t a, uint32_t b, int32_t c) const {
    for (int i = 0; i < 4; ++i) c += int32_t(A(a >> (8 * i))) * int32_t(B(b >> (8 * i)));
    return c;
  }
};
template <class T>
struct Sad {
  T operator()(T a, T b, T c) const { return static_cast<T>(c + (a > b ? a - b : b - a)); }
};

template <class T>
void bfi(Warp& w, const Inst& in, uint32_t lanes) {
  const Cell<T>*a = cells<T>(w, in.r[1]), *b = cells<T>(w, in.r[2]);
  const uint32_t *pos = w.row32(in.r[3]), *len = w.row32(in.r[4]);
  Cell<T> out[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t p = pos[i] & 255, n = len[i] & 255;
    T mask = n >= 8 * sizeof(T) ? ~T(0) : (T(1) << n) - 1;
    mask = p >= 8 * sizeof(T) ? 0 : mask << p;
    out[i] = (b[i] & ~mask) | ((p >= 8 * sizeof(T) ? 0 : T(a[i]) << p) & mask);
  }
  store_cells(cells<T>(w, in.r[0]), out, lanes);
}

void lop3(Warp& w, const Inst& in, uint32_t lanes) {
  const uint32_t *a = w.row32(in.r[1]), *b = w.row32(in.r[2]), *c = w.row32(in.r[3]);
  const uint32_t table = in.shared_constant;
  uint32_t out[kLanes] = {};
  for (int bit = 0; bit < 8; ++bit) {
    if (!(table >> bit & 1)) continue;
    const uint32_t fa = bit & 4 ? 0 : ~0u, fb = bit & 2 ? 0 : ~0u, fc = bit & 1 ? 0 : ~0u;
    for (int i = 0; i < kLanes; ++i) out[i] |= (a[i] ^ fa) & (b[i] ^ fb) & (c[i] ^ fc);
  }
  store_cells(w.row32(in.r[0]), out, lanes);
}

void predicate_logic(Warp& w, const Inst& in, uint32_t lanes) {
  const uint32_t a = predicate(w, in.r[1]), b = in.count > 1 ? predicate(w, in.r[2]) : 0;
  const uint32_t out = in.number == 'a' ? a & b : in.number == 'o' ? a | b : in.number == 'x' ? a ^ b : ~a;
  set_predicate(w, in.r[0], out, lanes);
}

// Target and sources, all as wide as the type unless said otherwise.
void operands(Lowering& l, int target, std::initializer_list<int> sources) {
  l.out.r[0] = l.target(l.arg(0), target);
  int i = 1;
  for (int bytes : sources) l.out.r[i] = l.value(l.arg(i), bytes), ++i;
}

template <class T>
Handler pick(const std::string& op, bool high) {
  if (op == "add") return map2<T, T, T, Add<T>>;
  if (op == "sub") return map2<T, T, T, Sub<T>>;
  if (op == "mul") return high ? map2<T, T, T, MulHigh<T>> : map2<T, T, T, MulLow<T>>;
  if (op == "div") return map2<T, T, T, Div<T>>;
  if (op == "rem") return map2<T, T, T, Rem<T>>;
  if (op == "min") return map2<T, T, T, Min<T>>;
  if (op == "max") return map2<T, T, T, Max<T>>;
  if (op == "and") return map2<T, T, T, And<T>>;
  if (op == "or") return map2<T, T, T, Or<T>>;
  if (op == "xor") return map2<T, T, T, Xor<T>>;
  if (op == "shl") return map2<T, T, uint32_t, Shl<T>>;
  if (op == "shr") return map2<T, T, uint32_t, Shr<T>>;
  if (op == "mad") return high ? map3<T, T, T, T, MadHigh<T>> : map3<T, T, T, T, MadLow<T>>;
  if (op == "sad") return map3<T, T, T, T, Sad<T>>;
  if (op == "not") return map1<T, T, Not<T>>;
  if (op == "neg") return map1<T, T, Neg<T>>;
  if (op == "abs") return map1<T, T, Abs<T>>;
  if (op == "cnot") return map1<T, T, Logical<T>>;
  return nullptr;
}

template <class T>
bool arithmetic(Lowering& l) {
  const std::string& op = l.in.op[0];
  constexpr int bytes = sizeof(T);
  if (l.has("wide")) {
    if constexpr (sizeof(T) < 8) {
      using W = Wider<T>;
      if (op == "mul") {
        operands(l, 2 * bytes, {bytes, bytes});
        l.run(map2<W, T, T, MulWide<T>>, Kind::kInteger);
      } else if (op == "mad") {
        operands(l, 2 * bytes, {bytes, bytes, 2 * bytes});
        l.run(map3<W, T, T, W, MadWide<T>>, Kind::kInteger);
      }
    }
    return l.out.run != nullptr;
  }
  if (l.has("cc") || l.has("sat") || (l.has("hi") && bytes == 2)) return false;
  const Handler handler = pick<T>(op, l.has("hi"));
  if (!handler) return false;
  if (op == "shl" || op == "shr") {
    operands(l, bytes, {bytes, 4});
  } else if (l.size() == 2) {
    operands(l, bytes, {bytes});
  } else if (l.size() == 3) {
    operands(l, bytes, {bytes, bytes});
  } else {
    operands(l, bytes, {bytes, bytes, bytes});
  }
  l.run(handler, Kind::kInteger);
  return true;
}

bool bits(Lowering& l) {
  const std::string &op = l.in.op[0], &type = l.type();
  const bool wide = type_bytes(type) == 8;
  const int bytes = wide ? 8 : 4;
  Handler h = nullptr;
  if (op == "popc" || op == "clz" || op == "bfind") {
    operands(l, 4, {bytes});
    const bool shift = l.has("shiftamt");
    if (op == "popc") h = wide ? Handler(map1<uint32_t, uint64_t, Popc64>) : map1<uint32_t, uint32_t, Popc32>;
    if (op == "clz") h = wide ? Handler(map1<uint32_t, uint64_t, Clz64>) : map1<uint32_t, uint32_t, Clz32>;
    if (op == "bfind" && type == "u32") {
      h = shift ? map1<uint32_t, uint32_t, Bfind<uint32_t, true>> : map1<uint32_t, uint32_t, Bfind<uint32_t, false>>;
    }
    if (op == "bfind" && type == "s32") {
      h = shift ? map1<uint32_t, int32_t, Bfind<int32_t, true>> : map1<uint32_t, int32_t, Bfind<int32_t, false>>;
    }
  } else if (op == "brev") {
    operands(l, bytes, {bytes});
    h = wide ? Handler(map1<uint64_t, uint64_t, Brev<uint64_t>>) : map1<uint32_t, uint32_t, Brev<uint32_t>>;
  } else if (op == "bfe") {
    operands(l, bytes, {bytes, 4, 4});
    if (type == "u32") h = map3<uint32_t, uint32_t, uint32_t, uint32_t, Bfe<uint32_t>>;
    if (type == "s32") h = map3<int32_t, int32_t, uint32_t, uint32_t, Bfe<int32_t>>;
    if (type == "u64") h = map3<uint64_t, uint64_t, uint32_t, uint32_t, Bfe<uint64_t>>;
    if (type == "s64") h = map3<int64_t, int64_t, uint32_t, uint32_t, Bfe<int64_t>>;
  } else if (op == "bfi") {
    operands(l, bytes, {bytes, bytes, 4, 4});
    h = wide ? bfi<uint64_t> : bfi<uint32_t>;
  } else if (op == "prmt" && l.in.op.size() == 2) {
    operands(l, 4, {4, 4, 4});
    h = map3<uint32_t, uint32_t, uint32_t, uint32_t, Prmt>;
  } else if (op == "lop3" && l.size() == 5) {
    operands(l, 4, {4, 4, 4});
    l.out.shared_constant = static_cast<uint32_t>(l.arg(4).bits);
    h = lop3;
  } else if (op == "shf") {
    operands(l, 4, {4, 4, 4});
    const bool left = l.op(1) == "l", wrap = l.op(2) == "wrap";
    h = left   ? wrap ? map3<uint32_t, uint32_t, uint32_t, uint32_t, Shf<true, true>>
                      : map3<uint32_t, uint32_t, uint32_t, uint32_t, Shf<true, false>>
        : wrap ? map3<uint32_t, uint32_t, uint32_t, uint32_t, Shf<false, true>>
               : map3<uint32_t, uint32_t, uint32_t, uint32_t, Shf<false, false>>;
  } else if (op == "dp4a") {
    operands(l, 4, {4, 4, 4});
    const bool a = l.op(1) == "s32", b = l.op(2) == "s32";
    h = a   ? b ? map3<int32_t, uint32_t, uint32_t, int32_t, Dp4a<int8_t, int8_t>>
                : map3<int32_t, uint32_t, uint32_t, int32_t, Dp4a<int8_t, uint8_t>>
        : b ? map3<int32_t, uint32_t, uint32_t, int32_t, Dp4a<uint8_t, int8_t>>
            : map3<int32_t, uint32_t, uint32_t, int32_t, Dp4a<uint8_t, uint8_t>>;
  }
  if (h) l.run(h, Kind::kInteger);
  return h != nullptr;
}

}  // namespace

bool lower_integer(Lowering& l) {
  const std::string &op = l.in.op[0], &type = l.type();
  if (type == "pred" && (op == "and" || op == "or" || op == "xor" || op == "not")) {
    l.out.r[0] = l.truth_target(l.arg(0));
    l.out.r[1] = l.truth(l.arg(1));
    if (op != "not") l.out.r[2] = l.truth(l.arg(2));
    l.out.count = op == "not" ? 1 : 2;
    l.out.number = op[0];
    l.run(predicate_logic, Kind::kInteger);
    return true;
  }
  if (bits(l)) return true;
  if (type == "s32") return arithmetic<int32_t>(l);
  if (type == "u32" || type == "b32") return arithmetic<uint32_t>(l);
  if (type == "s64") return arithmetic<int64_t>(l);
  if (type == "u64" || type == "b64") return arithmetic<uint64_t>(l);
  if (type == "s16") return arithmetic<int16_t>(l);
  if (type == "u16" || type == "b16") return arithmetic<uint16_t>(l);
  return false;
}

}  // namespace emulator
