// What the EP and the kernels of one session share: its options, its stream, its workspace.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "device.h"
#include "faults.h"
#include "ort.h"
#include "workspace.h"

namespace deltafuse::ep {

// The EP's options, as given with the provider.
struct Options {
  std::string session_tag;  // names the session for those who ask for its refusals and its memory
  size_t memory_limit = 0;  // bytes, of the EP's own arena; 0: none
  bool has_stream = false;  // user_compute_stream was given
  void* stream = nullptr;   // null: the default stream
  bool nvtx = false;
  bool share_weights = true;  // packed weights with other sessions of the process
};

// Reads and checks all options of the EP. A stream must be one of the device.
OrtStatus* ReadOptions(const Api& api, const Device& device, const OrtSessionOptions* session, Options* options);

class Session {
 public:
  Session(const Api& api, const Device& device, Options options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Api& api() const { return api_; }
  const Device& device() const { return device_; }
  const Options& options() const { return options_; }
  HeldWorkspace& workspace() { return workspace_; }
  // Kernels say that they come and go: the held workspace goes with the last of them.
  void KernelCreated() { ++kernels_; }
  void KernelGone() {
    if (--kernels_ == 0) workspace_.Release();
  }

  // The stream that the node's work belongs on: the CUDA EP's where there is one, else the caller's, else the default.
  OrtStatus* ComputeStream(const OrtKernelContext* context, void** stream);
  // Waits for the session's own stream.
  OrtStatus* Synchronize() const;
  // What kernels on the device find wrong in a call's values.
  Faults& faults() { return faults_; }
  // Fails with the first fault that the device has reported, if there is one.
  OrtStatus* FaultStatus(const char* before);
  // At the end of a run: waits for the session's own stream, and for any stream where nodes can report faults, if
  // `wait`; then looks for faults.
  OrtStatus* RunEnded(bool wait);

 private:
  const Api& api_;
  const Device& device_;
  const Options options_;
  std::atomic<bool> own_stream_used_{false};
  std::atomic<bool> stream_used_{false};
  std::atomic<void*> last_stream_{nullptr};
  Faults faults_;
  std::atomic<int> kernels_{0};
  HeldWorkspace workspace_;
};

// The session that a kernel is created for.
OrtStatus* FindSession(const Api& api, const OrtKernelInfo* info, std::shared_ptr<Session>* session);

}  // namespace deltafuse::ep
