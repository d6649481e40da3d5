// The CPU kernel for callers without C++: tests drive it through ctypes.
#include <atomic>
#include <thread>
#include <vector>

#include "moe.h"

namespace deltafuse::moe::cpu {
void SetInstructionSet(int limit);
}

namespace {

// `user` points to the number of threads.
void OnThreads(void* user, int64_t count, void (*fn)(void* ctx, int64_t i), void* ctx) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) fn(ctx, i);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < *static_cast<const int*>(user) && i < count; ++i) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
}

}  // namespace

extern "C" {

// sizeof(Params), to check a caller's mirror of it.
// Weak: the CUDA kernels' C face has the same one.
__attribute__((weak, visibility("default"))) size_t deltafuse_moe_params_bytes() {
  return sizeof(deltafuse::moe::Params);
}

__attribute__((visibility("default"))) const char* deltafuse_moe_cpu_refusal(const deltafuse::moe::Params* params) {
  return deltafuse::moe::cpu_refusal(*params);
}

__attribute__((visibility("default"))) size_t deltafuse_moe_cpu_workspace_bytes(const deltafuse::moe::Params* params) {
  return deltafuse::moe::cpu_workspace_bytes(*params);
}

__attribute__((visibility("default"))) const char* deltafuse_moe_cpu_forward(const deltafuse::moe::Params* params,
                                                                             void* workspace, int threads) {
  return deltafuse::moe::cpu_forward(*params, workspace, OnThreads, &threads);
}

// 0: the best of this processor, 1: no more than the compiler's default, 2: no more than AVX2.
__attribute__((visibility("default"))) void deltafuse_moe_cpu_instruction_set(int limit) {
  deltafuse::moe::cpu::SetInstructionSet(limit);
}

}  // extern "C"
