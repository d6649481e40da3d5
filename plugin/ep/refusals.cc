#include "refusals.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace deltafuse::ep {
namespace {

struct Entry {
  std::string tag;
  std::vector<NodeRefusal> refusals;
};

std::mutex& Mutex() {
  static std::mutex mutex;
  return mutex;
}

std::map<const void*, Entry>& Entries() {
  static std::map<const void*, Entry> entries;
  return entries;
}

}  // namespace

bool RecordRefusal(const void* owner, const std::string& tag, const NodeRefusal& refusal) {
  const std::lock_guard<std::mutex> lock(Mutex());
  Entry& entry = Entries()[owner];
  entry.tag = tag;
  const bool known = std::any_of(entry.refusals.begin(), entry.refusals.end(), [&](const NodeRefusal& other) {
    return other.node == refusal.node && other.output == refusal.output && other.reason == refusal.reason;
  });
  if (!known) entry.refusals.push_back(refusal);
  return !known;
}

void ForgetRefusals(const void* owner) {
  const std::lock_guard<std::mutex> lock(Mutex());
  Entries().erase(owner);
}

std::vector<NodeRefusal> Refusals(const std::string& tag) {
  const std::lock_guard<std::mutex> lock(Mutex());
  std::vector<NodeRefusal> all;
  for (const auto& [owner, entry] : Entries()) {
    if (tag.empty() || entry.tag == tag) all.insert(all.end(), entry.refusals.begin(), entry.refusals.end());
  }
  return all;
}

}  // namespace deltafuse::ep
