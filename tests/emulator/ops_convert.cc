// cvt: between integers, floats and the narrow formats.
#include <cmath>
#include <limits>

#include "decode.h"
#include "lanes.h"
#include "small_floats.h"

namespace emulator {
namespace {

// The formats as types, each with the value that arithmetic has.
struct F16 {
  using Cells = uint16_t;
  static float open(uint16_t x) { return from_half(x); }
  static uint16_t close(float x) { return to_half(x); }
};
struct Bf16 {
  using Cells = uint16_t;
  static float open(uint16_t x) { return from_bfloat16(x); }
  static uint16_t close(float x) { return to_bfloat16(x); }
};
struct Bf16Zero {
  using Cells = uint16_t;
  static uint16_t close(float x) { return to_bfloat16_zero(x); }
};
struct F32 {
  using Cells = float;
  static float open(float x) { return x; }
  static float close(double x) { return static_cast<float>(x); }
  static float close(float x) { return x; }
};
struct F64 {
  using Cells = double;
  static double open(double x) { return x; }
  static double close(double x) { return x; }
};

struct Nearest {
  template <class T>
  T operator()(T x) const {
    return std::nearbyint(x);
  }
};
struct Down {
  template <class T>
  T operator()(T x) const {
    return std::floor(x);
  }
};
struct Up {
  template <class T>
  T operator()(T x) const {
    return std::ceil(x);
  }
};
struct Zero {
  template <class T>
  T operator()(T x) const {
    return std::trunc(x);
  }
};
struct Keep {
  template <class T>
  T operator()(T x) const {
    return x;
  }
};

template <class D, class S, class Round, bool Saturate>
struct FloatToFloat {
  typename D::Cells operator()(typename S::Cells x) const {
    auto value = Round()(S::open(x));
    if (Saturate) value = value > 0 ? value < 1 ? value : decltype(value)(1) : decltype(value)(0);
    return D::close(value);
  }
};
template <class D, class S, class Round>
struct FloatToInt {
  D operator()(typename S::Cells x) const {
    const double value = Round()(static_cast<double>(S::open(x)));
    if (value != value) return 0;
    if (value <= static_cast<double>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
    if (value >= static_cast<double>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
    return static_cast<D>(value);
  }
};
template <class D, class S>
struct IntToFloat {  // a conversion of 64 bits to a half would round twice: too large in any case
  typename D::Cells operator()(S x) const {
    if constexpr (std::is_same_v<D, F64>)
      return static_cast<double>(x);
    else
      return D::close(static_cast<float>(x));
  }
};
template <class D, class S, bool Saturate>
struct IntToInt {
  D operator()(S x) const {
    if (Saturate) {
      const __int128 value = x, low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
      return static_cast<D>(value < low ? low : value > high ? high : value);
    }
    return static_cast<D>(x);
  }
};

// From a register that is wider than the type.
template <class F, class D, class S>
struct Narrowed {
  D operator()(uint64_t x) const { return F()(static_cast<S>(x)); }
};
template <class D, class S, class F>
Handler from_integer(bool wide) {
  if constexpr (sizeof(S) < 8) {
    if (wide) return map1<D, uint64_t, Narrowed<F, D, S>>;
  }
  return map1<D, S, F>;
}

template <class T>
struct Tag {
  using type = T;
};
template <class F>
bool with_int(const std::string& type, F f) {
  if (type == "s8") return f(Tag<int8_t>());
  if (type == "u8" || type == "b8") return f(Tag<uint8_t>());
  if (type == "s16") return f(Tag<int16_t>());
  if (type == "u16" || type == "b16") return f(Tag<uint16_t>());
  if (type == "s32") return f(Tag<int32_t>());
  if (type == "u32" || type == "b32") return f(Tag<uint32_t>());
  if (type == "s64") return f(Tag<int64_t>());
  if (type == "u64" || type == "b64") return f(Tag<uint64_t>());
  return false;
}
template <class F>
bool with_float(const std::string& type, F f) {
  if (type == "f16") return f(Tag<F16>());
  if (type == "bf16") return f(Tag<Bf16>());
  if (type == "f32") return f(Tag<F32>());
  if (type == "f64") return f(Tag<F64>());
  return false;
}

bool simple(Lowering& l, const std::string& to, const std::string& from, bool wide) {
  const bool saturate = l.has("sat");
  auto set = [&](Handler h) {
    l.run(h, Kind::kConvert);
    return true;
  };
  return with_int(to,
                  [&](auto d) {
                    using D = typename decltype(d)::type;
                    return with_int(from,
                                    [&](auto s) {
                                      using S = typename decltype(s)::type;
                                      return set(saturate ? from_integer<D, S, IntToInt<D, S, true>>(wide)
                                                          : from_integer<D, S, IntToInt<D, S, false>>(wide));
                                    }) ||
                           with_float(from, [&](auto s) {
                             using S = typename decltype(s)::type;
                             using C = typename S::Cells;
                             if (l.has("rni")) return set(map1<D, C, FloatToInt<D, S, Nearest>>);
                             if (l.has("rmi")) return set(map1<D, C, FloatToInt<D, S, Down>>);
                             if (l.has("rpi")) return set(map1<D, C, FloatToInt<D, S, Up>>);
                             return set(map1<D, C, FloatToInt<D, S, Zero>>);
                           });
                  }) ||
         with_float(to, [&](auto d) {
           using D = typename decltype(d)::type;
           using E = typename D::Cells;
           return with_int(from,
                           [&](auto s) {
                             using S = typename decltype(s)::type;
                             if (!l.has("rn") && !(sizeof(S) < 4)) return false;
                             return set(from_integer<E, S, IntToFloat<D, S>>(wide));
                           }) ||
                  with_float(from, [&](auto s) {
                    using S = typename decltype(s)::type;
                    using C = typename S::Cells;
                    if constexpr (std::is_same_v<D, Bf16> && std::is_same_v<S, F32>) {
                      if (l.has("rz")) return set(map1<uint16_t, float, FloatToFloat<Bf16Zero, F32, Keep, false>>);
                    }
                    if (l.has("rz") || l.has("rm") || l.has("rp") || l.has("relu")) return false;
                    if constexpr (std::is_same_v<S, F64> && !std::is_same_v<D, F64>) {
                      if constexpr (!std::is_same_v<D, F32>)
                        return false;  // would round twice
                      else
                        return set(saturate ? map1<E, C, FloatToFloat<D, S, Keep, true>>
                                            : map1<E, C, FloatToFloat<D, S, Keep, false>>);
                    } else {
                      if (l.has("rni")) return set(map1<E, C, FloatToFloat<D, S, Nearest, false>>);
                      if (l.has("rmi")) return set(map1<E, C, FloatToFloat<D, S, Down, false>>);
                      if (l.has("rpi")) return set(map1<E, C, FloatToFloat<D, S, Up, false>>);
                      if (l.has("rzi")) return set(map1<E, C, FloatToFloat<D, S, Zero, false>>);
                      return set(saturate ? map1<E, C, FloatToFloat<D, S, Keep, true>>
                                          : map1<E, C, FloatToFloat<D, S, Keep, false>>);
                    }
                  });
         });
}

template <bool R>
inline float rectify(float x) {
  return R && !(x > 0.0f) && x == x ? 0.0f : x;
}

// Two floats, the first into the upper half.
template <class D, bool Relu>
struct PackFloats {
  uint32_t operator()(float a, float b) const {
    return uint32_t{D::close(rectify<Relu>(a))} << 16 | D::close(rectify<Relu>(b));
  }
};
using Narrow8 = uint8_t (*)(float);
template <Narrow8 To>
struct PackBytes {
  uint16_t operator()(float a, float b) const { return static_cast<uint16_t>(To(a) << 8 | To(b)); }
};
template <Narrow8 To, class S>
struct PairToBytes {
  uint16_t operator()(uint32_t x) const {
    return static_cast<uint16_t>(To(S::open(static_cast<uint16_t>(x >> 16))) << 8 |
                                 To(S::open(static_cast<uint16_t>(x))));
  }
};
using Widen8 = float (*)(uint8_t);
template <Widen8 From>
struct BytesToHalves {
  uint32_t operator()(uint16_t x) const {
    return uint32_t{to_half(From(static_cast<uint8_t>(x >> 8)))} << 16 | to_half(From(static_cast<uint8_t>(x)));
  }
};
struct Tf32 {
  uint32_t operator()(uint32_t x) const {  // ties away from zero
    return (x & 0x7f800000) == 0x7f800000 ? x : (x + 0x1000) & 0xffffe000;
  }
};

Handler packed(const Lowering& l, const std::string& to, const std::string& from, int* target_bytes) {
  const bool relu = l.has("relu"), zero = l.has("rz");
  *target_bytes = to.size() > 5 && to[0] == 'e' ? 2 : 4;
  if (from == "f32") {
    if (to == "f16x2" && !zero)
      return relu ? map2<uint32_t, float, float, PackFloats<F16, true>>
                  : map2<uint32_t, float, float, PackFloats<F16, false>>;
    if (to == "bf16x2" && zero && !relu) return map2<uint32_t, float, float, PackFloats<Bf16Zero, false>>;
    if (to == "bf16x2")
      return relu ? map2<uint32_t, float, float, PackFloats<Bf16, true>>
                  : map2<uint32_t, float, float, PackFloats<Bf16, false>>;
    if (relu || zero) return nullptr;
    if (to == "e4m3x2") return map2<uint16_t, float, float, PackBytes<to_e4m3>>;
    if (to == "e5m2x2") return map2<uint16_t, float, float, PackBytes<to_e5m2>>;
  }
  if (relu || zero) return nullptr;
  if (from == "f16x2" && to == "e4m3x2") return map1<uint16_t, uint32_t, PairToBytes<to_e4m3, F16>>;
  if (from == "f16x2" && to == "e5m2x2") return map1<uint16_t, uint32_t, PairToBytes<to_e5m2, F16>>;
  if (from == "e4m3x2" && to == "f16x2") return map1<uint32_t, uint16_t, BytesToHalves<from_e4m3>>;
  if (from == "e5m2x2" && to == "f16x2") return map1<uint32_t, uint16_t, BytesToHalves<from_e5m2>>;
  return nullptr;
}

}  // namespace

bool lower_convert(Lowering& l) {
  if (l.in.op[0] != "cvt" || l.in.op.size() < 3) return false;
  const std::string &from = l.type(), &to = l.in.op[l.in.op.size() - 2];
  if (to == "tf32" && from == "f32" && l.has("rna")) {
    l.out.r[0] = l.target(l.arg(0), 4), l.out.r[1] = l.value(l.arg(1), 4);
    l.run(map1<uint32_t, uint32_t, Tf32>, Kind::kConvert);
    return true;
  }
  if (to.find("x2") != std::string::npos) {
    int bytes = 4;
    const Handler h = packed(l, to, from, &bytes);
    if (!h) return false;
    const int source = from[0] == 'e' ? 2 : 4;
    l.out.r[0] = l.target(l.arg(0), bytes);
    for (size_t i = 1; i < l.size(); ++i) l.out.r[i] = l.value(l.arg(i), source);
    l.run(h, Kind::kConvert);
    return true;
  }
  const bool wide = l.bytes_of(l.arg(1)) == 8;
  if (!simple(l, to, from, wide)) return false;
  l.out.r[0] = l.target(l.arg(0), type_bytes(to)), l.out.r[1] = l.value(l.arg(1), wide ? 8 : type_bytes(from));
  return true;
}

}  // namespace emulator
