// ld, st, and what only hints at memory.
#include "decode.h"
#include "lanes.h"
#include "memory.h"
#include "races.h"

namespace emulator {
namespace {

enum Where { kInGlobal, kInShared, kInLocal, kAnywhere };

template <Where W>
inline char* host(Warp& w, const Inst& in, uint64_t address, unsigned bytes, bool write, int lane) {
  if constexpr (W == kInGlobal) return global_address(w, in, address, bytes, write);
  if constexpr (W == kInShared) return shared_address(w, in, static_cast<uint32_t>(address), bytes, write);
  if constexpr (W == kInLocal) return local_address(w, in, address, bytes, lane);
  return generic_address(w, in, address, bytes, write, lane);
}

template <Where W>
void count(const Inst& in, const uint64_t* addresses, uint32_t lanes, unsigned bytes) {
  if (!machine.statistics || W == kInLocal) return;
  const uint64_t window = W == kAnywhere ? addresses[__builtin_ctz(lanes)] >> 56 : 0;
  if (W == kInShared || window == kSharedWindow >> 56) {
    count_shared(in, addresses, lanes, bytes);
  } else if (window != kLocalWindow >> 56) {
    count_global(in, addresses, lanes, bytes);
  }
}

void store_shared(Warp& w, const Inst& in, uint32_t address, const void* values, unsigned bytes) {
  Block* owner = nullptr;
  char* to = shared_location(w, in, address, bytes, &owner);
  if (machine.races) {
    const uint32_t offset = address & kOffsetMask;
    std::memcmp(to, values, bytes) != 0 ? touch(w, *owner, in, offset, bytes, kWrite)
                                        : touch_same(w, *owner, offset, bytes);
  }
  std::memcpy(to, values, bytes);
}

// T is what lies in memory; it is extended to its cell, with its sign if it has one.
template <class T, class C, Where W>
void load(Warp& w, const Inst& in, uint32_t lanes) {
  uint64_t addresses[kLanes];
  lane_addresses(w, in, in.r[4], addresses);
  const unsigned bytes = sizeof(T) * in.count;
  if (in.kind != Kind::kParameter) count<W>(in, addresses, lanes, bytes);
  if (in.shared_constant) w.budget = w.budget < 16 ? w.budget : 16;  // volatile: somebody else may have to write first
  char* from[kLanes];
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    from[i] = host<W>(w, in, addresses[i], bytes, false, i);
  }
  for (int j = 0; j < in.count; ++j) {
    C* to = reinterpret_cast<C*>(w.base[in.r[j] & 1] + (in.r[j] & ~1));
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
      const int i = __builtin_ctz(rest);
      T value;
      __builtin_memcpy(&value, from[i] + j * sizeof(T), sizeof(T));
      to[i] = static_cast<C>(value);
    }
  }
}

template <class T, class C, Where W>
void store(Warp& w, const Inst& in, uint32_t lanes) {
  uint64_t addresses[kLanes];
  lane_addresses(w, in, in.r[4], addresses);
  const unsigned bytes = sizeof(T) * in.count;
  count<W>(in, addresses, lanes, bytes);
  if (W != kInLocal) ++machine.progress;
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    T values[4];
    for (int j = 0; j < in.count; ++j) {
      values[j] = static_cast<T>(reinterpret_cast<const C*>(w.base[in.r[j] & 1] + (in.r[j] & ~1))[i]);
    }
    if (W == kInShared || (W == kAnywhere && addresses[i] >> 56 == kSharedWindow >> 56)) {
      store_shared(w, in, static_cast<uint32_t>(addresses[i]), values, bytes);
    } else {
      __builtin_memcpy(host<W>(w, in, addresses[i], bytes, true, i), values, bytes);
    }
  }
}

// The kernel's parameters: the same in every lane.
template <class T, class C>
void load_parameter(Warp& w, const Inst& in, uint32_t lanes) {
  const char* from = machine.launch.kernel->params.data() + in.number;
  for (int j = 0; j < in.count; ++j) {
    T value;
    std::memcpy(&value, from + j * sizeof(T), sizeof(T));
    C cells[kLanes];
    for (int i = 0; i < kLanes; ++i) cells[i] = static_cast<C>(value);
    store_cells(reinterpret_cast<C*>(w.base[in.r[j] & 1] + (in.r[j] & ~1)), cells, lanes);
  }
}

template <class T, class C>
Handler by_space(Where where, bool stores) {
  switch (where) {
    case kInGlobal:
      return stores ? store<T, C, kInGlobal> : load<T, C, kInGlobal>;
    case kInShared:
      return stores ? store<T, C, kInShared> : load<T, C, kInShared>;
    case kInLocal:
      return stores ? store<T, C, kInLocal> : load<T, C, kInLocal>;
    default:
      return stores ? store<T, C, kAnywhere> : load<T, C, kAnywhere>;
  }
}

// `where` negative: the kernel's parameters. The register may be wider than what is loaded.
template <class T, class C>
Handler made(int where, bool stores) {
  return where < 0 ? Handler(load_parameter<T, C>) : by_space<T, C>(static_cast<Where>(where), stores);
}
Handler pick(const std::string& type, int where, bool stores, bool wide) {
  const bool sign = type[0] == 's';
  switch (type_bytes(type)) {
    case 1:
      if (wide) return sign ? made<int8_t, uint64_t>(where, stores) : made<uint8_t, uint64_t>(where, stores);
      return sign ? made<int8_t, uint32_t>(where, stores) : made<uint8_t, uint32_t>(where, stores);
    case 2:
      if (wide) return sign ? made<int16_t, uint64_t>(where, stores) : made<uint16_t, uint64_t>(where, stores);
      return sign ? made<int16_t, uint32_t>(where, stores) : made<uint16_t, uint32_t>(where, stores);
    case 4:
      if (wide) return sign ? made<int32_t, uint64_t>(where, stores) : made<uint32_t, uint64_t>(where, stores);
      return made<uint32_t, uint32_t>(where, stores);
    case 8:
      return made<uint64_t, uint64_t>(where, stores);
    default:
      return nullptr;
  }
}

void nothing(Warp&, const Inst&, uint32_t) {}

}  // namespace

bool lower_memory(Lowering& l) {
  const std::string& op = l.in.op[0];
  if (op == "prefetch" || op == "prefetchu" || op == "discard" || op == "applypriority") {
    l.run(nothing, Kind::kOther);
    return true;
  }
  if (op == "createpolicy") {
    l.target(l.arg(0), 8);
    l.run(nothing, Kind::kOther);
    return true;
  }
  const bool stores = op == "st";
  if (op != "ld" && !stores) return false;
  if (l.has("async")) return false;
  const Operand &memory = l.arg(stores ? 0 : 1), &data = l.arg(stores ? 1 : 0);
  const int bytes = type_bytes(l.type());
  int where = kAnywhere;
  Kind kind = stores ? Kind::kGlobalStore : Kind::kGlobalLoad;
  for (const std::string& part : l.in.op) {
    if (part == "global") where = kInGlobal;
    if (part == "const") where = kInGlobal;
    if (part.rfind("shared", 0) == 0) where = kInShared, kind = stores ? Kind::kSharedStore : Kind::kSharedLoad;
    if (part == "local") where = kInLocal, kind = Kind::kLocal;
    if (part.rfind("param", 0) == 0) {  // the kernel's, by a register or by name, or a function's
      where = memory.parts[0].kind == Operand::kRegister ? kAnywhere : l.parameter(memory) >= 0 ? -1 : kInLocal;
      kind = Kind::kParameter;
    }
  }
  const bool vector = data.kind == Operand::kVector;
  l.out.count = static_cast<uint8_t>(vector ? data.parts.size() : 1);
  if (l.out.count > 4) return false;
  bool wide = bytes == 8;
  for (int i = 0; i < l.out.count; ++i) {
    const Operand& o = vector ? data.parts[i] : data;
    if (o.kind == Operand::kRegister && l.bytes_of(o) == 8) wide = true;
  }
  for (int i = 0; i < l.out.count; ++i) {
    const Operand& o = vector ? data.parts[i] : data;
    l.out.r[i] = stores ? l.value(o, wide ? 8 : bytes) : l.target(o, wide ? 8 : bytes);
  }
  if (where < 0) {
    l.out.number = l.parameter(memory);
  } else {
    l.address(memory, 4);
  }
  l.out.shared_constant = !stores && (l.has("volatile") || l.has("acquire") || l.has("relaxed"));
  const Handler h = pick(l.type(), where, stores, wide);
  if (h) l.run(h, kind);
  return h != nullptr;
}

}  // namespace emulator
