#include "decode.h"

#include <algorithm>

#include "memory.h"

namespace emulator {

int type_bytes(const std::string& type) {
  if (type == "pred") return 0;
  size_t digits = type.find_first_of("0123456789");
  if (digits == std::string::npos) return 4;
  if (type.size() > 2 && type.compare(type.size() - 2, 2, "x2") == 0 && type[0] != 'e') return 4;  // f16x2, bf16x2
  return std::stoi(type.substr(digits)) / 8;
}

const Operand& Lowering::arg(size_t i) const {
  if (i >= in.args.size()) unknown("has too few operands");
  return in.args[i];
}

const std::string& Lowering::op(size_t i) const {
  static const std::string empty;
  return i < in.op.size() ? in.op[i] : empty;
}

void Lowering::unknown(const std::string& why) const {
  throw Fault("PTX line " + std::to_string(in.ptx_line) + ": " + in.mnemonic() + " " + why);
}

namespace {

int64_t rounded(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

class Decoder {
 public:
  Decoder(const Module& module, const std::string& name) : module_(module), kernel_(new Kernel) {
    auto found = module.functions.find(name);
    if (found == module.functions.end() || !found->second->defined) throw Fault("no PTX for kernel " + name);
    kernel_->name = name, kernel_->module = &module;
    kernel_->max_threads = found->second->max_threads;
    scratch_ = take(8 * kLanes);
    kernel_->predicates = 2;  // one that nobody reads, and one that is true
    shared_ = kSharedStart;
    for (const Variable& v : module.variables) {
      if (v.space == Space::kShared && v.external) dynamic_align_ = std::max(dynamic_align_, v.align);
    }
    for (const auto& [key, f] : module.functions) {
      for (const Variable& v : f->variables) {
        if (v.space == Space::kShared && v.external) dynamic_align_ = std::max(dynamic_align_, v.align);
      }
    }
    for (const Variable& v : module.variables) {
      if (v.space == Space::kShared && !v.external) globals_[v.name] = place_shared(v);
      if (v.space == Space::kGlobal || v.space == Space::kConst) globals_[v.name] = place_global(v);
    }
    add(*found->second);
    for (size_t i = 0; i < functions_.size(); ++i) emit(*functions_[i]);
    // The dynamic part comes last, as aligned as any declaration asks.
    kernel_->dynamic_shared = static_cast<int>(rounded(shared_, dynamic_align_));
    kernel_->shared_bytes = kernel_->dynamic_shared - kSharedStart;
    kernel_->row_bytes = rows_, kernel_->local_bytes = rounded(local_, 16);
    patch();
    const size_t bytes = constants_.size();
    kernel_->constants.resize(bytes + 64);
    char* aligned =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(kernel_->constants.data()) + 63) & ~uintptr_t{63});
    std::copy(constants_.begin(), constants_.end(), aligned);
    kernel_->executed.resize(kernel_->code.size()), kernel_->work.resize(kernel_->code.size());
  }

  std::unique_ptr<Kernel> result() { return std::move(kernel_); }

 private:
  struct Place {
    RegisterPlan plan;
    int64_t rows = 0;
    int predicates = 0, begin = 0;
    std::map<std::string, uint64_t> variables;  // addresses in their own space, generic ones of parameters
    std::map<std::string, int> params;          // of the entry: offsets
    std::map<std::string, std::pair<std::string, size_t>> passed;  // a call's variables: function, operand
  };

  class One;

  int64_t take(int64_t bytes) {
    const int64_t at = rows_;
    rows_ += rounded(bytes, 64);
    return at;
  }

  uint64_t place_shared(const Variable& v) {
    shared_ = rounded(shared_, v.align);
    const uint64_t at = shared_;
    shared_ += v.bytes;
    return at;
  }

  static uint64_t place_global(const Variable& v) {
    static std::map<const Variable*, void*> placed;  // once a module
    void*& data = placed[&v];
    if (!data) {
      data = device_malloc(v.bytes);
      std::memset(data, 0, v.bytes);
      std::copy(v.initial.begin(), v.initial.end(), static_cast<uint8_t*>(data));
    }
    return reinterpret_cast<uint64_t>(data);
  }

  uint64_t place_local(int64_t bytes, int64_t align) {
    local_ = rounded(local_, std::max<int64_t>(align, 8));
    const uint64_t at = local_;
    local_ += bytes;
    return at;
  }

  // Gives a function its registers and memory. Functions do not call themselves, so each has them once.
  Place& add(const Function& f) {
    auto found = places_.find(f.name);
    if (found != places_.end()) return found->second;
    if (!f.defined) throw Fault("function " + f.name + " has no body");
    Place& p = places_[f.name];
    functions_.push_back(&f);
    p.plan = plan_registers(f);
    p.rows = take(p.plan.bytes);
    p.predicates = kernel_->predicates;
    kernel_->predicates += p.plan.predicates;
    int64_t at = 0;
    for (const Variable& v : f.params) {
      if (f.entry) {
        at = rounded(at, v.align);
        p.params[v.name] = static_cast<int>(at);
        kernel_->param_offset.push_back(static_cast<int>(at));
        kernel_->param_bytes.push_back(static_cast<int>(v.bytes));
        at += v.bytes;
      } else {
        p.variables[v.name] = place_local(v.bytes, v.align);
      }
    }
    for (const Variable& v : f.results) p.variables[v.name] = place_local(v.bytes, v.align);
    if (f.entry) {
      kernel_->params.assign(at + 128, 0);
      param_base_ =
          reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(kernel_->params.data()) + 63) & ~uintptr_t{63});
      for (int& offset : kernel_->param_offset) offset += static_cast<int>(param_base_ - kernel_->params.data());
      add_region(param_base_, at, "the kernel's parameters", true);
    }
    for (const Variable& v : f.variables) {
      if (v.space == Space::kLocal) p.variables[v.name] = place_local(v.bytes, v.align);
      if (v.space == Space::kShared && !v.external) p.variables[v.name] = place_shared(v);
    }
    for (const Instruction& in : f.code) {
      if (in.op[0] == "call") calls(p, in);
    }
    return p;
  }

  void calls(Place& p, const Instruction& in) {
    size_t i = 0;
    std::vector<std::string> results, params;
    auto names = [&](std::vector<std::string>* to) {
      for (const Operand& o : in.args[i].parts) to->push_back(o.name);
      ++i;
    };
    if (in.args[i].kind == Operand::kVector) names(&results);
    const std::string callee = in.args[i++].name;
    if (i < in.args.size() && in.args[i].kind == Operand::kVector) names(&params);
    for (size_t j = 0; j < results.size(); ++j) p.passed[results[j]] = {callee, j + 1000};
    for (size_t j = 0; j < params.size(); ++j) p.passed[params[j]] = {callee, j};
    auto found = module_.functions.find(callee);
    if (found == module_.functions.end()) throw Fault("call of unknown function " + callee);
    add(*found->second);
  }

  Ref constant(uint64_t bits, int bytes) {
    auto [it, fresh] = known_.insert({{bits, bytes == 8}, 0});
    if (fresh) {
      it->second = static_cast<Ref>(constants_.size()) | 1;
      const size_t width = bytes == 8 ? 8 : 4;
      for (int i = 0; i < kLanes; ++i) {
        const char* from = reinterpret_cast<const char*>(&bits);
        constants_.insert(constants_.end(), from, from + width);
      }
    }
    return it->second;
  }

  void emit(const Function& f);
  void patch() {
    for (const auto& [index, name] : jumps_) kernel_->code[index].number = places_.at(name).begin;
  }

  const Module& module_;
  std::unique_ptr<Kernel> kernel_;
  std::vector<const Function*> functions_;
  std::map<std::string, Place> places_;
  std::map<std::string, uint64_t> globals_;
  std::map<std::pair<uint64_t, bool>, Ref> known_;
  std::map<std::string, Ref> specials_;
  std::vector<char> constants_;
  std::vector<std::pair<size_t, std::string>> jumps_;  // calls, to be filled in
  char* param_base_ = nullptr;
  int64_t rows_ = 0, shared_ = 0, local_ = 0, scratch_ = 0, dynamic_align_ = 16;
};

Special special_of(const std::string& name, const Lowering& l) {
  static const std::map<std::string, Special> known = {
      {"%tid.x", Special::kTidX},
      {"%tid.y", Special::kTidY},
      {"%tid.z", Special::kTidZ},
      {"%ntid.x", Special::kNtidX},
      {"%ntid.y", Special::kNtidY},
      {"%ntid.z", Special::kNtidZ},
      {"%ctaid.x", Special::kCtaidX},
      {"%ctaid.y", Special::kCtaidY},
      {"%ctaid.z", Special::kCtaidZ},
      {"%nctaid.x", Special::kNctaidX},
      {"%nctaid.y", Special::kNctaidY},
      {"%nctaid.z", Special::kNctaidZ},
      {"%laneid", Special::kLane},
      {"%warpid", Special::kWarp},
      {"%nwarpid", Special::kNwarp},
      {"%smid", Special::kSm},
      {"%lanemask_lt", Special::kLaneLt},
      {"%lanemask_le", Special::kLaneLe},
      {"%lanemask_gt", Special::kLaneGt},
      {"%lanemask_ge", Special::kLaneGe},
      {"%lanemask_eq", Special::kLaneEq},
      {"%cluster_ctarank", Special::kClusterRank},
      {"%cluster_nctarank", Special::kClusterSize},
      {"%clusterid.x", Special::kClusterX},
      {"%clusterid.y", Special::kClusterY},
      {"%clusterid.z", Special::kClusterZ},
      {"%nclusterid.x", Special::kNclusterX},
      {"%nclusterid.y", Special::kNclusterY},
      {"%nclusterid.z", Special::kNclusterZ},
      {"%cluster_ctaid.x", Special::kClusterCtaX},
      {"%cluster_ctaid.y", Special::kClusterCtaY},
      {"%cluster_ctaid.z", Special::kClusterCtaZ},
      {"%cluster_nctaid.x", Special::kClusterNctaX},
      {"%cluster_nctaid.y", Special::kClusterNctaY},
      {"%cluster_nctaid.z", Special::kClusterNctaZ},
      {"%dynamic_smem_size", Special::kDynamicShared},
      {"%total_smem_size", Special::kTotalShared},
  };
  auto found = known.find(name);
  if (found == known.end()) l.unknown("names " + name + ", which is not known to the emulator");
  return found->second;
}

class Decoder::One : public Lowering {
 public:
  One(Decoder& d, const Function& f, Place& p, const Instruction& in, Inst* out)
      : Lowering(in, out), d_(d), f_(f), p_(p) {}

  Ref value(const Operand& o, int bytes) override {
    switch (o.kind) {
      case Operand::kRegister:
        return row(o.reg, bytes);
      case Operand::kImmediate: {
        uint64_t bits = o.bits;
        if (o.is_double && bytes == 4) {  // a float that was written as a double
          double wide;
          std::memcpy(&wide, &bits, 8);
          const float narrow = static_cast<float>(wide);
          uint32_t narrow_bits;
          std::memcpy(&narrow_bits, &narrow, 4);
          bits = narrow_bits;
        }
        if (bytes < 8) bits &= (uint64_t{1} << (8 * std::max(bytes, 1))) - 1;
        return d_.constant(bits, bytes);
      }
      case Operand::kName: {
        if (o.name[0] == '%') return special(o.name);
        return d_.constant(address_of(o.name) + o.offset, bytes);
      }
      default:
        unknown("has an operand of a kind not known to the emulator");
    }
  }

  Ref target(const Operand& o, int bytes) override {
    if (o.kind == Operand::kName && o.name == "_") return static_cast<Ref>(d_.scratch_);
    if (o.kind != Operand::kRegister) unknown("has no register as its target");
    return row(o.reg, bytes);
  }

  int truth(const Operand& o) override {
    if (o.kind == Operand::kImmediate) return o.bits != 0 ? 2 : 3;
    return 2 * truth_target(o) + o.negated;
  }
  int truth_target(const Operand& o) override {
    if (o.kind == Operand::kName && o.name == "_") return 0;
    if (o.kind != Operand::kRegister || f_.registers[o.reg].bytes != 0) unknown("has no predicate where one belongs");
    return p_.predicates + p_.plan.slot[o.reg];
  }
  int label(const std::string& name) override {
    auto found = f_.labels.find(name);
    if (found == f_.labels.end()) unknown("goes to unknown label " + name);
    return p_.begin + found->second;
  }

  void address(const Operand& o, int slot) override {
    if (o.kind != Operand::kMemory) unknown("has no address where one belongs");
    const Operand& base = o.parts[0];
    out.number = o.offset;
    out.wide = base.kind != Operand::kRegister || f_.registers[base.reg].bytes == 8;
    out.r[slot] = value(base, out.wide ? 8 : 4);
  }

  Ref plain_address(const Operand& o, bool* wide) override {
    if (o.kind != Operand::kMemory || o.offset)
      unknown("has an address with an offset, which is not known to the emulator");
    const Operand& base = o.parts[0];
    *wide = base.kind != Operand::kRegister || f_.registers[base.reg].bytes == 8;
    return value(base, *wide ? 8 : 4);
  }

  int64_t parameter(const Operand& o) override {
    if (o.kind != Operand::kMemory || o.parts[0].kind != Operand::kName) return -1;
    auto found = p_.params.find(o.parts[0].name);
    return found == p_.params.end() ? -1 : d_.param_base_ - d_.kernel_->params.data() + found->second + o.offset;
  }

  int callee(const std::string& name) override {
    d_.jumps_.push_back({d_.kernel_->code.size(), name});
    return 0;
  }

  int bytes_of(const Operand& o) override { return o.reg >= 0 ? f_.registers[o.reg].bytes : 0; }

 private:
  Ref row(int reg, int bytes) {
    const int own = f_.registers[reg].bytes;
    if (own == 0 || (own == 8) != (bytes == 8)) {
      unknown("takes register " + f_.registers[reg].name + " as one of " + std::to_string(bytes) + " bytes");
    }
    return static_cast<Ref>(p_.rows + p_.plan.slot[reg]);
  }

  Ref special(const std::string& name) {
    auto found = d_.specials_.find(name);
    if (found != d_.specials_.end()) return found->second;
    const Special which = special_of(name, *this);
    const Ref at = static_cast<Ref>(d_.take(4 * kLanes));
    d_.kernel_->specials.push_back({which, at});
    return d_.specials_[name] = at;
  }

  uint64_t address_of(const std::string& name) {
    if (auto v = p_.variables.find(name); v != p_.variables.end()) return v->second;
    if (auto v = d_.globals_.find(name); v != d_.globals_.end()) return v->second;
    if (auto v = p_.params.find(name); v != p_.params.end()) {
      return reinterpret_cast<uint64_t>(d_.param_base_) + v->second;
    }
    if (auto v = p_.passed.find(name); v != p_.passed.end()) {
      const Function& f = *d_.module_.functions.at(v->second.first);
      const size_t i = v->second.second;
      return d_.places_.at(f.name).variables.at(i >= 1000 ? f.results[i - 1000].name : f.params[i].name);
    }
    for (const auto* list : {&f_.variables, &d_.module_.variables}) {
      for (const Variable& v : *list) {
        if (v.name != name || !v.external) continue;
        return rounded(d_.shared_, d_.dynamic_align_);
      }
    }
    unknown("names unknown " + name);
  }

  Decoder& d_;
  const Function& f_;
  Place& p_;
};

void Decoder::emit(const Function& f) {
  Place& p = places_.at(f.name);
  p.begin = static_cast<int>(kernel_->code.size());
  for (const Instruction& in : f.code) {
    Inst out;
    One one(*this, f, p, in, &out);
    if (in.guard >= 0) out.guard = 2 * (p.predicates + p.plan.slot[in.guard]) + in.guard_negated;
    bool known = false;
    for (auto lower : {lower_integer, lower_float, lower_compare, lower_convert, lower_move, lower_memory, lower_atomic,
                       lower_warp, lower_control, lower_barrier, lower_copy, lower_matrix, lower_wgmma}) {
      if ((known = lower(one))) break;
    }
    if (!known || !out.run) one.unknown();
    out.source = static_cast<int>(kernel_->instructions.size());
    kernel_->code.push_back(std::move(out));
    kernel_->instructions.push_back(&in);
    kernel_->function_of.push_back(f.name);
  }
}

}  // namespace

std::unique_ptr<Kernel> decode(const Module& module, const std::string& name) { return Decoder(module, name).result(); }

}  // namespace emulator
