#include "arena_allocator.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

namespace deltafuse::ep {
namespace {

class ArenaAllocator final : public OrtAllocator {
 public:
  ArenaAllocator(const Api& api, Owned<OrtMemoryInfo> info, const Arena::Backend& backend, size_t limit, bool keep,
                 std::string tag);
  ~ArenaAllocator();

  const Arena& arena() const { return arena_; }
  bool IsOn(int ordinal) const {
    return static_cast<int>(api_.ep->MemoryDevice_GetDeviceId(api_.ep->MemoryInfo_GetMemoryDevice(info_.get()))) ==
           ordinal;
  }
  const std::string& tag() const { return tag_; }

 private:
  static Arena& Of(OrtAllocator* self) { return static_cast<ArenaAllocator*>(self)->arena_; }
  OrtStatus* Report(OrtKeyValuePairs** out) const;

  const Api& api_;
  const Owned<OrtMemoryInfo> info_;
  const std::string tag_;
  Arena arena_;
};

struct Living {
  std::mutex mutex;
  std::set<const ArenaAllocator*> allocators;
};

Living& All() {
  static auto* const living = new Living;  // never destroyed: allocators may outlive static objects
  return *living;
}

ArenaAllocator::ArenaAllocator(const Api& api, Owned<OrtMemoryInfo> info, const Arena::Backend& backend, size_t limit,
                               bool keep, std::string tag)
    : OrtAllocator{}, api_(api), info_(std::move(info)), tag_(std::move(tag)), arena_(backend, limit, keep) {
  version = kOrtApiVersion;
  OrtAllocator::Alloc = [](OrtAllocator* self, size_t bytes) noexcept { return Of(self).Take(bytes); };
  OrtAllocator::Reserve = [](OrtAllocator* self, size_t bytes) noexcept { return Of(self).Reserve(bytes); };
  OrtAllocator::Free = [](OrtAllocator* self, void* block) noexcept { Of(self).GiveBack(block); };
  OrtAllocator::Info = [](const OrtAllocator* self) noexcept -> const OrtMemoryInfo* {
    return static_cast<const ArenaAllocator*>(self)->info_.get();
  };
  OrtAllocator::GetStats = [](const OrtAllocator* self, OrtKeyValuePairs** out) noexcept {
    const auto* allocator = static_cast<const ArenaAllocator*>(self);
    return Guard(allocator->api_, [&] { return allocator->Report(out); });
  };
  OrtAllocator::Shrink = [](OrtAllocator* self) noexcept -> OrtStatus* {
    Of(self).Shrink();
    return nullptr;
  };
  const std::lock_guard<std::mutex> lock(All().mutex);
  All().allocators.insert(this);
}

ArenaAllocator::~ArenaAllocator() {
  const std::lock_guard<std::mutex> lock(All().mutex);
  All().allocators.erase(this);
}

OrtStatus* ArenaAllocator::Report(OrtKeyValuePairs** out) const {
  const Arena::Stats stats = arena_.GetStats();
  api_.ort->CreateKeyValuePairs(out);
  const std::initializer_list<std::pair<const char*, std::string>> pairs = {
      {"Limit", stats.limit ? std::to_string(stats.limit) : "-1"},
      {"InUse", std::to_string(stats.in_use)},
      {"TotalAllocated", std::to_string(stats.total)},
      {"MaxInUse", std::to_string(stats.max_in_use)},
      {"NumAllocs", std::to_string(stats.blocks)},
      {"NumReserves", std::to_string(stats.reserves)},
      {"NumArenaExtensions", std::to_string(stats.extensions)},
      {"NumArenaShrinkages", std::to_string(stats.shrinkages)},
      {"NumFailures", std::to_string(stats.failures)},
      {"MaxAllocSize", std::to_string(stats.max_block)}};
  for (const auto& [key, value] : pairs) api_.ort->AddKeyValuePair(*out, key, value.c_str());
  return nullptr;
}

std::string Mebibytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", bytes / (1 << 20));
  return text;
}

}  // namespace

OrtStatus* CreateArenaAllocator(const Api& api, Owned<OrtMemoryInfo> info, const Arena::Backend& backend,
                                size_t limit_bytes, bool keep, std::string tag, OrtAllocator** allocator) {
  *allocator = new ArenaAllocator(api, std::move(info), backend, limit_bytes, keep, std::move(tag));
  return nullptr;
}

void ReleaseArenaAllocator(OrtAllocator* allocator) { delete static_cast<ArenaAllocator*>(allocator); }

std::string ArenaStatsJson(const std::string& tag) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  std::string text = "[";
  for (const ArenaAllocator* allocator : All().allocators) {
    if (!tag.empty() && allocator->tag() != tag) continue;
    const Arena::Stats stats = allocator->arena().GetStats();
    const std::initializer_list<std::pair<const char*, uint64_t>> pairs = {
        {"limit", stats.limit},       {"in_use", stats.in_use},         {"max_in_use", stats.max_in_use},
        {"total", stats.total},       {"max_block", stats.max_block},   {"blocks", stats.blocks},
        {"reserves", stats.reserves}, {"extensions", stats.extensions}, {"shrinkages", stats.shrinkages},
        {"failures", stats.failures}};
    text += text.size() > 1 ? ", {" : "{";
    const char* separator = "";
    for (const auto& [key, value] : pairs) {
      text += std::string(separator) + "\"" + key + "\": " + std::to_string(value);
      separator = ", ";
    }
    text += "}";
  }
  return text + "]";
}

std::string MemoryText(const Api& api, const OrtAllocator* allocator) {
  OrtKeyValuePairs* pairs = nullptr;
  if (!allocator) return "";
  if (OrtStatus* status = api.ort->AllocatorGetStats(allocator, &pairs)) {
    api.ort->ReleaseStatus(status);
    return "";
  }
  const Owned<OrtKeyValuePairs> owned = Own(pairs, api.ort->ReleaseKeyValuePairs);
  const char* limit = pairs ? api.ort->GetKeyValue(pairs, "Limit") : nullptr;
  const char* in_use = pairs ? api.ort->GetKeyValue(pairs, "InUse") : nullptr;
  if (!limit || !in_use) return "";
  // ORT's arenas without a limit say the largest number there is.
  const double bytes = std::strtod(limit, nullptr);
  const bool none = bytes <= 0 || bytes > 1e15;
  return " (" + (none ? std::string("no limit") : "limit " + Mebibytes(bytes)) + ", in use " +
         Mebibytes(std::strtod(in_use, nullptr)) + ")";
}

std::string LimitedArenasText(int ordinal) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  std::string text;
  for (const ArenaAllocator* allocator : All().allocators) {
    const Arena::Stats stats = allocator->arena().GetStats();
    if (stats.limit == 0 || !allocator->IsOn(ordinal)) continue;
    text += " (limit " + Mebibytes(static_cast<double>(stats.limit)) + ", in use " +
            Mebibytes(static_cast<double>(stats.in_use)) + ")";
  }
  return text;
}

}  // namespace deltafuse::ep
