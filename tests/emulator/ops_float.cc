// Floating-point arithmetic: f32, f64, and f16 and bf16 alone and in pairs.
#include <cfenv>
#include <cmath>
#include <limits>

#include "decode.h"
#include "lanes.h"
#include "small_floats.h"

namespace emulator {
namespace {

struct Half {
  static float widen(uint16_t h) { return from_half(h); }
  static uint16_t narrow(float x) { return to_half(x); }
};
struct Bfloat {
  static float widen(uint16_t h) { return from_bfloat16(h); }
  static uint16_t narrow(float x) { return to_bfloat16(x); }
};

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return a - b;
  }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    return a * b;
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    return a / b;
  }
};
struct Fma {
  float operator()(float a, float b, float c) const { return __builtin_fmaf(a, b, c); }
  double operator()(double a, double b, double c) const { return __builtin_fma(a, b, c); }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    return -a;
  }
};
struct Abs {
  float operator()(float a) const { return __builtin_fabsf(a); }
  double operator()(double a) const { return __builtin_fabs(a); }
};
// The other operand's value where one is NaN; -0 lies below +0.
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    const T equal = std::signbit(a) ? a : b, least = a < b ? a : a == b ? equal : b;
    return a != a ? b : b != b ? a : least;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    const T equal = std::signbit(a) ? b : a, most = a > b ? a : a == b ? equal : b;
    return a != a ? b : b != b ? a : most;
  }
};
struct MinNan {
  template <class T>
  T operator()(T a, T b) const {
    return a != a || b != b ? a + b : Min()(a, b);
  }
};
struct MaxNan {
  template <class T>
  T operator()(T a, T b) const {
    return a != a || b != b ? a + b : Max()(a, b);
  }
};
struct CopySign {  // the sign of a on b
  float operator()(float a, float b) const { return __builtin_copysignf(b, a); }
  double operator()(double a, double b) const { return __builtin_copysign(b, a); }
};
struct Rcp {
  template <class T>
  T operator()(T a) const {
    return T(1) / a;
  }
};
struct Sqrt {
  float operator()(float a) const { return __builtin_sqrtf(a); }
  double operator()(double a) const { return __builtin_sqrt(a); }
};
struct Rsqrt {
  float operator()(float a) const { return 1.0f / __builtin_sqrtf(a); }
};
struct Lg2 {
  float operator()(float a) const { return std::log2(a); }
};
struct Sin {
  float operator()(float a) const { return std::sin(a); }
};
struct Cos {
  float operator()(float a) const { return std::cos(a); }
};
struct Tanh {
  float operator()(float a) const { return std::tanh(a); }
};
struct Ex2 {
  float operator()(float x) const {
    const float low = -152.0f, high = 129.0f;
    const float y = x < low ? low : x > high ? high : x;
    const float shifted = y + 12582912.0f, n = shifted - 12582912.0f, r = y - n;
    float p = 1.5353362e-4f;
    p = p * r + 1.3398874e-3f;
    p = p * r + 9.6184373e-3f;
    p = p * r + 5.5503324e-2f;
    p = p * r + 2.4022648e-1f;
    p = p * r + 6.9314720e-1f;
    p = p * r + 1.0f;
    // In two steps: the power of two alone may not be a normal number.
    const int32_t e = static_cast<int32_t>(n), half = e / 2;
    const float scaled = p * bits_float(static_cast<uint32_t>(half + 127) << 23) *
                         bits_float(static_cast<uint32_t>(e - half + 127) << 23);
    return x != x ? x : scaled;
  }
};

struct Same {
  float operator()(float x) const { return x; }
};
struct Relu {
  float operator()(float x) const { return x > 0.0f || x != x ? x : 0.0f; }
};
struct Saturate {
  float operator()(float x) const { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
};
inline float flush(float x) { return (float_bits(x) & 0x7f800000u) ? x : bits_float(float_bits(x) & 0x80000000u); }

// A function of floats with what comes after it, with or without subnormal numbers.
template <class F, class After, bool Flush>
struct Full {
  template <class... T>
  float operator()(T... x) const {
    if constexpr (Flush) return After()(flush(F()(flush(x)...)));
    return After()(F()(x...));
  }
};
template <class F, class Format, class After>
struct Narrow {
  template <class... T>
  uint16_t operator()(T... x) const {
    return Format::narrow(After()(F()(Format::widen(x)...)));
  }
};
template <class F, class Format, class After>
struct Pair {
  template <class... T>
  uint32_t operator()(T... x) const {
    const Narrow<F, Format, After> f;
    const uint32_t low = f(static_cast<uint16_t>(x)...), high = f(static_cast<uint16_t>(x >> 16)...);
    return high << 16 | low;
  }
};

// With another rounding mode than to nearest.
template <Handler Inner, int Mode>
void rounded(Warp& w, const Inst& in, uint32_t lanes) {
  const int before = std::fegetround();
  std::fesetround(Mode);
  asm volatile("" ::: "memory");
  Inner(w, in, lanes);
  asm volatile("" ::: "memory");
  std::fesetround(before);
}
template <Handler Inner>
Handler with_mode(const Lowering& l) {
  if (l.has("rm")) return rounded<Inner, FE_DOWNWARD>;
  if (l.has("rp")) return rounded<Inner, FE_UPWARD>;
  if (l.has("rz")) return rounded<Inner, FE_TOWARDZERO>;
  return Inner;
}

template <class T, class G, int N>
constexpr Handler shaped() {
  if constexpr (N == 1) {
    return map1<T, T, G>;
  } else if constexpr (N == 2) {
    return map2<T, T, T, G>;
  } else {
    return map3<T, T, T, T, G>;
  }
}

template <class F, int N>
bool emit(Lowering& l) {
  const std::string& type = l.type();
  const int bytes = type == "f64" ? 8 : type == "f32" || type == "f16x2" || type == "bf16x2" ? 4 : 2;
  const bool saturates = l.has("sat"), rectifies = l.has("relu");
  if (l.has("oob") || (l.has("abs") && l.in.op[0] != "abs") || l.has("xorsign")) return false;
  Handler h = nullptr;
  if (type == "f64") {
    if constexpr (std::is_invocable_r_v<double, F, double> || N > 1) h = with_mode<shaped<double, F, N>()>(l);
  } else if (type == "f32") {
    h = saturates      ? with_mode<shaped<float, Full<F, Saturate, false>, N>()>(l)
        : l.has("ftz") ? with_mode<shaped<float, Full<F, Same, true>, N>()>(l)
                       : with_mode<shaped<float, Full<F, Same, false>, N>()>(l);
  } else if (l.has("rz") || l.has("rm") || l.has("rp")) {
    return false;
  } else if (type == "f16" || type == "bf16") {
    const bool half = type == "f16";
    h = rectifies ? half ? shaped<uint16_t, Narrow<F, Half, Relu>, N>() : shaped<uint16_t, Narrow<F, Bfloat, Relu>, N>()
        : saturates ? half ? shaped<uint16_t, Narrow<F, Half, Saturate>, N>()
                           : shaped<uint16_t, Narrow<F, Bfloat, Saturate>, N>()
        : half      ? shaped<uint16_t, Narrow<F, Half, Same>, N>()
                    : shaped<uint16_t, Narrow<F, Bfloat, Same>, N>();
  } else if (type == "f16x2" || type == "bf16x2") {
    const bool half = type == "f16x2";
    h = rectifies ? half ? shaped<uint32_t, Pair<F, Half, Relu>, N>() : shaped<uint32_t, Pair<F, Bfloat, Relu>, N>()
        : saturates
            ? half ? shaped<uint32_t, Pair<F, Half, Saturate>, N>() : shaped<uint32_t, Pair<F, Bfloat, Saturate>, N>()
        : half ? shaped<uint32_t, Pair<F, Half, Same>, N>()
               : shaped<uint32_t, Pair<F, Bfloat, Same>, N>();
  }
  if (!h || l.size() != N + 1) return false;
  l.out.r[0] = l.target(l.arg(0), bytes);
  for (int i = 1; i <= N; ++i) l.out.r[i] = l.value(l.arg(i), bytes);
  l.run(h, type == "f64" ? Kind::kDouble : Kind::kFloat);
  return true;
}

}  // namespace

bool lower_float(Lowering& l) {
  const std::string &op = l.in.op[0], &type = l.type();
  if (type != "f32" && type != "f64" && type != "f16" && type != "bf16" && type != "f16x2" && type != "bf16x2")
    return false;
  if (op == "add") return emit<Add, 2>(l);
  if (op == "sub") return emit<Sub, 2>(l);
  if (op == "mul") return emit<Mul, 2>(l);
  if (op == "div") return emit<Div, 2>(l);
  if (op == "fma" || op == "mad") return emit<Fma, 3>(l);
  if (op == "neg") return emit<Neg, 1>(l);
  if (op == "abs") return emit<Abs, 1>(l);
  if (op == "min") return l.has("NaN") ? emit<MinNan, 2>(l) : emit<Min, 2>(l);
  if (op == "max") return l.has("NaN") ? emit<MaxNan, 2>(l) : emit<Max, 2>(l);
  if (op == "copysign") return emit<CopySign, 2>(l);
  if (op == "rcp") return emit<Rcp, 1>(l);
  if (op == "sqrt") return emit<Sqrt, 1>(l);
  if (type == "f64") return false;
  if (op == "rsqrt") return emit<Rsqrt, 1>(l);
  if (op == "ex2") return emit<Ex2, 1>(l);
  if (op == "lg2") return emit<Lg2, 1>(l);
  if (op == "sin") return emit<Sin, 1>(l);
  if (op == "cos") return emit<Cos, 1>(l);
  if (op == "tanh") return emit<Tanh, 1>(l);
  return false;
}

}  // namespace emulator
