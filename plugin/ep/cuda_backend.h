// Everything that needs the CUDA runtime. cuda_backend.cc implements it, cuda_none.cc stands in where a build has no
// CUDA.
#pragma once

#include <memory>
#include <string>

#include "arena.h"
#include "device.h"
#include "ort.h"
#include "shared_weights.h"

namespace deltafuse::ep {

class Session;

// Architectures that the kernels were compiled for, as given to the build: "90a" or "80;90a". "" without CUDA.
const char* CudaArchs();

// "" when there is a usable CUDA device, else why there is none.
std::string CudaStatus();

// Finds the CUDA device of this PCI bus id (ORT's order of devices is not CUDA's). An empty id finds the only device
// there is. Returns "" and fills all of `device` but its memory, or the reason why there is no such device.
std::string FindCudaDevice(const std::string& pci_bus_id, Device* device);

// "" when the build holds machine code for this device, else what it holds.
std::string MissingCode(const Device& device);

// Makes the device current for this thread.
OrtStatus* UseCudaDevice(const Api& api, const Device& device);

// Waits for the stream; null is the default stream.
OrtStatus* SynchronizeCuda(const Api& api, const Device& device, void* stream);

// "" when a caller's stream can be used on this device, else why not.
std::string CudaStreamRefusal(const Device& device, void* stream);
// Streams that callers gave to living sessions. ORT's copies of inputs and outputs are on the default stream, which
// does not wait for them by itself.
void AddUserStream(const Device& device, void* stream);
void RemoveUserStream(const Device& device, void* stream);

// Where device memory comes from: Arena::Backend for this device.
Arena::Backend CudaMemory(int ordinal);
// The device's memory, of the same kind as the CUDA EP's: ORT puts no copies between the two.
OrtStatus* CreateCudaMemoryInfo(const Api& api, int ordinal, OrtMemoryInfo** info);

// Host memory that every device can write at the same address, zeroed; null where there is none to be had.
void* AllocateMappedMemory(size_t bytes);
void FreeMappedMemory(void* memory);

// Adds bytes of the device's memory to a hash, after the work that is on the stream.
OrtStatus* HashCudaMemory(const Api& api, const Device& device, void* stream, const void* data, size_t bytes,
                          ContentHash* hash);

// Copies between host and NVIDIA device memory.
OrtStatus* CreateCudaDataTransfer(const Api& api, OrtDataTransferImpl** transfer);

// The kernel of MemcpyFromHost and MemcpyToHost.
OrtStatus* CreateCudaCopyKernel(std::shared_ptr<Session> session, bool to_host, OrtKernelImpl** kernel);

// A moment on a stream, for measuring. Null where there is none to be had, for example while the stream is captured.
using CudaMark = std::shared_ptr<void>;
CudaMark MarkCuda(const Device& device, void* stream);
// Waits for `end`. Negative where it cannot be told.
double CudaMillisecondsBetween(const CudaMark& begin, const CudaMark& end);

// NVTX ranges. NvtxMissing: "" or why this build has none.
const char* NvtxMissing();
void PushNvtxRange(const char* name);
void PopNvtxRange();

}  // namespace deltafuse::ep
