// atom and red: lane after lane, in the order of the lanes.
#include <algorithm>

#include "decode.h"
#include "lanes.h"
#include "memory.h"
#include "small_floats.h"

namespace emulator {
namespace {

struct Add {
  template <class T>
  T operator()(T old, T a, T) const {
    return static_cast<T>(old + a);
  }
};
struct Min {
  template <class T>
  T operator()(T old, T a, T) const {
    return std::min(old, a);
  }
};
struct Max {
  template <class T>
  T operator()(T old, T a, T) const {
    return std::max(old, a);
  }
};
struct And {
  template <class T>
  T operator()(T old, T a, T) const {
    return old & a;
  }
};
struct Or {
  template <class T>
  T operator()(T old, T a, T) const {
    return old | a;
  }
};
struct Xor {
  template <class T>
  T operator()(T old, T a, T) const {
    return old ^ a;
  }
};
struct Exchange {
  template <class T>
  T operator()(T, T a, T) const {
    return a;
  }
};
struct CompareSwap {
  template <class T>
  T operator()(T old, T a, T b) const {
    return old == a ? b : old;
  }
};
struct Increment {
  template <class T>
  T operator()(T old, T a, T) const {
    return old >= a ? 0 : old + 1;
  }
};
struct Decrement {
  template <class T>
  T operator()(T old, T a, T) const {
    return old == 0 || old > a ? a : old - 1;
  }
};
template <bool Bfloat>
struct AddPair {
  uint32_t operator()(uint32_t old, uint32_t a, uint32_t) const {
    auto one = [](uint16_t x, uint16_t y) -> uint32_t {
      return Bfloat ? to_bfloat16(from_bfloat16(x) + from_bfloat16(y)) : to_half(from_half(x) + from_half(y));
    };
    return one(old >> 16, a >> 16) << 16 | one(static_cast<uint16_t>(old), static_cast<uint16_t>(a));
  }
};

// Atomics in shared memory do not race with each other.
char* anywhere(Warp& w, const Inst& in, uint64_t address, unsigned bytes, int lane) {
  if (address >> 56 == kSharedWindow >> 56) return shared_location(w, in, static_cast<uint32_t>(address), bytes);
  return generic_address(w, in, address, bytes, true, lane);
}

// shared_constant: 1 in shared memory, 2 anywhere; count: number of value operands; writes_second: the old value is
// wanted.
template <class T, class F>
void atomic(Warp& w, const Inst& in, uint32_t lanes) {
  uint64_t addresses[kLanes];
  lane_addresses(w, in, in.r[4], addresses);
  if (machine.statistics) {
    in.shared_constant == 1 ? count_shared(in, addresses, lanes, sizeof(T))
                            : count_global(in, addresses, lanes, sizeof(T));
  }
  ++machine.progress;
  Cell<T> before[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    if (!(lanes >> i & 1)) continue;
    char* at = in.shared_constant == 1   ? shared_location(w, in, static_cast<uint32_t>(addresses[i]), sizeof(T))
               : in.shared_constant == 2 ? anywhere(w, in, addresses[i], sizeof(T), i)
                                         : global_address(w, in, addresses[i], sizeof(T), true);
    T old;
    std::memcpy(&old, at, sizeof(T));
    const T a = from_cell<T>(cells<T>(w, in.r[1])[i]);
    const T b = in.count > 1 ? from_cell<T>(cells<T>(w, in.r[2])[i]) : T();
    const T now = F()(old, a, b);
    std::memcpy(at, &now, sizeof(T));
    before[i] = to_cell<T>(old);
  }
  if (in.writes_second) {
    for (int i = 0; i < kLanes; ++i) {
      if (lanes >> i & 1) cells<T>(w, in.r[0])[i] = before[i];
    }
  }
}

template <class T>
Handler whole(const std::string& op) {
  if (op == "add") return atomic<T, Add>;
  if (op == "min") return atomic<T, Min>;
  if (op == "max") return atomic<T, Max>;
  if (op == "and") return atomic<T, And>;
  if (op == "or") return atomic<T, Or>;
  if (op == "xor") return atomic<T, Xor>;
  if (op == "exch") return atomic<T, Exchange>;
  if (op == "cas") return atomic<T, CompareSwap>;
  if (op == "inc") return atomic<T, Increment>;
  if (op == "dec") return atomic<T, Decrement>;
  return nullptr;
}

}  // namespace

bool lower_atomic(Lowering& l) {
  const std::string& name = l.in.op[0];
  if ((name != "atom" && name != "red") || l.has("async")) return false;
  static const std::set<std::string> known = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
  std::string op;
  l.out.shared_constant = 2;
  for (const std::string& part : l.in.op) {
    if (known.count(part)) op = part;
    if (part == "global") l.out.shared_constant = 0;
    if (part.rfind("shared", 0) == 0) l.out.shared_constant = 1;
  }
  const std::string& type = l.type();
  Handler h = nullptr;
  if (type == "s32") h = whole<int32_t>(op);
  if (type == "u32" || type == "b32") h = whole<uint32_t>(op);
  if (type == "s64") h = whole<int64_t>(op);
  if (type == "u64" || type == "b64") h = whole<uint64_t>(op);
  if (type == "f32" && op == "add") h = atomic<float, Add>;
  if (type == "f64" && op == "add") h = atomic<double, Add>;
  if (type == "f16x2" && op == "add") h = atomic<uint32_t, AddPair<false>>;
  if (type == "bf16x2" && op == "add") h = atomic<uint32_t, AddPair<true>>;
  if (!h) return false;
  const int bytes = type_bytes(type);
  size_t i = 0;
  if (name == "atom") {
    l.out.r[0] = l.target(l.arg(i++), bytes);
    l.out.writes_second = true;
  }
  l.address(l.arg(i++), 4);
  l.out.count = static_cast<uint8_t>(l.size() - i);
  if (l.arg(i).kind == Operand::kVector) return false;
  for (int j = 1; i < l.size(); ++i, ++j) l.out.r[j] = l.value(l.arg(i), bytes);
  l.run(h, l.out.shared_constant == 1 ? Kind::kSharedStore : Kind::kGlobalStore);
  return true;
}

}  // namespace emulator
