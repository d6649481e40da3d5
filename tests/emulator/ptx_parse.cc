// The parser of ptx.h: one pass over tokens, with scopes for what inline assembly declares.
#include <cstring>
#include <utility>

#include "ptx.h"
#include "ptx_tokens.h"

namespace emulator {

std::string Instruction::mnemonic() const {
  std::string joined;
  for (const auto& part : op) joined += (joined.empty() ? "" : ".") + part;
  return joined;
}

bool Instruction::has(const char* part) const {
  for (const auto& each : op) {
    if (each == part) return true;
  }
  return false;
}

namespace {

int type_bytes(const std::string& type) {
  if (type == "pred") return 0;
  const int bits = std::stoi(type.substr(1));
  return bits / 8;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : tokens_(text), module_(new Module) {}

  std::unique_ptr<Module> run() {
    while (!tokens_.at_end()) top_level();
    return std::move(module_);
  }

 private:
  struct Scope {
    std::map<std::string, int> registers;        // exact names
    std::map<std::string, int> ranges;           // prefixes of "%r<100>": bytes of one
    std::map<std::string, std::string> renamed;  // labels and .param variables of the scope
  };

  [[noreturn]] void fail(const std::string& what) const { tokens_.fail(what); }

  void top_level() {
    const std::string word = tokens_.next();
    if (word == ".version" || word == ".address_size") {
      tokens_.next();
    } else if (word == ".target") {
      tokens_.next();
      while (tokens_.accept(",")) tokens_.next();
    } else if (word == ".file") {
      const int number = std::stoi(tokens_.next());
      module_->files[number] = tokens_.next();
      while (tokens_.accept(",")) tokens_.next();
    } else if (word == ".section") {
      tokens_.skip_section();
    } else if (word == ".visible" || word == ".weak" || word == ".common") {
    } else if (word == ".extern") {
      external_ = true;
    } else if (word == ".entry" || word == ".func") {
      function(word == ".entry");
      external_ = false;
    } else if (word == ".global" || word == ".const" || word == ".shared") {
      module_->variables.push_back(variable(space_of(word)));
      module_->variables.back().external = external_;
      external_ = false;
      initial_value(&module_->variables.back());
      tokens_.expect(";");
    } else {
      fail("unknown directive " + word);
    }
  }

  static Space space_of(const std::string& word) {
    if (word == ".shared") return Space::kShared;
    if (word == ".local") return Space::kLocal;
    if (word == ".param") return Space::kParam;
    return word == ".const" ? Space::kConst : Space::kGlobal;
  }

  // After ".shared" and the like: ".align 16 .b8 name[128]".
  Variable variable(Space space) {
    Variable v;
    v.space = space;
    int64_t element = 1;
    for (;;) {
      const std::string word = tokens_.next();
      if (word == ".align") {
        v.align = std::stoll(tokens_.next());
      } else if (word == ".ptr" || word == ".global" || word == ".attribute") {
      } else if (word[0] == '.') {
        element = std::max(1, type_bytes(word.substr(1)));
        v.align = std::max<int64_t>(v.align, element);
      } else {
        v.name = word;
        break;
      }
    }
    v.bytes = element;
    if (tokens_.accept("[")) {
      v.bytes = tokens_.peek() == "]" ? 0 : element * std::stoll(tokens_.next());
      tokens_.expect("]");
    }
    return v;
  }

  void initial_value(Variable* v) {
    if (!tokens_.accept("=")) return;
    v->initial.resize(v->bytes);
    size_t at = 0;
    const bool list = tokens_.accept("{");
    do {
      const uint64_t bits = immediate().bits;
      const size_t size = v->bytes <= 8 && !list ? v->bytes : v->align;
      if (at + size <= v->initial.size()) std::memcpy(&v->initial[at], &bits, size);
      at += size;
    } while (list && tokens_.accept(","));
    if (list) tokens_.expect("}");
  }

  std::vector<Variable> parameters() {
    std::vector<Variable> list;
    while (!tokens_.accept(")")) {
      tokens_.expect(".param");
      list.push_back(variable(Space::kParam));
      tokens_.accept(",");
    }
    return list;
  }

  void function(bool entry) {
    std::vector<Variable> results;
    if (tokens_.accept("(")) results = parameters();
    const std::string name = tokens_.next();
    auto& slot = module_->functions[name];
    if (!slot) slot.reset(new Function);
    f_ = slot.get();
    f_->name = name, f_->entry = entry, f_->results = results;
    if (tokens_.accept("(")) f_->params = parameters();
    while (tokens_.peek() != "{" && tokens_.peek() != ";") {
      if (tokens_.next() != ".maxntid") continue;
      f_->max_threads = std::stoi(tokens_.next());
      while (tokens_.accept(",")) f_->max_threads *= std::stoi(tokens_.next());
    }
    if (tokens_.accept(";")) return;
    tokens_.expect("{");
    f_->defined = true;
    scopes_.assign(1, Scope{});
    file_ = line_ = 0;
    while (!scopes_.empty()) statement();
  }

  void statement() {
    const std::string word = tokens_.peek();
    if (word == "{") {
      tokens_.next();
      // Labels of the scope are known only after it, but a jump may come first: every name gets the scope's own.
      scopes_.emplace_back();
      for (const auto& label : tokens_.labels_of_scope()) {
        scopes_.back().renamed[label] = label + "#" + std::to_string(++fresh_);
      }
    } else if (word == "}") {
      tokens_.next();
      scopes_.pop_back();
    } else if (word == ".loc") {
      location();
    } else if (word == ".pragma") {
      while (!tokens_.accept(";")) tokens_.next();
    } else if (word == ".reg") {
      registers();
    } else if (word == ".shared" || word == ".local" || word == ".param") {
      tokens_.next();
      Variable v = variable(space_of(word));
      if (word == ".param") {
        const std::string unique = v.name + "#" + std::to_string(++fresh_);
        scopes_.back().renamed[v.name] = unique;
        v.name = unique;
      }
      f_->variables.push_back(v);
      tokens_.expect(";");
    } else if (tokens_.is_label()) {
      f_->labels[renamed(tokens_.next())] = static_cast<int>(f_->code.size());
      tokens_.expect(":");
    } else {
      instruction();
    }
  }

  void location() {
    tokens_.next();
    file_ = std::stoi(tokens_.next());
    line_ = std::stoi(tokens_.next());
    tokens_.next();
    if (tokens_.peek() != ",") return;
    // An inlined function: where it is called is not looked at.
    tokens_.next(), tokens_.next(), tokens_.next();
    if (tokens_.accept("+")) tokens_.next();
    tokens_.expect(",");
    for (int i = 0; i < 4; ++i) tokens_.next();
  }

  void registers() {
    tokens_.next();
    const std::string type = tokens_.next();
    const int bytes = type_bytes(type.substr(1));
    do {
      const std::string name = tokens_.next();
      if (tokens_.accept("<")) {
        scopes_.back().ranges[name] = bytes;
        tokens_.next();
        tokens_.expect(">");
      } else {
        scopes_.back().registers[name] = add_register(name, bytes);
      }
    } while (tokens_.accept(","));
    tokens_.expect(";");
  }

  int add_register(const std::string& name, int bytes) {
    f_->registers.push_back({name, bytes});
    return static_cast<int>(f_->registers.size()) - 1;
  }

  int find_register(const std::string& name) {
    for (size_t i = scopes_.size(); i-- > 0;) {
      auto found = scopes_[i].registers.find(name);
      if (found != scopes_[i].registers.end()) return found->second;
      const size_t digits = name.find_last_not_of("0123456789") + 1;
      if (digits >= name.size()) continue;
      auto range = scopes_[i].ranges.find(name.substr(0, digits));
      if (range != scopes_[i].ranges.end()) {
        return scopes_[i].registers[name] = add_register(name, range->second);
      }
    }
    return -1;
  }

  std::string renamed(const std::string& name) const {
    for (size_t i = scopes_.size(); i-- > 0;) {
      auto found = scopes_[i].renamed.find(name);
      if (found != scopes_[i].renamed.end()) return found->second;
    }
    return name;
  }

  void instruction() {
    Instruction in;
    in.file = file_, in.line = line_, in.ptx_line = tokens_.line();
    if (tokens_.accept("@")) {
      in.guard_negated = tokens_.accept("!");
      in.guard = find_register(tokens_.next());
      if (in.guard < 0) fail("unknown predicate");
    }
    const std::string op = tokens_.next();
    for (size_t at = 0; at <= op.size();) {
      const size_t dot = std::min(op.find('.', at), op.size());
      in.op.push_back(op.substr(at, dot - at));
      at = dot + 1;
    }
    while (!tokens_.accept(";")) {
      in.args.push_back(operand());
      tokens_.accept(",");
    }
    f_->code.push_back(std::move(in));
  }

  Operand operand() {
    Operand o;
    if (tokens_.accept("!")) {
      o = operand();
      o.negated = true;
      return o;
    }
    const bool memory = tokens_.accept("["), vector = !memory && (tokens_.accept("{") || tokens_.accept("("));
    if (memory || vector) {
      o.kind = memory ? Operand::kMemory : Operand::kVector;
      while (!tokens_.accept("]") && !tokens_.accept("}") && !tokens_.accept(")")) {
        o.parts.push_back(operand());
        if (memory && tokens_.accept("+")) o.parts.back().offset = static_cast<int64_t>(immediate().bits);
        if (memory) o.offset += std::exchange(o.parts.back().offset, 0);
        tokens_.accept(",");
      }
      return o;
    }
    const std::string word = tokens_.peek();
    if (word == "-" || (word[0] >= '0' && word[0] <= '9')) return immediate();
    tokens_.next();
    o.reg = find_register(word);
    o.kind = o.reg >= 0 ? Operand::kRegister : Operand::kName;
    o.name = o.reg >= 0 ? word : renamed(word);
    if (tokens_.accept("|")) {
      o.second = find_register(tokens_.next());  // "_" is none
    } else if (o.kind == Operand::kName && tokens_.accept("+")) {
      o.offset = static_cast<int64_t>(immediate().bits);
    }
    return o;
  }

  Operand immediate() {
    Operand o;
    o.kind = Operand::kImmediate;
    const bool minus = tokens_.accept("-");
    std::string word = tokens_.next();
    if (word.size() > 2 && word[0] == '0' && (word[1] == 'f' || word[1] == 'F')) {
      o.bits = std::stoull(word.substr(2), nullptr, 16);
    } else if (word.size() > 2 && word[0] == '0' && (word[1] == 'd' || word[1] == 'D')) {
      o.bits = std::stoull(word.substr(2), nullptr, 16);
      o.is_double = true;
    } else if (word.find('.') != std::string::npos) {
      const double value = std::stod(word);
      std::memcpy(&o.bits, &value, 8);
      o.is_double = true;
    } else {
      while (word.back() == 'U' || word.back() == 'u' || word.back() == 'L') word.pop_back();
      o.bits = std::stoull(word, nullptr, 0);
    }
    if (minus) o.bits = ~o.bits + 1;
    return o;
  }

  Tokens tokens_;
  std::unique_ptr<Module> module_;
  Function* f_ = nullptr;
  std::vector<Scope> scopes_;
  int fresh_ = 0, file_ = 0, line_ = 0;
  bool external_ = false;
};

}  // namespace

std::unique_ptr<Module> parse_ptx(const std::string& text) { return Parser(text).run(); }

}  // namespace emulator
