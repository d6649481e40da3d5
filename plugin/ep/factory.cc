#include "factory.h"

#include <string_view>
#include <utility>

#include "arena_allocator.h"
#include "build_info.h"
#include "cuda_backend.h"
#include "ep.h"

namespace deltafuse::ep {
namespace {

Factory* Self(OrtEpFactory* factory) { return static_cast<Factory*>(factory); }

std::string PciBusId(const Api& api, const OrtHardwareDevice* hardware) {
  const OrtKeyValuePairs* metadata = api.ort->HardwareDevice_Metadata(hardware);
  const char* id = metadata ? api.ort->GetKeyValue(metadata, "pci_bus_id") : nullptr;
  return id ? id : "";
}

bool IsNvidiaGpu(const Api& api, const OrtHardwareDevice* hardware) {
  return api.ort->HardwareDevice_Type(hardware) == OrtHardwareDeviceType_GPU &&
         api.ort->HardwareDevice_VendorId(hardware) == kNvidiaVendorId;
}

// Memory that belongs to no session: nothing orders its users, so that nothing is kept for the next one.
OrtStatus* CreateSharedAllocator(const Api& api, int ordinal, OrtAllocator** allocator) {
  OrtMemoryInfo* info = nullptr;
  DF_RETURN_IF_ERROR(CreateCudaMemoryInfo(api, ordinal, &info));
  return CreateArenaAllocator(api, Own(info, api.ort->ReleaseMemoryInfo), CudaMemory(ordinal), 0, /*keep=*/false, "",
                              allocator);
}

}  // namespace

Factory::Factory(const Api& api, const OrtLogger* logger) : OrtEpFactory{}, api_(api), logger_(logger) {
  ort_version_supported = kOrtApiVersion;
  OrtEpFactory::GetName = [](const OrtEpFactory*) noexcept { return kEpName; };
  OrtEpFactory::GetVendor = [](const OrtEpFactory*) noexcept { return kVendor; };
  OrtEpFactory::GetVendorId = [](const OrtEpFactory*) noexcept -> uint32_t { return 0; };
  OrtEpFactory::GetVersion = [](const OrtEpFactory*) noexcept -> const char* { return kVersion; };
  OrtEpFactory::GetSupportedDevices = [](OrtEpFactory* self, const OrtHardwareDevice* const* hardware, size_t count,
                                         OrtEpDevice** ep_devices, size_t max_ep_devices,
                                         size_t* num_ep_devices) noexcept {
    return Guard(Self(self)->api_,
                 [&] { return Self(self)->OfferDevices(hardware, count, ep_devices, max_ep_devices, num_ep_devices); });
  };
  OrtEpFactory::CreateEp = [](OrtEpFactory* self, const OrtHardwareDevice* const* hardware,
                              const OrtKeyValuePairs* const*, size_t count, const OrtSessionOptions* options,
                              const OrtLogger* logger, OrtEp** ep) noexcept {
    return Guard(Self(self)->api_, [&] { return Self(self)->MakeEp(hardware, count, options, logger, ep); });
  };
  OrtEpFactory::ReleaseEp = [](OrtEpFactory* self, OrtEp* ep) noexcept {
    if (!ep) return;
    delete static_cast<Ep*>(ep);
    --Self(self)->living_eps_;
    --living_eps_of_all_;
  };
  OrtEpFactory::CreateAllocator = [](OrtEpFactory* self, const OrtMemoryInfo* info, const OrtKeyValuePairs*,
                                     OrtAllocator** allocator) noexcept -> OrtStatus* {
    *allocator = nullptr;
    Factory* factory = Self(self);
    return Guard(factory->api_, [&]() -> OrtStatus* {
      const std::lock_guard<std::mutex> lock(factory->mutex_);
      for (const auto& served : factory->served_)
        if (served->device.cuda && info && served->device.memory &&
            factory->api_.ep->MemoryDevice_AreEqual(
                factory->api_.ep->MemoryInfo_GetMemoryDevice(info),
                factory->api_.ep->MemoryInfo_GetMemoryDevice(served->device.memory)))
          return CreateSharedAllocator(factory->api_, served->device.ordinal, allocator);
      return nullptr;  // null: ORT's own CPU allocator
    });
  };
  OrtEpFactory::ReleaseAllocator = [](OrtEpFactory*, OrtAllocator* allocator) noexcept {
    ReleaseArenaAllocator(allocator);
  };
  OrtEpFactory::CreateDataTransfer = [](OrtEpFactory* self, OrtDataTransferImpl** transfer) noexcept -> OrtStatus* {
    *transfer = nullptr;
    Factory* factory = Self(self);
    return Guard(factory->api_, [&]() -> OrtStatus* {
      const std::lock_guard<std::mutex> lock(factory->mutex_);
      for (const auto& served : factory->served_)
        if (served->device.cuda) return CreateCudaDataTransfer(factory->api_, transfer);
      return nullptr;
    });
  };
  // Not stream-aware on purpose: with the CUDA EP behind this one, ORT would hand our kind of stream to its kernels.
  OrtEpFactory::IsStreamAware = [](const OrtEpFactory*) noexcept { return false; };
}

Factory::~Factory() = default;

std::atomic<int> Factory::living_eps_of_all_{0};

OrtStatus* Factory::Release(Factory* factory) {
  const int living = factory->living_eps_;
  if (living == 0) {
    delete factory;
    return nullptr;
  }
  return Guard(factory->api_, [&] {
    static auto* const kept = new std::vector<Factory*>;  // reachable, so that no leak is reported
    kept->push_back(factory);
    return MakeStatus(factory->api_, ORT_FAIL,
                      "deltafuse stays loaded: " + std::to_string(living) + " sessions still use it");
  });
}

OrtStatus* Factory::Log(OrtLoggingLevel level, const std::string& message) {
  return api_.ort->Logger_LogMessage(logger_, level, message.c_str(), ORT_FILE, __LINE__, __func__);
}

OrtStatus* Factory::OfferDevices(const OrtHardwareDevice* const* hardware, size_t count, OrtEpDevice** ep_devices,
                                 size_t max_ep_devices, size_t* num_ep_devices) {
  const std::lock_guard<std::mutex> lock(mutex_);
  *num_ep_devices = 0;
  size_t nvidia = 0;
  for (size_t i = 0; i < count; ++i) nvidia += IsNvidiaGpu(api_, hardware[i]);
  for (size_t i = 0; i < count && *num_ep_devices < max_ep_devices; ++i) {
    Served* served = nullptr;
    std::string reason;
    DF_RETURN_IF_ERROR(Serve(hardware[i], nvidia, &served, &reason));
    if (!reason.empty()) DF_RETURN_IF_ERROR(Log(ORT_LOGGING_LEVEL_WARNING, "deltafuse leaves a GPU alone: " + reason));
    if (!served) continue;
    DF_RETURN_IF_ERROR(OfferDevice(hardware[i], *served, &ep_devices[*num_ep_devices]));
    ++*num_ep_devices;
  }
  return nullptr;
}

OrtStatus* Factory::Serve(const OrtHardwareDevice* hardware, size_t nvidia_devices, Served** served,
                          std::string* reason) {
  Device device;
  OrtMemoryInfo* memory = nullptr;
  if (api_.ort->HardwareDevice_Type(hardware) == OrtHardwareDeviceType_CPU) {
    for (const auto& known : served_) {
      if (known->device.cuda) continue;
      *served = known.get();
      return nullptr;
    }
    DF_RETURN_IF_ERROR(api_.ort->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory));
  } else if (IsNvidiaGpu(api_, hardware)) {
    const std::string id = PciBusId(api_, hardware);
    *reason = id.empty() && nvidia_devices > 1 ? "ORT gives no PCI bus id for it" : FindCudaDevice(id, &device);
    if (!reason->empty()) return nullptr;
    for (const auto& known : served_) {
      if (!known->device.cuda || known->device.ordinal != device.ordinal) continue;
      *served = known.get();
      return nullptr;
    }
    DF_RETURN_IF_ERROR(CreateCudaMemoryInfo(api_, device.ordinal, &memory));
  } else {
    return nullptr;
  }
  Owned<OrtMemoryInfo> owned = Own(memory, api_.ort->ReleaseMemoryInfo);
  device.memory = memory;
  served_.push_back(std::make_unique<Served>(
      Served{device, std::move(owned), Own<OrtKernelRegistry>(nullptr, api_.ep->ReleaseKernelRegistry), {}}));
  *served = served_.back().get();
  (*served)->kernel_state = {&api_, &(*served)->device};
  return nullptr;
}

OrtStatus* Factory::OfferDevice(const OrtHardwareDevice* hardware, const Served& served, OrtEpDevice** ep_device) {
  OrtKeyValuePairs* metadata = nullptr;
  api_.ort->CreateKeyValuePairs(&metadata);
  const Owned<OrtKeyValuePairs> owned = Own(metadata, api_.ort->ReleaseKeyValuePairs);
  const Device& device = served.device;
  api_.ort->AddKeyValuePair(metadata, "deltafuse_device",
                            device.cuda ? ("cuda:" + std::to_string(device.ordinal)).c_str() : "cpu");
  if (device.cuda) {
    api_.ort->AddKeyValuePair(metadata, "compute_capability", std::to_string(device.compute_capability).c_str());
    api_.ort->AddKeyValuePair(metadata, "cuda_archs", CudaArchs());
  }
  OrtEpDevice* created = nullptr;
  DF_RETURN_IF_ERROR(api_.ep->CreateEpDevice(this, hardware, metadata, nullptr, &created));
  Owned<OrtEpDevice> owned_device = Own(created, api_.ep->ReleaseEpDevice);
  if (device.cuda) DF_RETURN_IF_ERROR(api_.ep->EpDevice_AddAllocatorInfo(created, device.memory));
  *ep_device = owned_device.release();
  return nullptr;
}

OrtStatus* Factory::MakeEp(const OrtHardwareDevice* const* hardware, size_t count, const OrtSessionOptions* options,
                           const OrtLogger* logger, OrtEp** ep) {
  const std::lock_guard<std::mutex> lock(mutex_);
  *ep = nullptr;
  if (count != 1)
    return MakeStatus(api_, ORT_INVALID_ARGUMENT,
                      std::string(kEpName) + " runs a session on one device, but was given " + std::to_string(count) +
                          ": choose one with SessionOptions.add_provider_for_devices, or use deltafuse.session()");
  Served* served = nullptr;
  std::string reason;
  DF_RETURN_IF_ERROR(Serve(hardware[0], 1, &served, &reason));
  if (!served)
    return MakeStatus(api_, ORT_INVALID_ARGUMENT,
                      std::string(kEpName) + " cannot use this device" + (reason.empty() ? "" : ": " + reason));
  if (!served->registry) {
    OrtKernelRegistry* registry = nullptr;
    DF_RETURN_IF_ERROR(CreateKernelRegistry(served->kernel_state, &registry));
    served->registry.reset(registry);
  }
  Options own;
  DF_RETURN_IF_ERROR(ReadOptions(api_, served->device, options, &own));
  auto session = std::make_shared<Session>(api_, served->device, std::move(own));
  *ep = new Ep(std::move(session), served->registry.get(), logger);
  ++living_eps_;
  ++living_eps_of_all_;
  return nullptr;
}

}  // namespace deltafuse::ep
