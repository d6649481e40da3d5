// Our kernels in ORT's profile, and as NVTX ranges.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ort.h"
#include "session.h"

namespace deltafuse::ep {

// A profiler of the session: ORT asks for one a session, and one a run that is profiled by itself.
OrtStatus* CreateProfiler(std::shared_ptr<Session> session, OrtEpProfilerImpl** profiler);

// Lives while a kernel runs on the CPU or is queued on the GPU. It costs next to nothing where nobody profiles.
class KernelScope {
 public:
  using Arguments = std::vector<std::pair<std::string, std::string>>;
  // `name` must live as long as the scope. `stream` counts on CUDA.
  KernelScope(const Session& session, const char* name, const std::string& node, void* stream);
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

  // Whether arguments are worth putting together.
  bool profiled() const { return event_ != nullptr; }
  void SetArguments(Arguments arguments);

 private:
  struct Event;
  friend class Profiler;

  const Session& session_;
  std::unique_ptr<Event> event_;
  void* stream_;
};

}  // namespace deltafuse::ep
