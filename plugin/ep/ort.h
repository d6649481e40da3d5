// What every file of the plugin needs of ORT's C API: the two API tables, owning handles, statuses.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

namespace deltafuse::ep {

// Asked for explicitly, whatever the headers' own version: 1.27 is the oldest ORT that the plugin runs on.
inline constexpr uint32_t kOrtApiVersion = 27;
inline constexpr const char* kEpName = "DeltaFuseExecutionProvider";
inline constexpr const char* kVendor = "deltafuse";
inline constexpr uint32_t kNvidiaVendorId = 0x10DE;

struct Api {
  const OrtApi* ort = nullptr;
  const OrtEpApi* ep = nullptr;
};

template <typename T>
using Owned = std::unique_ptr<T, void(ORT_API_CALL*)(T*)>;

// An ORT handle with its release function, for example Own(info, api.ort->ReleaseTypeInfo).
template <typename T>
Owned<T> Own(T* handle, void(ORT_API_CALL* release)(T*)) {
  return Owned<T>(handle, release);
}

inline OrtStatus* MakeStatus(const Api& api, OrtErrorCode code, const std::string& message) {
  return api.ort->CreateStatus(code, message.c_str());
}

// Runs `body`, which returns an OrtStatus*; no exception may cross into ORT.
template <typename Body>
OrtStatus* Guard(const Api& api, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    return api.ort->CreateStatus(ORT_FAIL, error.what());
  } catch (...) {
    return api.ort->CreateStatus(ORT_FAIL, "deltafuse: unknown exception");
  }
}

}  // namespace deltafuse::ep

#define DF_RETURN_IF_ERROR(expression)                           \
  do {                                                           \
    if (OrtStatus* df_status_ = (expression)) return df_status_; \
  } while (false)
