// Callers' streams, and moments on streams.
#include "cuda_streams.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_check.h"

namespace deltafuse::ep {
namespace {

struct UserStreams {
  std::mutex mutex;
  std::vector<std::pair<int, cudaStream_t>> streams;  // with the device's ordinal, once for each session
};

UserStreams& All() {
  static auto* const streams = new UserStreams;  // never destroyed: sessions may outlive static objects
  return *streams;
}

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  static_cast<void>(cudaGetLastError());  // the default stream, while another is captured
  return true;
}

}  // namespace

std::string CudaStreamRefusal(const Device& device, void* stream) {
  // The default streams belong to whichever device is current.
  if (reinterpret_cast<uintptr_t>(stream) <= 2) return "";
#if CUDART_VERSION >= 12080
  int ordinal = 0;
  const cudaError_t error = cudaStreamGetDevice(static_cast<cudaStream_t>(stream), &ordinal);
  if (error == cudaErrorCallRequiresNewerDriver || error == cudaErrorInsufficientDriver) {
    static_cast<void>(cudaGetLastError());  // the driver cannot tell
    return "";
  }
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return std::string("it is not a stream: ") + cudaGetErrorString(error);
  }
  if (ordinal != device.ordinal)
    return "it is a stream of cuda:" + std::to_string(ordinal) + ", the session is on " + device.name;
#else
  static_cast<void>(device);
#endif
  return "";
}

void AddUserStream(const Device& device, void* stream) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  All().streams.emplace_back(device.ordinal, static_cast<cudaStream_t>(stream));
}

void RemoveUserStream(const Device& device, void* stream) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  auto& streams = All().streams;
  const auto found = std::find(streams.begin(), streams.end(),
                               std::pair<int, cudaStream_t>(device.ordinal, static_cast<cudaStream_t>(stream)));
  if (found != streams.end()) streams.erase(found);
}

OrtStatus* WaitForUserStreams(const Api& api, int ordinal, bool* any) {
  std::vector<cudaStream_t> waited;
  {
    const std::lock_guard<std::mutex> lock(All().mutex);
    for (const auto& [device, stream] : All().streams)
      if (device == ordinal && std::find(waited.begin(), waited.end(), stream) == waited.end())
        waited.push_back(stream);
  }
  *any = !waited.empty();
  for (cudaStream_t stream : waited)
    if (!IsCapturing(stream)) DF_RETURN_IF_CUDA_ERROR(api, cudaStreamSynchronize(stream));
  return nullptr;
}

CudaMark MarkCuda(const Device& device, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  cudaEvent_t event = nullptr;
  if (cudaSetDevice(device.ordinal) != cudaSuccess || IsCapturing(on) || cudaEventCreate(&event) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  CudaMark mark(event, [](void* made) {
    if (cudaEventDestroy(static_cast<cudaEvent_t>(made)) != cudaSuccess) static_cast<void>(cudaGetLastError());
  });
  if (cudaEventRecord(event, on) == cudaSuccess) return mark;
  static_cast<void>(cudaGetLastError());
  return nullptr;
}

double CudaMillisecondsBetween(const CudaMark& begin, const CudaMark& end) {
  float milliseconds = 0;
  if (begin && end && cudaEventSynchronize(static_cast<cudaEvent_t>(end.get())) == cudaSuccess &&
      cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin.get()), static_cast<cudaEvent_t>(end.get())) ==
          cudaSuccess)
    return milliseconds;
  static_cast<void>(cudaGetLastError());
  return -1;
}

}  // namespace deltafuse::ep
