// What the shared library exports: ORT's two entry points, and what the Python side asks of it.
#include <cstddef>
#include <string>

#include "arena_allocator.h"
#include "build_info.h"
#include "cuda_backend.h"
#include "factory.h"
#include "ort.h"
#include "refusals.h"

#define DF_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using deltafuse::ep::Api;
using deltafuse::ep::Factory;

std::string JsonString(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      constexpr const char* kHex = "0123456789abcdef";
      out += std::string("\\u00") + kHex[byte >> 4] + kHex[byte & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Text that stays valid until the thread's next call.
const char* Keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

DF_EXPORT OrtStatus* CreateEpFactories(const char* /*registered_name*/, const OrtApiBase* base,
                                       const OrtLogger* default_logger, OrtEpFactory** factories, size_t max_factories,
                                       size_t* num_factories) noexcept {
  Api api;
  api.ort = base->GetApi(deltafuse::ep::kOrtApiVersion);
  if (!api.ort) {
    // CreateStatus is part of the first API version, which every ORT has.
    const OrtApi* first = base->GetApi(1);
    if (!first) return nullptr;
    *num_factories = 0;
    return first->CreateStatus(
        ORT_FAIL,
        (std::string("deltafuse needs ONNX Runtime 1.27 or newer, this is ") + base->GetVersionString()).c_str());
  }
  return deltafuse::ep::Guard(api, [&]() -> OrtStatus* {
    api.ep = api.ort->GetEpApi();
    if (max_factories < 1) return MakeStatus(api, ORT_INVALID_ARGUMENT, "deltafuse needs room for one EP factory");
    factories[0] = new Factory(api, default_logger);
    *num_factories = 1;
    return nullptr;
  });
}

DF_EXPORT OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) noexcept {
  return factory ? Factory::Release(static_cast<Factory*>(factory)) : nullptr;
}

DF_EXPORT const char* deltafuse_version() { return deltafuse::ep::kVersion; }

// Architectures of the CUDA kernels, ";"-separated; "" when the build has none.
DF_EXPORT const char* deltafuse_cuda_archs() { return deltafuse::ep::CudaArchs(); }

// "" when there is a usable CUDA device, else why there is none.
DF_EXPORT const char* deltafuse_cuda_status() { return Keep(deltafuse::ep::CudaStatus()); }

// How many sessions use the library.
DF_EXPORT int deltafuse_living_sessions() { return Factory::LivingEps(); }

// JSON list of the memory arenas of the living session with this tag, of all sessions when the tag is "": how many
// bytes are in use and were taken from the device, the limit, how often. None where ORT's CUDA EP supplies the memory.
DF_EXPORT const char* deltafuse_memory(const char* tag) { return Keep(deltafuse::ep::ArenaStatsJson(tag ? tag : "")); }

// JSON list of the nodes that living EPs with this session tag refused; of all of them when the tag is "".
DF_EXPORT const char* deltafuse_refusals(const char* tag) {
  std::string text = "[";
  for (const auto& refusal : deltafuse::ep::Refusals(tag ? tag : "")) {
    if (text.size() > 1) text += ", ";
    text += "{\"domain\": " + JsonString(refusal.domain) + ", \"op_type\": " + JsonString(refusal.op_type) +
            ", \"node\": " + JsonString(refusal.node) + ", \"output\": " + JsonString(refusal.output) +
            ", \"reason\": " + JsonString(refusal.reason) + "}";
  }
  return Keep(text + "]");
}
