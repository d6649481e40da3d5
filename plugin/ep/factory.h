// Finds the devices that ORT knows and the EP can serve, and makes an EP for a session on one of them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
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

  // How many EPs live, of all factories: one a session.
  static int LivingEps() { return living_eps_of_all_; }
  // Deletes the factory. While an EP of it lives it is kept, for ever, and the status says so: ORT asks for this also
  // when a session is still using the library, and that session calls into its factory until it is gone.
  static OrtStatus* Release(Factory* factory);

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
  OrtStatus* Log(OrtLoggingLevel level, const std::string& message);

  const Api api_;
  const OrtLogger* logger_;
  std::mutex mutex_;  // of served_: sessions may be made by many threads at once
  std::vector<std::unique_ptr<Served>> served_;
  std::atomic<int> living_eps_{0};
  static std::atomic<int> living_eps_of_all_;
};

}  // namespace deltafuse::ep
