// PTX text as a tree: functions, their registers, variables and instructions. Nothing is interpreted here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

struct Operand {
  enum Kind : uint8_t { kNone, kRegister, kImmediate, kMemory, kVector, kName };
  Kind kind = kNone;
  bool negated = false;        // !%p
  bool is_double = false;      // the immediate was written as a 64-bit float
  int reg = -1;                // number in Function::registers
  int second = -1;             // of "%r|%p"
  uint64_t bits = 0;           // immediate
  int64_t offset = 0;          // of an address
  std::string name;            // label, function, variable or special register
  std::vector<Operand> parts;  // of a vector; of an address: its base and what follows
};

struct Instruction {
  int guard = -1;
  bool guard_negated = false;
  std::vector<std::string> op;  // "add", "s32"
  std::vector<Operand> args;
  int ptx_line = 0;
  int file = 0, line = 0;  // of the source, 0 if unknown

  std::string mnemonic() const;
  bool has(const char* part) const;
};

enum class Space : uint8_t { kGlobal, kShared, kLocal, kParam, kConst };

struct Variable {
  std::string name;
  Space space = Space::kGlobal;
  bool external = false;
  int64_t bytes = 0, align = 1;
  std::vector<uint8_t> initial;
};

struct Register {
  std::string name;
  int bytes = 4;  // 0: a predicate
};

struct Function {
  std::string name;
  bool entry = false, defined = false;
  std::vector<Variable> params, results, variables;
  std::vector<Register> registers;
  std::vector<Instruction> code;
  std::map<std::string, int> labels;  // to the instruction that follows
  int max_threads = 0;
};

struct Module {
  std::map<std::string, std::unique_ptr<Function>> functions;
  std::vector<Variable> variables;
  std::map<int, std::string> files;
};

// Throws std::runtime_error with the line of what it does not understand.
std::unique_ptr<Module> parse_ptx(const std::string& text);

}  // namespace emulator
