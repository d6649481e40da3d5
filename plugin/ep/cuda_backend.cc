#include "cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <utility>

#include "arena_allocator.h"
#include "build_info.h"
#include "cuda_check.h"
#include "cuda_streams.h"
#include "session.h"

namespace deltafuse::ep {
namespace {

// Machine code for "90a" runs on 9.0 alone, for "100f" on 10.0 and later ones of its family, for "80" on 8.0 and
// later 8.x.
bool RunsOn(const std::string& arch, int compute_capability) {
  const int number = std::atoi(arch.c_str());
  if (!arch.empty() && arch.back() == 'a') return number == compute_capability;
  return number / 10 == compute_capability / 10 && number <= compute_capability;
}

OrtStatus* CopyBytes(const Api& api, void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                     cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  DF_RETURN_IF_CUDA_ERROR(api, cudaMemcpyAsync(to, from, bytes, kind, stream));
  // The host side may be pinned, and whoever comes next on the host does not wait for this stream.
  if (kind != cudaMemcpyDeviceToDevice) DF_RETURN_IF_CUDA_ERROR(api, cudaStreamSynchronize(stream));
  return nullptr;
}

class DataTransfer final : public OrtDataTransferImpl {
 public:
  explicit DataTransfer(const Api& api) : OrtDataTransferImpl{}, api_(api) {
    ort_version_supported = kOrtApiVersion;
    Release = [](OrtDataTransferImpl* self) noexcept { delete static_cast<DataTransfer*>(self); };
    CanCopy = [](const OrtDataTransferImpl* self, const OrtMemoryDevice* from, const OrtMemoryDevice* to) noexcept {
      const auto* transfer = static_cast<const DataTransfer*>(self);
      const bool from_gpu = transfer->IsGpu(from), to_gpu = transfer->IsGpu(to);
      return (from_gpu || to_gpu) && (from_gpu || transfer->IsHost(from)) && (to_gpu || transfer->IsHost(to));
    };
    CopyTensors = [](OrtDataTransferImpl* self, const OrtValue** from, OrtValue** to, OrtSyncStream** streams,
                     size_t count) noexcept -> OrtStatus* {
      auto* transfer = static_cast<DataTransfer*>(self);
      return Guard(transfer->api_, [&]() -> OrtStatus* {
        for (size_t i = 0; i < count; ++i)
          DF_RETURN_IF_ERROR(transfer->Copy(from[i], to[i], streams ? streams[i] : nullptr));
        return nullptr;
      });
    };
  }

 private:
  bool IsGpu(const OrtMemoryDevice* device) const {
    return api_.ep->MemoryDevice_GetDeviceType(device) == OrtMemoryInfoDeviceType_GPU &&
           api_.ep->MemoryDevice_GetVendorId(device) == kNvidiaVendorId &&
           api_.ep->MemoryDevice_GetMemoryType(device) == OrtDeviceMemoryType_DEFAULT;
  }
  bool IsHost(const OrtMemoryDevice* device) const {
    return api_.ep->MemoryDevice_GetDeviceType(device) == OrtMemoryInfoDeviceType_CPU ||
           api_.ep->MemoryDevice_GetMemoryType(device) == OrtDeviceMemoryType_HOST_ACCESSIBLE;
  }
  OrtStatus* Copy(const OrtValue* from, OrtValue* to, OrtSyncStream* stream) const {
    const OrtMemoryDevice* from_device = api_.ep->Value_GetMemoryDevice(from);
    const OrtMemoryDevice* to_device = api_.ep->Value_GetMemoryDevice(to);
    const bool from_gpu = IsGpu(from_device), to_gpu = IsGpu(to_device);
    const void* source = nullptr;
    void* target = nullptr;
    size_t bytes = 0;
    DF_RETURN_IF_ERROR(api_.ort->GetTensorData(from, &source));
    DF_RETURN_IF_ERROR(api_.ort->GetTensorMutableData(to, &target));
    DF_RETURN_IF_ERROR(api_.ort->GetTensorSizeInBytes(from, &bytes));
    const uint32_t ordinal = api_.ep->MemoryDevice_GetDeviceId(to_gpu ? to_device : from_device);
    if (!target && bytes)
      return MakeStatus(api_, ORT_FAIL,
                        "deltafuse: no memory on cuda:" + std::to_string(ordinal) + " for a copy of " +
                            std::to_string(bytes) + " bytes" + LimitedArenasText(static_cast<int>(ordinal)));
    DF_RETURN_IF_CUDA_ERROR(api_, cudaSetDevice(static_cast<int>(ordinal)));
    bool user_streams = false;
    if (from_gpu && !stream) DF_RETURN_IF_ERROR(WaitForUserStreams(api_, static_cast<int>(ordinal), &user_streams));
    const cudaMemcpyKind kind =
        from_gpu ? (to_gpu ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost) : cudaMemcpyHostToDevice;
    void* handle = stream ? api_.ort->SyncStream_GetHandle(stream) : nullptr;
    DF_RETURN_IF_ERROR(CopyBytes(api_, target, source, bytes, kind, static_cast<cudaStream_t>(handle)));
    if (user_streams && kind == cudaMemcpyDeviceToDevice) DF_RETURN_IF_CUDA_ERROR(api_, cudaStreamSynchronize(nullptr));
    return nullptr;
  }

  const Api& api_;
};

class CopyKernel final : public OrtKernelImpl {
 public:
  CopyKernel(std::shared_ptr<Session> session, bool to_host)
      : OrtKernelImpl{}, session_(std::move(session)), api_(session_->api()), to_host_(to_host) {
    ort_version_supported = kOrtApiVersion;
    Compute = [](OrtKernelImpl* self, OrtKernelContext* context) noexcept -> OrtStatus* {
      auto* kernel = static_cast<CopyKernel*>(self);
      return Guard(kernel->api_, [&] { return kernel->Run(context); });
    };
    Release = [](OrtKernelImpl* self) noexcept { delete static_cast<CopyKernel*>(self); };
  }

 private:
  OrtStatus* Run(OrtKernelContext* context) const {
    const OrtValue* input = nullptr;
    DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetInput(context, 0, &input));
    if (!input) return MakeStatus(api_, ORT_INVALID_ARGUMENT, "a copy between host and device has no input");
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    const int64_t* dims = nullptr;
    size_t rank = 0;
    DF_RETURN_IF_ERROR(api_.ort->GetTensorElementTypeAndShapeDataReference(input, &type, &dims, &rank));
    OrtValue* output = nullptr;
    DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetOutput(context, 0, dims, rank, &output));
    const void* source = nullptr;
    void* target = nullptr;
    size_t bytes = 0;
    DF_RETURN_IF_ERROR(api_.ort->GetTensorSizeInBytes(input, &bytes));
    DF_RETURN_IF_ERROR(api_.ort->GetTensorData(input, &source));
    DF_RETURN_IF_ERROR(api_.ort->GetTensorMutableData(output, &target));
    if (!target && bytes) {
      const OrtMemoryInfo* memory = session_->device().memory;
      return NoMemory(api_, context, memory, "a copy of an input of the EP", bytes, nullptr);
    }
    DF_RETURN_IF_ERROR(UseCudaDevice(api_, session_->device()));
    void* stream = nullptr;
    DF_RETURN_IF_ERROR(session_->ComputeStream(context, &stream));
    return CopyBytes(api_, target, source, bytes, to_host_ ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                     static_cast<cudaStream_t>(stream));
  }

  const std::shared_ptr<Session> session_;
  const Api& api_;
  const bool to_host_;
};

}  // namespace

const char* CudaArchs() { return kBuiltCudaArchs; }

std::string CudaStatus() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return "";
  static_cast<void>(cudaGetLastError());
  return error == cudaSuccess ? "there is no CUDA device" : std::string("no CUDA device: ") + cudaGetErrorString(error);
}

std::string FindCudaDevice(const std::string& pci_bus_id, Device* device) {
  if (std::string status = CudaStatus(); !status.empty()) return status;
  int ordinal = 0;
  cudaError_t error = cudaSuccess;
  if (pci_bus_id.empty()) {
    int count = 0;
    error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count != 1)
      return "ORT gives no PCI bus id and CUDA sees " + std::to_string(count) + " devices";
  } else {
    error = cudaDeviceGetByPCIBusId(&ordinal, pci_bus_id.c_str());
  }
  int major = 0, minor = 0;
  cudaDeviceProp properties{};
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return "CUDA does not see the device " + pci_bus_id + ": " + cudaGetErrorString(error);
  }
  device->cuda = true;
  device->ordinal = ordinal;
  device->compute_capability = 10 * major + minor;
  device->name = "cuda:" + std::to_string(ordinal) + " (" + properties.name + ")";
  return "";
}

std::string MissingCode(const Device& device) {
  std::istringstream archs(kBuiltCudaArchs);
  for (std::string arch; std::getline(archs, arch, ';');)
    if (RunsOn(arch, device.compute_capability)) return "";
  return "this build has CUDA kernels for " + std::string(kBuiltCudaArchs) +
         " only, the device has compute capability " + std::to_string(device.compute_capability / 10) + "." +
         std::to_string(device.compute_capability % 10);
}

OrtStatus* UseCudaDevice(const Api& api, const Device& device) {
  DF_RETURN_IF_CUDA_ERROR(api, cudaSetDevice(device.ordinal));
  return nullptr;
}

OrtStatus* SynchronizeCuda(const Api& api, const Device& device, void* stream) {
  DF_RETURN_IF_ERROR(UseCudaDevice(api, device));
  DF_RETURN_IF_CUDA_ERROR(api, cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
  return nullptr;
}

OrtStatus* HashCudaMemory(const Api& api, const Device& device, void* stream, const void* data, size_t bytes,
                          ContentHash* hash) {
  // One piece is copied to pinned memory while the one before is hashed.
  constexpr size_t kPiece = size_t{8} << 20;
  DF_RETURN_IF_ERROR(UseCudaDevice(api, device));
  void* memory = nullptr;
  DF_RETURN_IF_CUDA_ERROR(api, cudaMallocHost(&memory, 2 * kPiece));
  const std::unique_ptr<void, cudaError_t (*)(void*)> owned(memory, cudaFreeHost);
  auto* pieces = static_cast<unsigned char*>(memory);
  const auto* from = static_cast<const unsigned char*>(data);
  const auto handle = static_cast<cudaStream_t>(stream);
  size_t waiting = 0;  // bytes of the piece that was copied last
  for (size_t at = 0, turn = 0; at < bytes || waiting; ++turn) {
    const size_t some = std::min(kPiece, bytes - at);
    DF_RETURN_IF_CUDA_ERROR(api, cudaStreamSynchronize(handle));
    if (some)
      DF_RETURN_IF_CUDA_ERROR(
          api, cudaMemcpyAsync(pieces + turn % 2 * kPiece, from + at, some, cudaMemcpyDeviceToHost, handle));
    hash->Add(pieces + (turn + 1) % 2 * kPiece, waiting);
    waiting = some;
    at += some;
  }
  return nullptr;
}

void* AllocateMappedMemory(size_t bytes) {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  std::memset(memory, 0, bytes);
  return memory;
}

void FreeMappedMemory(void* memory) {
  // At the process's end the driver may be gone: there is nothing to free then.
  if (cudaFreeHost(memory) != cudaSuccess) static_cast<void>(cudaGetLastError());
}

OrtStatus* CreateCudaDataTransfer(const Api& api, OrtDataTransferImpl** transfer) {
  *transfer = new DataTransfer(api);
  return nullptr;
}

OrtStatus* CreateCudaCopyKernel(std::shared_ptr<Session> session, bool to_host, OrtKernelImpl** kernel) {
  *kernel = new CopyKernel(std::move(session), to_host);
  return nullptr;
}

}  // namespace deltafuse::ep
