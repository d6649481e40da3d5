// Finds the devices that ORT knows and the EP can serve, and makes an EP for a session on one of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "kernels.h"
#include "ort.h"

namespace deltafuse::ep {

class Factory final : public OrtEpFactory {
 public:
  Factory(const Api& api, const OrtLogger* logger);
  ~Factory();
  Factory(const Factory&) = delete;
  Factory& operator=(const Factory&) = delete;

 private:
  // A device with what belongs to it for as long as the factory lives.
  struct Served {
    Device device;
    Owned<OrtMemoryInfo> memory;
    Owned<OrtKernelRegistry> registry;
    KernelState kernel_state;
  };

  OrtStatus* OfferDevices(const OrtHardwareDevice* const* hardware, size_t count, OrtEpDevice** ep_devices,
                          size_t max_ep_devices, size_t* num_ep_devices);
  // `*served` stays null when this hardware is not ours to serve; `reason` then says why, where that is worth saying.
  OrtStatus* Serve(const OrtHardwareDevice* hardware, size_t nvidia_devices, Served** served, std::string* reason);
  OrtStatus* OfferDevice(const OrtHardwareDevice* hardware, const Served& served, OrtEpDevice** ep_device);
  OrtStatus* MakeEp(const OrtHardwareDevice* const* hardware, size_t count, const OrtSessionOptions* options,
                    const OrtLogger* logger, OrtEp** ep);
  OrtStatus* ReadOptions(const OrtSessionOptions* options, std::string* tag);
  OrtStatus* Log(OrtLoggingLevel level, const std::string& message);

  const Api api_;
  const OrtLogger* logger_;
  std::vector<std::unique_ptr<Served>> served_;
};

}  // namespace deltafuse::ep
