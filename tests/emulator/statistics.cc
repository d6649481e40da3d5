#include "statistics.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace emulator {
namespace {

constexpr size_t kKinds = static_cast<size_t>(Kind::kCount);
const char* const kNames[kKinds] = {"integer, address",
                                    "float32 and narrower",
                                    "float64",
                                    "conversions",
                                    "shared loads",
                                    "shared stores",
                                    "global loads",
                                    "global stores, atomics",
                                    "local memory",
                                    "parameters",
                                    "shuffles, votes",
                                    "barriers, fences",
                                    "tensor",
                                    "branches, calls",
                                    "asynchronous copies",
                                    "other"};

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 && text ? text : name;
  std::free(text);
  // Without the parameters.
  const size_t open = result.rfind('(');
  if (open != std::string::npos && result.compare(open, 22, "((anonymous namespace)") != 0) result.resize(open);
  return result;
}

double per(double a, double b) { return b > 0 ? a / b : 0.0; }

}  // namespace

void Statistics::block(const Block& b) {
  const Kernel& k = *machine.launch.kernel;
  Kinds now{};
  for (size_t i = 0; i < k.code.size(); ++i) now[static_cast<size_t>(k.code[i].kind)] += k.executed[i];
  for (size_t i = 0; i < kKinds; ++i) {
    const uint64_t own = now[i] - before_[i];
    least_kinds_[i] = blocks_ ? std::min(least_kinds_[i], own) : own;
    most_kinds_[i] = std::max(most_kinds_[i], own);
  }
  single_ = single_ && !machine.launch.cooperative && b.cluster->blocks.size() == 1;
  before_ = now;
  ++blocks_;
  warps_.resize(b.warps.size());
  for (size_t i = 0; i < warps_.size(); ++i) warps_[i] += b.warps[i].executed;
  least_ = std::min(least_, b.executed), most_ = std::max(most_, b.executed);
}

void Statistics::print() const {
  const Launch& l = machine.launch;
  const Kernel& k = *l.kernel;
  const Counters& c = machine.counters;
  const double blocks = static_cast<double>(std::max<uint64_t>(blocks_, 1));
  uint64_t total = 0;
  for (uint64_t n : before_) total += n;
  std::fprintf(stderr, "-- %s\n   grid %ux%ux%u, %llu threads, cluster %llu, %lld + %u bytes of shared memory\n",
               demangled(k.name).c_str(), l.grid.x, l.grid.y, l.grid.z,
               static_cast<unsigned long long>(l.threads.count()), static_cast<unsigned long long>(l.cluster.count()),
               static_cast<long long>(k.shared_bytes), l.dynamic_shared);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  std::fprintf(stderr, "   emulated in %.3f s, %.1f million warp instructions a second\n", seconds,
               per(total, seconds) / 1e6);
  std::fprintf(stderr, "   %-24s %14s %12s %12s %12s\n", "warp instructions", "all", "a block", "least", "most");
  auto row = [&](const char* name, uint64_t all, uint64_t least, uint64_t most) {
    std::fprintf(stderr, "   %-24s %14llu %12.1f", name, static_cast<unsigned long long>(all), all / blocks);
    if (single_) {
      std::fprintf(stderr, " %12llu %12llu\n", static_cast<unsigned long long>(least),
                   static_cast<unsigned long long>(most));
    } else {
      std::fprintf(stderr, "\n");
    }
  };
  row("all", total, least_, most_);
  for (size_t i = 0; i < kKinds; ++i) {
    if (before_[i]) row(kNames[i], before_[i], least_kinds_[i], most_kinds_[i]);
  }
  std::fprintf(stderr, "   a block's warps:");
  for (uint64_t n : warps_) std::fprintf(stderr, " %.0f", n / blocks);
  std::fprintf(stderr, "\n   shared memory: %llu accesses, %llu wavefronts (%.2f each, %.2f without bank conflicts)\n",
               static_cast<unsigned long long>(c.shared_accesses), static_cast<unsigned long long>(c.shared_wavefronts),
               per(c.shared_wavefronts, c.shared_accesses), per(c.shared_least, c.shared_accesses));
  std::fprintf(stderr,
               "   global memory: %llu accesses, %llu sectors of 32 bytes (%.2f each); bulk copies %llu bytes\n",
               static_cast<unsigned long long>(c.global_accesses), static_cast<unsigned long long>(c.global_sectors),
               per(c.global_sectors, c.global_accesses), static_cast<unsigned long long>(c.bulk_bytes));
  std::fprintf(stderr, "   tensor cores: %.6g operations\n", c.tensor_flops);
  const char* mode = std::getenv("EMU_STATS");
  if (!mode || std::strcmp(mode, "lines") != 0) return;
  struct Line {
    uint64_t all = 0, accesses[2] = {}, work[2] = {};  // of shared and of global memory
    std::array<uint64_t, kKinds> kinds{};
  };
  std::map<std::pair<int, int>, Line> lines;
  for (size_t i = 0; i < k.code.size(); ++i) {
    const Instruction& in = *k.instructions[k.code[i].source];
    Line& line = lines[{in.file, in.line}];
    line.all += k.executed[i];
    line.kinds[static_cast<size_t>(k.code[i].kind)] += k.executed[i];
    if (!k.work[i]) continue;
    const Kind kind = k.code[i].kind;
    const bool global = kind == Kind::kGlobalLoad || kind == Kind::kGlobalStore || kind == Kind::kCopy;
    line.accesses[global] += k.executed[i], line.work[global] += k.work[i];
  }
  std::vector<std::pair<std::pair<int, int>, Line>> sorted(lines.begin(), lines.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second.all > b.second.all; });
  for (size_t i = 0; i < std::min<size_t>(40, sorted.size()); ++i) {
    const auto& [at, line] = sorted[i];
    if (!line.all) break;
    auto file = k.module->files.find(at.first);
    std::string name = file == k.module->files.end() ? "?" : file->second;
    name = name.substr(name.rfind('/') + 1);
    std::fprintf(stderr, "   %5.1f %% %12llu  %s:%d ", 100.0 * per(line.all, total),
                 static_cast<unsigned long long>(line.all), name.c_str(), at.second);
    for (size_t j = 0; j < kKinds; ++j) {
      if (line.kinds[j] * 10 >= line.all && line.all)
        std::fprintf(stderr, " %s %.0f %%;", kNames[j], 100.0 * line.kinds[j] / line.all);
    }
    for (int j = 0; j < 2; ++j) {
      if (!line.work[j]) continue;
      std::fprintf(stderr, " %.2f %s an access;", per(line.work[j], line.accesses[j]), j ? "sectors" : "wavefronts");
    }
    std::fprintf(stderr, "\n");
  }
}

}  // namespace emulator
