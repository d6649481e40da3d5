// Everything that needs the CUDA runtime. cuda_backend.cc implements it, cuda_none.cc stands in where a build has no
// CUDA.
#pragma once

#include <memory>
#include <string>

#include "device.h"
#include "ort.h"

namespace deltafuse::ep {

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

// Waits for the default stream, which is the EP's own when no other EP supplies one.
OrtStatus* SynchronizeCuda(const Api& api, const Device& device);

// Device memory. `caching` keeps freed blocks for the next request: only for one session, whose runs are ordered.
OrtStatus* CreateCudaAllocator(const Api& api, int ordinal, bool caching, OrtAllocator** allocator);
// The device's memory, of the same kind as the CUDA EP's: ORT puts no copies between the two.
OrtStatus* CreateCudaMemoryInfo(const Api& api, int ordinal, OrtMemoryInfo** info);
void ReleaseCudaAllocator(OrtAllocator* allocator);

// Copies between host and NVIDIA device memory.
OrtStatus* CreateCudaDataTransfer(const Api& api, OrtDataTransferImpl** transfer);

// The kernel of MemcpyFromHost and MemcpyToHost.
OrtStatus* CreateCudaCopyKernel(const Api& api, const Device& device, bool to_host, OrtKernelImpl** kernel);

}  // namespace deltafuse::ep
