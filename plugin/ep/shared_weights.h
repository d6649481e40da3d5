// Packed weights that sessions of one process share: found by what they were packed from, freed with their last user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace deltafuse::ep {

// A 128-bit hash of bytes, however they are cut into pieces. Not for keys that somebody may choose to collide.
class ContentHash {
 public:
  using Value = std::pair<uint64_t, uint64_t>;

  void Add(const void* data, size_t bytes);
  Value Get() const;

 private:
  static constexpr size_t kBlock = 32;
  void Block(const unsigned char* bytes);

  uint64_t lanes_[4] = {0x243f6a8885a308d3u, 0x13198a2e03707344u, 0xa4093822299f31d0u, 0x082efa98ec4e6c89u};
  uint64_t bytes_ = 0;
  unsigned char rest_[kBlock] = {};
  size_t rest_bytes_ = 0;
};

// Objects by the content that they were made of. Thread safe; holds nothing alive.
template <typename T>
class SharedByContent {
 public:
  // The object of this key that somebody holds, else `made`, which is the one from now on.
  std::shared_ptr<T> Share(const ContentHash::Value& key, const std::shared_ptr<T>& made) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = held_.begin(); it != held_.end();) it = it->second.expired() ? held_.erase(it) : std::next(it);
    std::weak_ptr<T>& entry = held_[key];
    if (std::shared_ptr<T> there = entry.lock()) return there;
    entry = made;
    return made;
  }
  size_t size() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t living = 0;
    for (const auto& entry : held_) living += !entry.second.expired();
    return living;
  }

 private:
  mutable std::mutex mutex_;
  std::map<ContentHash::Value, std::weak_ptr<T>> held_;
};

}  // namespace deltafuse::ep
