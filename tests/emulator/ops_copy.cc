// Asynchronous copies: cp.async by the warp, cp.async.bulk of rows and of tensors' boxes.
#include <algorithm>
#include <array>

#include "decode.h"
#include "lanes.h"
#include "memory.h"
#include "races.h"
#include "synchronize.h"
#include "tensor_map.h"

namespace emulator {
namespace {

// Addresses among the operands: list[k] is the register, more[2k] the offset, more[2k + 1] whether it has 64 bits.
uint64_t address_at(const Warp& w, const Inst& in, int k, int lane) {
  const uint64_t base = in.more[2 * k + 1] ? w.row64(in.list[k])[lane] : w.row32(in.list[k])[lane];
  return base + in.more[2 * k];
}

void do_copy(const PendingCopy& c) {
  std::memcpy(c.to, c.from, c.bytes);
  std::memset(c.to + c.bytes, 0, c.zeros);
}

// number: bytes; count: 1 a source size in r[0], 2 a predicate in r[0] that says to ignore the source.
void copy_lanes(Warp& w, const Inst& in, uint32_t lanes) {
  const unsigned bytes = static_cast<unsigned>(in.number);
  uint64_t to[kLanes] = {}, from[kLanes] = {};
  uint32_t reading = 0;
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    to[i] = address_at(w, in, 0, i), from[i] = address_at(w, in, 1, i);
    uint32_t valid = bytes;
    if (in.count == 1) valid = std::min(w.row32(in.r[0])[i], bytes);
    if (in.count == 2 && predicate(w, in.r[0]) >> i & 1) valid = 0;
    PendingCopy c{shared_address(w, in, static_cast<uint32_t>(to[i]), bytes, true), nullptr, valid, bytes - valid};
    if (from[i] % bytes) fault(w, in, "misaligned address " + describe_address(from[i]));
    if (valid) {
      check_range(w, in, from[i], valid, false);
      c.from = reinterpret_cast<const char*>(from[i]);
      reading |= 1u << i;
    }
    if (machine.late) {
      w.copies.push_back(c);
    } else {
      do_copy(c);
    }
  }
  if (!machine.statistics) return;
  count_shared(in, to, lanes, bytes);
  if (reading) count_global(in, from, reading, bytes);
  machine.counters.async_bytes += bytes * __builtin_popcount(reading);
}

void commit(Warp& w, const Inst&, uint32_t) {
  w.copy_groups.push_back(std::move(w.copies));
  w.copies.clear();
}

void wait_group(Warp& w, const Inst& in, uint32_t) { finish_copy_groups(w, static_cast<size_t>(in.number)); }
void wait_all(Warp& w, const Inst&, uint32_t) { finish_copies(w); }

void arrive_after_copies(Warp& w, const Inst& in, uint32_t lanes) {
  finish_copies(w);
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    arrive_once(w, in, static_cast<uint32_t>(address_at(w, in, 0, __builtin_ctz(rest))));
  }
}

void later(Block& b, uint32_t barrier, std::function<void()> copy) {
  if (machine.late) {
    machine.bulk.push_back({&b, barrier, std::move(copy)});
  } else {
    copy();
  }
}

// The blocks that a copy goes to: those of the multicast mask, or the one that the address names.
template <class F>
void each_target(Warp& w, uint32_t address, uint32_t mask, F f) {
  Cluster& c = *w.block->cluster;
  for (uint32_t rank = 0; mask; ++rank, mask >>= 1) {
    if (mask & 1) f(*c.blocks.at(rank), address & kOffsetMask);
  }
}
uint32_t own_mask(const Warp& w, uint32_t address) {
  const uint32_t rank = address >> kRankShift;
  return 1u << (rank ? rank - 1 : w.block->rank);
}

char* place(const Warp& w, const Inst& in, Block& b, uint32_t offset, uint64_t bytes, unsigned alignment, bool write) {
  if (offset % alignment) fault(w, in, "misaligned shared offset " + std::to_string(offset) + " for a bulk copy");
  if (offset < kSharedStart || offset + bytes > b.shared_end) {
    fault(w, in,
          "bulk copy of " + std::to_string(bytes) + " bytes to shared offset " +
              std::to_string(int64_t{offset} - kSharedStart) + " of " + std::to_string(b.shared_end - kSharedStart));
  }
  if (machine.races) touch(w, b, in, offset, static_cast<uint32_t>(bytes), write ? kAsyncWrite : kAsyncRead);
  return b.shared.data() + offset;
}

// Shared, global, [barrier]; r[0] bytes; r[1] the multicast mask if writes_second.
void bulk_load(Warp& w, const Inst& in, uint32_t lanes) {
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    const uint32_t to = static_cast<uint32_t>(address_at(w, in, 0, i)), bytes = w.row32(in.r[0])[i];
    const uint64_t from = address_at(w, in, 1, i);
    const uint32_t barrier = static_cast<uint32_t>(address_at(w, in, 2, i)) & kOffsetMask;
    if (bytes == 0 || bytes % 16 || from % 16) {
      fault(
          w, in,
          "bulk copy of " + std::to_string(bytes) + " bytes from " + describe_address(from) + ": not multiples of 16");
    }
    check_range(w, in, from, bytes, false);
    machine.counters.bulk_bytes += bytes;
    each_target(w, to, in.writes_second ? w.row32(in.r[1])[i] : own_mask(w, to), [&](Block& b, uint32_t offset) {
      char* target = place(w, in, b, offset, bytes, 16, true);
      if (machine.races) release(w, &b.clocks[barrier]);
      later(b, barrier, [=, &b] {
        std::memcpy(target, reinterpret_cast<const char*>(from), bytes);
        complete_bytes(b, barrier, bytes);
      });
    });
  }
}

void bulk_store(Warp& w, const Inst& in, uint32_t lanes) {
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    const uint64_t to = address_at(w, in, 0, i);
    const uint32_t from = static_cast<uint32_t>(address_at(w, in, 1, i)), bytes = w.row32(in.r[0])[i];
    if (bytes == 0 || bytes % 16 || to % 16) fault(w, in, "bulk copy of sizes or to an address not multiples of 16");
    check_range(w, in, to, bytes, true);
    machine.counters.bulk_bytes += bytes;
    std::memcpy(reinterpret_cast<char*>(to), place(w, in, *w.block, from & kOffsetMask, bytes, 16, false), bytes);
  }
}

// One row of a box after the other: `row(offset in the box, address or 0, bytes inside, bytes before them)`.
template <class F>
void each_row(const TensorMap& m, const int32_t* at, F f) {
  const uint64_t row_bytes = uint64_t{m.box[0]} * m.element_bytes;
  uint64_t rows = 1;
  for (int d = 1; d < m.rank; ++d) rows *= m.box[d];
  const int64_t first = std::max(at[0], 0), end = std::min<int64_t>(int64_t{at[0]} + m.box[0], m.dims[0]);
  for (uint64_t r = 0; r < rows; ++r) {
    uint64_t rest = r, address = m.address;
    bool inside = first < end;
    for (int d = 1; d < m.rank; ++d) {
      const int64_t c = int64_t{at[d]} + static_cast<int64_t>(rest % m.box[d]);
      rest /= m.box[d];
      inside = inside && c >= 0 && c < m.dims[d];
      address += static_cast<uint64_t>(c) * m.strides[d - 1];
    }
    if (inside) {
      f(r * row_bytes, address + first * m.element_bytes, (end - first) * m.element_bytes,
        (first - at[0]) * m.element_bytes);
    } else {
      f(r * row_bytes, 0, 0, 0);
    }
  }
}

// Where byte `offset` of a box lies whose first byte has the shared offset `base`.
inline uint32_t swizzled(uint32_t address, int swizzle) {
  const uint32_t bits = swizzle == 3 ? 7 : swizzle == 2 ? 3 : swizzle == 1 ? 1 : 0;
  return address ^ (address >> 7 & bits) << 4;
}

const TensorMap& map_at(Warp& w, const Inst& in, int k, int lane) {
  const uint64_t address = address_at(w, in, k, lane);
  if (address % 64) fault(w, in, "the tensor map is not aligned to 64 bytes");
  check_range(w, in, address, sizeof(TensorMap), false);
  const auto& m = *reinterpret_cast<const TensorMap*>(address);
  if (m.magic != TensorMap::kMagic) fault(w, in, "there is no tensor map at " + describe_address(address));
  return m;
}

void coordinates(const Warp& w, const Inst& in, const TensorMap& m, int lane, int32_t* at) {
  // After the addresses, which are `count` in number.
  const int rank = static_cast<int>(in.list.size()) - in.count;
  if (rank != m.rank) fault(w, in, "a tensor map of " + std::to_string(m.rank) + " dimensions");
  for (int d = 0; d < rank; ++d) at[d] = static_cast<int32_t>(w.row32(in.list[in.count + d])[lane]);
}

uint32_t box_bytes(const TensorMap& m) {
  uint32_t bytes = m.element_bytes;
  for (int d = 0; d < m.rank; ++d) bytes *= m.box[d];
  return bytes;
}

// Shared, map, barrier.
void tensor_load(Warp& w, const Inst& in, uint32_t lanes) {
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    const uint32_t to = static_cast<uint32_t>(address_at(w, in, 0, i));
    const TensorMap m = map_at(w, in, 1, i);
    const uint32_t barrier = static_cast<uint32_t>(address_at(w, in, 2, i)) & kOffsetMask, bytes = box_bytes(m);
    std::array<int32_t, 5> at{};
    coordinates(w, in, m, i, at.data());
    machine.counters.bulk_bytes += bytes;
    each_row(m, at.data(), [&](uint64_t, uint64_t address, uint64_t inside, uint64_t) {
      if (inside) check_range(w, in, address, inside, false);
    });
    each_target(w, to, in.writes_second ? w.row32(in.r[1])[i] : own_mask(w, to), [&](Block& b, uint32_t offset) {
      place(w, in, b, offset, bytes, 128, true);
      if (machine.races) release(w, &b.clocks[barrier]);
      later(b, barrier, [=, &b] {
        std::vector<char> row(size_t{m.box[0]} * m.element_bytes);
        each_row(m, at.data(), [&](uint64_t start, uint64_t address, uint64_t inside, uint64_t before) {
          std::fill(row.begin(), row.end(), 0);
          if (inside) std::memcpy(row.data() + before, reinterpret_cast<const char*>(address), inside);
          for (size_t j = 0; j < row.size(); j += 16) {
            const uint32_t where = swizzled(offset + static_cast<uint32_t>(start + j), m.swizzle);
            std::memcpy(b.shared.data() + where, row.data() + j, std::min<size_t>(16, row.size() - j));
          }
        });
        complete_bytes(b, barrier, bytes);
      });
    });
  }
}

// Map, shared.
void tensor_store(Warp& w, const Inst& in, uint32_t lanes) {
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    const TensorMap& m = map_at(w, in, 0, i);
    const uint32_t from = static_cast<uint32_t>(address_at(w, in, 1, i)) & kOffsetMask, bytes = box_bytes(m);
    int32_t at[5];
    coordinates(w, in, m, i, at);
    machine.counters.bulk_bytes += bytes;
    const char* shared = place(w, in, *w.block, from, bytes, 128, false) - from;
    each_row(m, at, [&](uint64_t start, uint64_t address, uint64_t inside, uint64_t before) {
      if (inside) check_range(w, in, address, inside, true);
      for (uint64_t j = 0; j < inside; ++j) {
        reinterpret_cast<char*>(address)[j] =
            shared[swizzled(from + static_cast<uint32_t>(start + before + j), m.swizzle)];
      }
    });
  }
}

void nothing(Warp&, const Inst&, uint32_t) {}

void add_address(Lowering& l, const Operand& o) {
  if (o.kind != Operand::kMemory) l.unknown("has no address where one belongs");
  bool wide = false;
  Operand plain = o;
  plain.offset = 0;
  l.out.list.push_back(l.plain_address(plain, &wide));
  l.out.more.push_back(static_cast<Ref>(o.offset));
  l.out.more.push_back(wide);
}

bool lower_bulk(Lowering& l) {
  const bool tensor = l.has("tensor"), to_shared = l.op(tensor ? 5 : 3).rfind("shared", 0) == 0;
  if (l.has("im2col") || l.has("tile::gather4")) return false;
  const bool multicast = l.has("multicast::cluster");
  if (to_shared && !l.has("mbarrier::complete_tx::bytes")) return false;
  size_t next = 0;
  if (!tensor) {
    add_address(l, l.arg(0)), add_address(l, l.arg(1));
    l.out.r[0] = l.value(l.arg(2), 4);
    if (to_shared) add_address(l, l.arg(3));
    next = to_shared ? 4 : 3;
  } else {
    const Operand& map = l.arg(to_shared ? 1 : 0);
    if (map.parts.size() != 2) return false;
    if (to_shared) add_address(l, l.arg(0));
    add_address(l, map);
    add_address(l, l.arg(to_shared ? 2 : 1));
    l.out.count = static_cast<uint8_t>(l.out.list.size());
    for (const Operand& o : map.parts[1].parts) l.out.list.push_back(l.value(o, 4));
    next = to_shared ? 3 : 2;
  }
  if (multicast) {
    l.out.r[1] = l.value(l.arg(next), 2);
    l.out.writes_second = true;
  }
  l.run(tensor ? to_shared ? tensor_load : tensor_store : to_shared ? bulk_load : bulk_store, Kind::kCopy);
  return true;
}

}  // namespace

void finish_copy_groups(Warp& w, size_t left) {
  while (w.copy_groups.size() > left) {
    for (const PendingCopy& c : w.copy_groups.front()) do_copy(c);
    w.copy_groups.pop_front();
  }
}

void finish_copies(Warp& w) {
  finish_copy_groups(w, 0);
  for (const PendingCopy& c : w.copies) do_copy(c);
  w.copies.clear();
}

bool lower_copy(Lowering& l) {
  if (l.in.op[0] != "cp" || l.op(1) != "async") return false;
  const std::string& what = l.op(2);
  if (what == "commit_group") {
    l.run(commit, Kind::kCopy);
  } else if (what == "wait_group") {
    l.out.number = static_cast<int64_t>(l.arg(0).bits);
    l.run(wait_group, Kind::kCopy);
  } else if (what == "wait_all") {
    l.run(wait_all, Kind::kCopy);
  } else if (what == "mbarrier" && l.has("noinc")) {
    add_address(l, l.arg(0));
    l.run(arrive_after_copies, Kind::kBarrier);
  } else if (what == "bulk" && (l.op(3) == "commit_group" || l.op(3) == "wait_group" || l.op(3) == "prefetch")) {
    l.run(nothing, Kind::kCopy);
  } else if (what == "bulk") {
    return lower_bulk(l);
  } else if (what == "ca" || what == "cg") {
    add_address(l, l.arg(0)), add_address(l, l.arg(1));
    l.out.number = static_cast<int64_t>(l.arg(2).bits);
    l.out.count = 0;
    // After the sizes there may be a cache policy, which only the instruction's name tells.
    if (l.size() - l.has("L2::cache_hint") > 3) {
      const bool ignores = l.arg(3).kind == Operand::kRegister && l.bytes_of(l.arg(3)) == 0;
      l.out.count = ignores ? 2 : 1;
      l.out.r[0] = ignores ? l.truth(l.arg(3)) : l.value(l.arg(3), 4);
    }
    l.run(copy_lanes, Kind::kCopy);
  } else {
    return false;
  }
  return true;
}

}  // namespace emulator
