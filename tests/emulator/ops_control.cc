// Jumps, calls, ends, and what has no meaning here.
#include "decode.h"
#include "dependence.h"
#include "lanes.h"

namespace emulator {
namespace {

const Inst* at(int64_t index) { return machine.launch.kernel->code.data() + index; }

void jump(Warp& w, const Inst& in, uint32_t lanes) { branch(w, at(in.number), lanes); }

void call(Warp& w, const Inst& in, uint32_t lanes) {
  if (lanes != w.lanes) {  // the others go on after the call
    w.others.push_back({w.pc, w.lanes & ~lanes, w.returns});
    w.lanes = lanes;
  }
  w.returns.push_back(w.pc);
  w.pc = at(in.number);
  if (!w.others.empty()) regroup(w);
}

void give_back(Warp& w, const Inst&, uint32_t lanes) {
  if (w.returns.empty()) return leave(w, lanes);
  if (lanes == w.lanes) {
    w.pc = w.returns.back();
    w.returns.pop_back();
  } else {
    Group g{w.returns.back(), lanes, w.returns};
    g.returns.pop_back();
    w.others.push_back(std::move(g));
    w.lanes &= ~lanes;
  }
  if (!w.others.empty()) regroup(w);
}

void end(Warp& w, const Inst&, uint32_t lanes) { leave(w, lanes); }

void trap(Warp& w, const Inst& in, uint32_t) { fault(w, in, "the kernel stopped itself"); }

void sleep(Warp& w, const Inst&, uint32_t) { pause(w); }

void wait_launches(Warp& w, const Inst&, uint32_t) {
  if (machine.dependence) wait_for_launches(w);
}
void start_launches(Warp& w, const Inst&, uint32_t) {
  if (machine.dependence) let_launches(w);
}

void proxy_fence(Warp& w, const Inst&, uint32_t) { w.fenced = ++machine.order; }

void gpu_fence(Warp& w, const Inst&, uint32_t) {
  if (machine.dependence) fence_global(w);
}

void nothing(Warp&, const Inst&, uint32_t) {}

}  // namespace

bool lower_control(Lowering& l) {
  const std::string& op = l.in.op[0];
  if (op == "bra") {
    l.out.number = l.label(l.arg(0).name);
    l.run(jump, Kind::kBranch);
  } else if (op == "call") {
    size_t i = l.arg(0).kind == Operand::kVector ? 1 : 0;
    l.out.number = l.callee(l.arg(i).name);
    l.run(call, Kind::kBranch);
  } else if (op == "ret") {
    l.run(give_back, Kind::kBranch);
  } else if (op == "exit") {
    l.run(end, Kind::kBranch);
  } else if (op == "trap" || op == "brkpt") {
    l.run(trap, Kind::kBranch);
  } else if (op == "nanosleep") {
    l.run(sleep, Kind::kOther);
  } else if (op == "griddepcontrol") {
    l.run(l.op(1) == "wait" ? wait_launches : start_launches, Kind::kOther);
  } else if (op == "fence" && l.op(1) == "proxy" && l.op(2) == "async") {
    l.run(proxy_fence, Kind::kBarrier);
  } else if ((op == "membar" && l.op(1) != "cta") || (op == "fence" && (l.has("gpu") || l.has("sys")))) {
    l.run(gpu_fence, Kind::kBarrier);
  } else if (op == "setmaxnreg" || op == "fence" || op == "membar" || op == "pmevent") {
    l.run(nothing, op == "fence" || op == "membar" ? Kind::kBarrier : Kind::kOther);
  } else {
    return false;
  }
  return true;
}

}  // namespace emulator
