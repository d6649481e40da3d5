// From the tree of an instruction to what runs: operands become rows of registers, and a handler is chosen.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "machine.h"
#include "ptx.h"

namespace emulator {

// Rows for a function's registers: those that are never alive at once share one (registers.cc).
struct RegisterPlan {
  std::vector<int> slot;  // of each register: byte offset, or number of a predicate
  int64_t bytes = 0;
  int predicates = 0;
};
RegisterPlan plan_registers(const Function& f);

// What a lowering function sees of one instruction.
class Lowering {
 public:
  Lowering(const Instruction& instruction, Inst* inst) : in(instruction), out(*inst) {}
  virtual ~Lowering() = default;

  const Instruction& in;
  Inst& out;

  size_t size() const { return in.args.size(); }
  const Operand& arg(size_t i) const;
  const std::string& op(size_t i) const;  // "" past the end
  const std::string& type() const { return in.op.back(); }
  bool has(const char* part) const { return in.has(part); }

  // Operands by their width in bytes; immediates become constants of the kernel.
  virtual Ref value(const Operand& o, int bytes) = 0;
  virtual Ref target(const Operand& o, int bytes) = 0;  // "_" is a row that nobody reads
  virtual int truth(const Operand& o) = 0;              // 2 * predicate + negated
  virtual int truth_target(const Operand& o) = 0;       // number
  virtual int label(const std::string& name) = 0;
  // Sets out.r[slot], out.number and out.wide.
  virtual void address(const Operand& o, int slot) = 0;
  // The same for one of several addresses of an instruction: its value, offset included, must need no addition.
  virtual Ref plain_address(const Operand& o, bool* wide) = 0;
  // The offset in the kernel's parameters if it is one of them, else -1.
  virtual int64_t parameter(const Operand& o) = 0;
  virtual int callee(const std::string& name) = 0;
  virtual int bytes_of(const Operand& o) = 0;

  void run(Handler handler, Kind kind) { out.run = handler, out.kind = kind; }
  [[noreturn]] void unknown(const std::string& why = "not known to the emulator") const;
};

// Each tries its own opcodes and returns whether it knew the instruction.
bool lower_integer(Lowering& l);
bool lower_float(Lowering& l);
bool lower_compare(Lowering& l);
bool lower_convert(Lowering& l);
bool lower_move(Lowering& l);
bool lower_memory(Lowering& l);
bool lower_atomic(Lowering& l);
bool lower_warp(Lowering& l);
bool lower_control(Lowering& l);
bool lower_barrier(Lowering& l);
bool lower_copy(Lowering& l);
bool lower_matrix(Lowering& l);
bool lower_wgmma(Lowering& l);

int type_bytes(const std::string& type);  // "u16" -> 2

}  // namespace emulator
