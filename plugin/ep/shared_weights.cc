#include "shared_weights.h"

#include <algorithm>
#include <cstring>

namespace deltafuse::ep {
namespace {

constexpr uint64_t kSecrets[4] = {0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu, 0x8ebc6af09c88c6e3u, 0x589965cc75374cc3u};

// The halves of the product, one over the other.
uint64_t Mix(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

// Every word goes into two lanes with different partners, so that a product of zero loses none.
void ContentHash::Block(const unsigned char* bytes) {
  uint64_t w[4];
  std::memcpy(w, bytes, sizeof(w));
  lanes_[0] = Mix(w[0] ^ kSecrets[0], w[1] ^ lanes_[0]);
  lanes_[1] = Mix(w[2] ^ kSecrets[1], w[3] ^ lanes_[1]);
  lanes_[2] = Mix(w[1] ^ kSecrets[2], w[2] ^ lanes_[2]);
  lanes_[3] = Mix(w[3] ^ kSecrets[3], w[0] ^ lanes_[3]);
}

void ContentHash::Add(const void* data, size_t bytes) {
  if (bytes == 0) return;
  const auto* from = static_cast<const unsigned char*>(data);
  bytes_ += bytes;
  if (rest_bytes_) {
    const size_t some = std::min(bytes, kBlock - rest_bytes_);
    std::memcpy(rest_ + rest_bytes_, from, some);
    rest_bytes_ += some;
    from += some;
    bytes -= some;
    if (rest_bytes_ < kBlock) return;
    Block(rest_);
    rest_bytes_ = 0;
  }
  for (; bytes >= kBlock; from += kBlock, bytes -= kBlock) Block(from);
  std::memcpy(rest_, from, bytes);
  rest_bytes_ = bytes;
}

ContentHash::Value ContentHash::Get() const {
  ContentHash last = *this;
  std::memset(last.rest_ + last.rest_bytes_, 0, kBlock - last.rest_bytes_);
  last.Block(last.rest_);
  const uint64_t* h = last.lanes_;
  const uint64_t a = Mix(h[0] ^ bytes_, h[1] ^ kSecrets[0]) ^ Mix(h[2] ^ kSecrets[1], h[3] ^ bytes_);
  const uint64_t b = Mix(h[0] ^ kSecrets[2], h[2] ^ bytes_) ^ Mix(h[1] ^ bytes_, h[3] ^ kSecrets[3]);
  return {a, b};
}

}  // namespace deltafuse::ep
