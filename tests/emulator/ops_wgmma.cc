// wgmma: each warp multiplies its 16 of the 64 rows for itself.
#include <algorithm>

#include "decode.h"
#include "lanes.h"
#include "races.h"
#include "small_floats.h"

namespace emulator {

// Sums of a warp's 16 rows and up to 256 columns.
struct Sums {
  alignas(64) float values[16][256];
};

// A product that has been asked for, with what it needs that may change before it is done.
struct Multiplication {
  const Inst* in = nullptr;
  uint32_t a_registers[4][kLanes];
  uint64_t a = 0, b = 0;  // descriptors
  bool accumulate = false;
  std::shared_ptr<Sums> sums;  // one for all products on the same registers that have not been waited for
};

namespace {

enum Format { kF16, kBf16, kTf32, kE4m3, kE5m2 };

// What an instruction says, in `list` and `more`: see lower_wgmma.
struct Shape {
  int n, k, element;  // element: bytes
  Format a, b;
  bool a_in_registers, a_across, b_across, half_sums;
  float scale_a, scale_b;
};

template <class F>
void with_format(Format format, F f) {
  switch (format) {
    case kF16:
      return f([](const char* p) {
        uint16_t v;
        std::memcpy(&v, p, 2);
        return from_half(v);
      });
    case kBf16:
      return f([](const char* p) {
        uint16_t v;
        std::memcpy(&v, p, 2);
        return from_bfloat16(v);
      });
    case kTf32:
      return f([](const char* p) {
        uint32_t v;
        std::memcpy(&v, p, 4);
        return to_tf32(bits_float(v));
      });
    case kE4m3:
      return f([](const char* p) { return from_e4m3(static_cast<uint8_t>(*p)); });
    case kE5m2:
      return f([](const char* p) { return from_e5m2(static_cast<uint8_t>(*p)); });
  }
}

// Opens rows `first`..`first + rows` and `k` columns of a matrix that a descriptor tells of: out[row][col].
// `across`: neighbours in memory are neighbours along the rows' index, not along k.
void open_matrix(const Warp& w, const Inst& in, uint64_t descriptor, Format format, int bytes, bool across, int first,
                 int rows, int k, float* out, int pitch) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  const uint32_t base = static_cast<uint32_t>(descriptor >> 49 & 7), mode = static_cast<uint32_t>(descriptor >> 62);
  if (base) fault(w, in, "a descriptor with a base offset, which is not known to the emulator");
  const int swizzle = mode == 1 ? 7 : mode == 2 ? 3 : mode == 3 ? 1 : 0;
  const uint32_t row_bytes = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
  const uint32_t chunks = row_bytes / 16;
  const int per = 16 / bytes;
  const char* shared = w.block->shared.data();
  const uint32_t end = w.block->shared_end;
  with_format(format, [&](auto read) {
    auto chunk = [&](uint32_t address) {
      address ^= (address >> 7 & swizzle) << 4;
      if (address < kSharedStart || address + 16 > end) {
        fault(w, in,
              "a descriptor leads to shared offset " + std::to_string(int64_t{address} - kSharedStart) + " of " +
                  std::to_string(end - kSharedStart));
      }
      if (machine.races) touch(w, *w.block, in, address, 16, kAsyncRead);
      return shared + address;
    };
    if (!across) {
      for (int r = 0; r < rows; ++r) {
        const uint32_t row = first + r;
        for (int c = 0; c < k; c += per) {
          const uint32_t column = c / per;  // in chunks of 16 bytes
          // Within the width of the swizzle the chunks lie side by side; without one they are `leading` apart.
          const uint32_t along = mode ? column % chunks * 16 + column / chunks * leading : column * leading;
          const char* from = chunk(start + row / 8 * stride + row % 8 * row_bytes + along);
          for (int j = 0; j < per; ++j) out[r * pitch + c + j] = read(from + j * bytes);
        }
      }
      return;
    }
    for (int r = 0; r < rows; r += per) {
      const uint32_t piece = (first + r) / per;
      for (int c = 0; c < k; ++c) {
        const uint32_t column = c;
        const uint32_t at =
            mode ? piece % chunks * 16 + piece / chunks * leading + column % 8 * row_bytes + column / 8 * stride
                 : piece * stride + column % 8 * 16 + column / 8 * leading;
        const char* from = chunk(start + at);
        for (int j = 0; j < per; ++j) out[(r + j) * pitch + c] = read(from + j * bytes);
      }
    }
  });
}

const Shape& shape_of(const Inst& in) { return *reinterpret_cast<const Shape*>(in.number); }

void open_registers(const Multiplication& m, const Shape& s, float* a) {
  const int per = 4 / s.element;
  with_format(s.a, [&](auto read) {
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < kLanes; ++i) {
        const int row = i / 4 + 8 * (r % 2), col = per * (i % 4) + 4 * per * (r / 2);
        const char* from = reinterpret_cast<const char*>(&m.a_registers[r][i]);
        for (int j = 0; j < per; ++j) a[row * s.k + col + j] = read(from + j * s.element);
      }
    }
  });
}

void perform(Warp& w, const Multiplication& m, Sums* sums) {
  const Shape& s = shape_of(*m.in);
  alignas(64) static thread_local float a[16 * 32], b[256 * 32], turned[32 * 256];
  if (s.a_in_registers) {
    open_registers(m, s, a);
  } else {
    open_matrix(w, *m.in, m.a, s.a, s.element, s.a_across, 16 * (w.id % 4), 16, s.k, a, s.k);
  }
  open_matrix(w, *m.in, m.b, s.b, s.element, s.b_across, 0, s.n, s.k, b, s.k);
  const float scale = s.scale_a * s.scale_b;
  for (int k = 0; k < s.k; ++k) {
    for (int n = 0; n < s.n; ++n) turned[k * 256 + n] = b[n * s.k + k] * scale;
  }
  for (int row = 0; row < 16; ++row) {
    float* sum = sums->values[row];
    if (!m.accumulate) std::fill_n(sum, s.n, 0.0f);
    for (int k = 0; k < s.k; ++k) {
      const float x = a[row * s.k + k];
      const float* y = turned + k * 256;
      for (int n = 0; n < s.n; n += 8) {
        for (int j = 0; j < 8; ++j) sum[n + j] += x * y[n + j];
      }
    }
  }
}

template <class F>
void each_register(const Shape& s, F f) {
  for (int j = 0; j < s.n / 2; ++j) f(j, 8 * (j / 4) + j % 2, j / 2 % 2);
}

void load_sums(const Warp& w, const Inst& in, Sums* sums) {
  const Shape& s = shape_of(in);
  each_register(s, [&](int j, int col, int half) {
    const uint32_t* cell = w.row32(in.more[s.half_sums ? j / 2 : j]);
    for (int i = 0; i < kLanes; ++i) {
      float& x = sums->values[i / 4 + 8 * half][col + 2 * (i % 4)];
      x = s.half_sums ? from_half(static_cast<uint16_t>(cell[i] >> (16 * (j % 2)))) : bits_float(cell[i]);
    }
  });
}

void store_sums(const Warp& w, const Inst& in, const Sums& sums) {
  const Shape& s = shape_of(in);
  each_register(s, [&](int j, int col, int half) {
    uint32_t* cell = w.row32(in.more[s.half_sums ? j / 2 : j]);
    for (int i = 0; i < kLanes; ++i) {
      const float x = sums.values[i / 4 + 8 * half][col + 2 * (i % 4)];
      if (s.half_sums) {
        const uint32_t h = to_half(x);
        cell[i] = j % 2 ? (cell[i] & 0xffff) | h << 16 : (cell[i] & 0xffff0000) | h;
      } else {
        cell[i] = float_bits(x);
      }
    }
  });
}

// Late: the sums leave their registers, which hold NaN until the product has been waited for.
void postpone(Warp& w, Multiplication m) {
  const Inst& in = *m.in;
  auto look = [&](const std::vector<std::shared_ptr<Multiplication>>& group) {
    for (const auto& other : group) {
      if (!other->sums) continue;
      if (other->in->more == in.more) {
        m.sums = other->sums;
      } else if (std::find_first_of(in.more.begin(), in.more.end(), other->in->more.begin(), other->in->more.end()) !=
                 in.more.end()) {
        fault(w, in, "some of its sums belong to a product that has not been waited for");
      }
    }
  };
  for (const auto& group : w.product_groups) look(group);
  look(w.products);
  if (!m.sums) {
    m.sums = std::make_shared<Sums>();
    load_sums(w, in, m.sums.get());
    for (Ref r : in.more) std::fill_n(w.row32(r), kLanes, 0x7fffffffu);
  }
  w.products.push_back(std::make_shared<Multiplication>(std::move(m)));
}

void multiply(Warp& w, const Inst& in, uint32_t lanes) {
  if (!gather(w, in, kAllLanes)) return;
  if (lanes != kAllLanes) fault(w, in, "not all lanes of the warp take part");
  if (w.block->warps.size() < 4) fault(w, in, "there is no group of four warps");
  const Shape& s = shape_of(in);
  Multiplication m;
  m.in = &in;
  m.accumulate = predicate(w, in.r[2]) & 1;
  if (s.a_in_registers) {
    for (int r = 0; r < 4; ++r) std::copy_n(w.row32(in.list[r]), kLanes, m.a_registers[r]);
  } else {
    m.a = w.row64(in.r[0])[0];
  }
  m.b = w.row64(in.r[1])[0];
  machine.counters.tensor_flops += 2.0 * 16 * s.n * s.k;
  if (machine.late) return postpone(w, std::move(m));
  Sums sums;
  load_sums(w, in, &sums);
  perform(w, m, &sums);
  store_sums(w, in, sums);
}

void fence(Warp& w, const Inst& in, uint32_t) { gather(w, in, kAllLanes); }

void commit(Warp& w, const Inst& in, uint32_t) {
  if (!gather(w, in, kAllLanes)) return;
  w.product_groups.push_back(std::move(w.products));
  w.products.clear();
}

// Does the groups that must be done, the oldest first. Sums go back to the registers with the last product on them.
void wait_group(Warp& w, const Inst& in, uint32_t) {
  if (!gather(w, in, kAllLanes)) return;
  while (w.product_groups.size() > static_cast<size_t>(in.number)) {
    for (const auto& m : w.product_groups.front()) {
      perform(w, *m, m->sums.get());
      if (m->sums.use_count() == 1) store_sums(w, *m->in, *m->sums);
      m->sums.reset();
    }
    w.product_groups.pop_front();
  }
}

bool format_of(const std::string& type, Format* format, int* bytes) {
  static const std::map<std::string, std::pair<Format, int>> known = {
      {"f16", {kF16, 2}}, {"bf16", {kBf16, 2}}, {"tf32", {kTf32, 4}}, {"e4m3", {kE4m3, 1}}, {"e5m2", {kE5m2, 1}}};
  auto found = known.find(type);
  if (found == known.end()) return false;
  *format = found->second.first, *bytes = found->second.second;
  return true;
}

}  // namespace

// Operands: D, A (a descriptor or four registers), the descriptor of B, whether to add to D, the signs of A and B, and
// for 16-bit types whether A (if in memory) and B lie across.
bool lower_wgmma(Lowering& l) {
  if (l.in.op[0] != "wgmma") return false;
  if (l.op(1) != "mma_async") {
    const std::string& what = l.op(1);
    if (what == "wait_group") l.out.number = static_cast<int64_t>(l.arg(0).bits);
    l.run(what == "commit_group" ? commit : what == "wait_group" ? wait_group : fence, Kind::kTensor);
    return what == "fence" || what == "commit_group" || what == "wait_group";
  }
  const size_t n = l.in.op.size();
  std::string shape_name = l.op(4);
  const std::string &d = l.op(5), &a = l.op(6), &b = l.op(7);
  if (n != 8 || l.op(2) != "sync") return false;
  auto* s = new Shape{};  // as long as the kernel, which is as long as the process
  int a_bytes = 0;
  if (!format_of(a, &s->a, &a_bytes) || !format_of(b, &s->b, &s->element) || a_bytes != s->element) return false;
  if (d == "s32") return false;  // sums are floats here
  s->half_sums = d == "f16";
  if (std::sscanf(shape_name.c_str(), "m64n%dk%d", &s->n, &s->k) != 2 || s->n % 8 || s->n > 256) return false;
  if (s->k * s->element != 32) return false;
  for (const Operand& o : l.arg(0).parts) l.out.more.push_back(l.target(o, 4));
  if (static_cast<int>(l.out.more.size()) != s->n / (s->half_sums ? 4 : 2)) return false;
  s->a_in_registers = l.arg(1).kind == Operand::kVector;
  if (s->a_in_registers) {
    if (l.arg(1).parts.size() != 4) return false;
    for (const Operand& o : l.arg(1).parts) l.out.list.push_back(l.value(o, 4));
  } else {
    l.out.r[0] = l.value(l.arg(1), 8);
  }
  l.out.r[1] = l.value(l.arg(2), 8);
  l.out.r[2] = l.truth(l.arg(3));
  auto sign = [&](size_t i) { return i < l.size() ? static_cast<int32_t>(l.arg(i).bits) < 0 ? -1.0f : 1.0f : 1.0f; };
  s->scale_a = s->scale_b = 1.0f;
  s->scale_a = sign(4), s->scale_b = sign(5);
  if (s->element == 2) {
    size_t i = 6;
    if (!s->a_in_registers) s->a_across = l.arg(i++).bits != 0;
    s->b_across = l.arg(i).bits != 0;
  }
  l.out.number = reinterpret_cast<int64_t>(s);
  l.run(multiply, Kind::kTensor);
  return true;
}

}  // namespace emulator
