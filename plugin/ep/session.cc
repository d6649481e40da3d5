#include "session.h"

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "cuda_backend.h"
#include "ep.h"

namespace deltafuse::ep {
namespace {

constexpr const char* kKnownOptions = "memory_limit_mib, nvtx_ranges, session_tag, share_weights, user_compute_stream";

std::string Address(const void* stream) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (auto left = reinterpret_cast<uintptr_t>(stream); left != 0 || text.empty(); left >>= 4)
    text.insert(text.begin(), kDigits[left & 15]);
  return "0x" + text;
}

// A number from 0, decimal or with 0x before it. False when the text is something else.
bool ReadNumber(const std::string& text, uint64_t* number) {
  if (text.empty() || !std::isdigit(static_cast<unsigned char>(text[0]))) return false;
  const bool hex = text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
  char* end = nullptr;
  errno = 0;
  *number = std::strtoull(text.c_str(), &end, hex ? 16 : 10);
  return errno == 0 && *end == '\0';
}

// CUDA has two names for the legacy default stream, 0 and 1.
void* Named(void* stream) { return reinterpret_cast<uintptr_t>(stream) == 1 ? nullptr : stream; }

// "" or what is wrong with the option.
std::string ReadOption(const Device& device, std::string_view name, const std::string& value, Options* options) {
  const std::string shown = std::string(name) + " '" + value + "': ";
  uint64_t number = 0;
  if (name == "session_tag") {
    options->session_tag = value;
    return "";
  }
  if (name == "share_weights") {
    if (value != "0" && value != "1") return shown + "expected 0 or 1";
    options->share_weights = value == "1";
    return "";
  }
  if (name == "nvtx_ranges") {
    if (value != "0" && value != "1") return shown + "expected 0 or 1";
    options->nvtx = value == "1";
    if (const char* missing = NvtxMissing(); options->nvtx && *missing) return shown + missing;
    return "";
  }
  if (name != "memory_limit_mib" && name != "user_compute_stream")
    return "there is no option '" + std::string(name) + "': there are " + kKnownOptions;
  if (!ReadNumber(value, &number))
    return shown + (name == "memory_limit_mib" ? "expected a number of MiB, 0 for no limit"
                                               : "expected the stream's address as a number, 0 for the default stream");
  if (!device.cuda) return shown + "it is for CUDA devices, the session is on " + device.name;
  if (name == "memory_limit_mib") {
    if (number >= uint64_t{1} << 40) return shown + "expected a number of MiB, 0 for no limit";
    options->memory_limit = static_cast<size_t>(number) << 20;
    return "";
  }
  options->has_stream = true;
  options->stream = Named(reinterpret_cast<void*>(static_cast<uintptr_t>(number)));
  const std::string reason = CudaStreamRefusal(device, options->stream);
  return reason.empty() ? "" : shown + reason;
}

}  // namespace

OrtStatus* ReadOptions(const Api& api, const Device& device, const OrtSessionOptions* session, Options* options) {
  std::string prefix = std::string("ep.") + kEpName + ".";
  for (char& c : prefix) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  OrtKeyValuePairs* entries = nullptr;
  DF_RETURN_IF_ERROR(api.ort->GetSessionOptionsConfigEntries(session, &entries));
  const Owned<OrtKeyValuePairs> owned = Own(entries, api.ort->ReleaseKeyValuePairs);
  const char* const* keys = nullptr;
  const char* const* values = nullptr;
  size_t count = 0;
  api.ort->GetKeyValuePairs(entries, &keys, &values, &count);
  for (size_t i = 0; i < count; ++i) {
    const std::string_view key(keys[i]);
    if (key.substr(0, prefix.size()) != prefix) continue;
    const std::string reason = ReadOption(device, key.substr(prefix.size()), values[i], options);
    if (!reason.empty()) return MakeStatus(api, ORT_INVALID_ARGUMENT, std::string(kEpName) + ": " + reason);
  }
  return nullptr;
}

Session::Session(const Api& api, const Device& device, Options options)
    : api_(api), device_(device), options_(std::move(options)), workspace_(api) {
  if (options_.has_stream) AddUserStream(device_, options_.stream);
}

Session::~Session() {
  if (options_.has_stream) RemoveUserStream(device_, options_.stream);
}

OrtStatus* Session::ComputeStream(const OrtKernelContext* context, void** stream) {
  DF_RETURN_IF_ERROR(api_.ort->KernelContext_GetGPUComputeStream(context, stream));
  if (*stream) {
    if (options_.has_stream && Named(*stream) != options_.stream)
      return MakeStatus(api_, ORT_INVALID_ARGUMENT,
                        std::string(kEpName) + " has user_compute_stream " + Address(options_.stream) +
                            ", but the session's CUDA EP works on stream " + Address(*stream) +
                            ": give both the same stream, or only the CUDA EP");
  } else {
    *stream = options_.stream;
    own_stream_used_ = true;
  }
  last_stream_ = *stream;
  stream_used_ = true;
  return nullptr;
}

OrtStatus* Session::FaultStatus(const char* before) {
  const std::string fault = faults_.Take();
  return fault.empty() ? nullptr : MakeStatus(api_, ORT_INVALID_ARGUMENT, before + fault);
}

OrtStatus* Session::RunEnded(bool wait) {
  const bool own = own_stream_used_.exchange(false), used = stream_used_.exchange(false);
  if (!wait) return nullptr;  // the next run tells
  if (own) DF_RETURN_IF_ERROR(Synchronize());
  if (!used || faults_.empty()) return nullptr;
  if (!own) DF_RETURN_IF_ERROR(SynchronizeCuda(api_, device_, last_stream_));
  return FaultStatus("");
}

OrtStatus* Session::Synchronize() const { return SynchronizeCuda(api_, device_, options_.stream); }

OrtStatus* FindSession(const Api& api, const OrtKernelInfo* info, std::shared_ptr<Session>* session) {
  const OrtEp* ep = nullptr;
  DF_RETURN_IF_ERROR(api.ep->KernelInfo_GetEp(info, &ep));
  if (!ep) return MakeStatus(api, ORT_FAIL, "deltafuse: ORT creates a kernel without its execution provider");
  *session = static_cast<const Ep*>(ep)->session();
  return nullptr;
}

}  // namespace deltafuse::ep
