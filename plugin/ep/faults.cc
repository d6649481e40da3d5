#include "faults.h"

#include <algorithm>

#include "cuda_backend.h"

namespace deltafuse::ep {
namespace {

constexpr size_t kWordsAPage = 1024;

// The device may write at any time.
uint32_t Read(const uint32_t* word) { return *const_cast<const volatile uint32_t*>(word); }

}  // namespace

Faults::~Faults() {
  for (uint32_t* page : pages_) FreeMappedMemory(page);
}

uint32_t* Faults::Add(const std::string& node, Describe describe) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (unused_.empty()) {
    auto* page = static_cast<uint32_t*>(AllocateMappedMemory(kWordsAPage * sizeof(uint32_t)));
    if (!page) return nullptr;
    pages_.push_back(page);
    for (size_t i = kWordsAPage; i > 0; --i) unused_.push_back(page + i - 1);
  }
  uint32_t* word = unused_.back();
  unused_.pop_back();
  *word = 0;
  words_.push_back({word, node, describe});
  return word;
}

void Faults::Remove(uint32_t* word) {
  if (!word) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(words_.begin(), words_.end(), [&](const Word& entry) { return entry.word == word; });
  if (found == words_.end()) return;
  words_.erase(found);
  unused_.push_back(word);
}

std::string Faults::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const Word& entry : words_) {
    const uint32_t fault = Read(entry.word);
    if (fault == 0) continue;
    if (text.empty()) text = entry.node + entry.describe(fault);
    *entry.word = 0;
  }
  return text;
}

}  // namespace deltafuse::ep
