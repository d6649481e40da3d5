// Handlers that do the same in every lane: a template makes one from a function of a lane's values.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <type_traits>

#include "machine.h"

namespace emulator {

template <class T>
using Cell = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline Cell<T>* cells(const Warp& w, Ref r) {
  if constexpr (sizeof(T) == 8) {
    return w.row64(r);
  } else {
    return w.row32(r);
  }
}

template <class T>
inline T from_cell(Cell<T> cell) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(cell);
  } else {
    T value;
    __builtin_memcpy(&value, &cell, sizeof(value));
    return value;
  }
}

// Narrow values lie in the low bits of their cell, with zeros above.
template <class T>
inline Cell<T> to_cell(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<Cell<T>>(static_cast<std::make_unsigned_t<T>>(value));
  } else {
    Cell<T> cell = 0;
    __builtin_memcpy(&cell, &value, sizeof(value));
    return cell;
  }
}

template <class C>
inline void store_cells(C* to, const C* from, uint32_t lanes) {
  if (lanes == kAllLanes) {
    __builtin_memcpy(to, from, kLanes * sizeof(C));
  } else {
    for (int i = 0; i < kLanes; ++i) to[i] = lanes >> i & 1 ? from[i] : to[i];
  }
}

template <class D, class A, class F>
void map1(Warp& w, const Inst& in, uint32_t lanes) {
  const Cell<A>* a = cells<A>(w, in.r[1]);
  alignas(64) Cell<D> out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = to_cell<D>(F()(from_cell<A>(a[i])));
  store_cells(cells<D>(w, in.r[0]), out, lanes);
}

template <class D, class A, class B, class F>
void map2(Warp& w, const Inst& in, uint32_t lanes) {
  const Cell<A>* a = cells<A>(w, in.r[1]);
  const Cell<B>* b = cells<B>(w, in.r[2]);
  alignas(64) Cell<D> out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = to_cell<D>(F()(from_cell<A>(a[i]), from_cell<B>(b[i])));
  store_cells(cells<D>(w, in.r[0]), out, lanes);
}

template <class D, class A, class B, class C, class F>
void map3(Warp& w, const Inst& in, uint32_t lanes) {
  const Cell<A>* a = cells<A>(w, in.r[1]);
  const Cell<B>* b = cells<B>(w, in.r[2]);
  const Cell<C>* c = cells<C>(w, in.r[3]);
  alignas(64) Cell<D> out[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    out[i] = to_cell<D>(F()(from_cell<A>(a[i]), from_cell<B>(b[i]), from_cell<C>(c[i])));
  }
  store_cells(cells<D>(w, in.r[0]), out, lanes);
}

// Bit i is set where flags[i] is not 0.
inline uint32_t to_mask(const int32_t* flags) {
#ifdef __AVX512F__
  const __m512i zero = _mm512_setzero_si512();
  return static_cast<uint32_t>(_mm512_cmpneq_epi32_mask(_mm512_loadu_si512(flags), zero)) |
         static_cast<uint32_t>(_mm512_cmpneq_epi32_mask(_mm512_loadu_si512(flags + 16), zero)) << 16;
#endif
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(flags[i] != 0) << i;
  return mask;
}

inline void set_predicate(Warp& w, int number, uint32_t value, uint32_t lanes) {
  uint32_t& p = w.predicates[number];
  p = (p & ~lanes) | (value & lanes);
}

// A predicate operand: 2 * number + negated.
inline uint32_t predicate(const Warp& w, Ref operand) {
  const uint32_t p = w.predicates[operand >> 1];
  return operand & 1 ? ~p : p;
}

}  // namespace emulator
