// Hashes of contents, and objects that are shared by them: `shared_weights_check SCENARIO`.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../plugin/ep/shared_weights.h"

using deltafuse::ep::ContentHash;
using deltafuse::ep::SharedByContent;

namespace {

int failures = 0;
void Expect(bool right, const char* what) {
  if (right) return;
  ++failures;
  std::printf("wrong: %s\n", what);
}

ContentHash::Value Hash(const std::vector<unsigned char>& bytes) {
  ContentHash hash;
  hash.Add(bytes.data(), bytes.size());
  return hash.Get();
}

std::vector<unsigned char> Random(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> made(bytes);
  for (auto& byte : made) byte = static_cast<unsigned char>(random());
  return made;
}

// However the bytes are cut.
void Pieces() {
  const auto bytes = Random(5000, 1);
  std::mt19937 random(2);
  for (int turn = 0; turn < 200; ++turn) {
    ContentHash hash;
    for (size_t at = 0; at < bytes.size();) {
      const size_t some = std::min<size_t>(random() % 97, bytes.size() - at);
      hash.Add(bytes.data() + at, some);
      at += some;
    }
    Expect(hash.Get() == Hash(bytes), "a hash depends on how its bytes are cut");
  }
}

// Every bit, every length, zeros too; and both halves change.
void Differences() {
  for (const bool zeros : {false, true}) {
    auto bytes = zeros ? std::vector<unsigned char>(300) : Random(300, 3);
    std::set<uint64_t> first, second;
    size_t made = 0;
    const auto add = [&](const std::vector<unsigned char>& of) {
      const auto value = Hash(of);
      first.insert(value.first);
      second.insert(value.second);
      ++made;
    };
    add(bytes);
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
      add(bytes);
      bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    }
    for (size_t length = 0; length < bytes.size(); ++length) add({bytes.begin(), bytes.begin() + length});
    Expect(first.size() == made && second.size() == made, "two contents have one half of a hash");
  }
  // blocks in another order
  auto bytes = Random(64, 4);
  const auto before = Hash(bytes);
  std::swap_ranges(bytes.begin(), bytes.begin() + 32, bytes.begin() + 32);
  Expect(Hash(bytes) != before, "the order of blocks does not matter");
}

// A bit of the input turns over half of the bits of the hash.
void Spread() {
  std::mt19937 random(5);
  double turned = 0;
  constexpr int kTurns = 2000;
  for (int turn = 0; turn < kTurns; ++turn) {
    auto bytes = Random(1 + random() % 200, random());
    const auto before = Hash(bytes);
    const size_t bit = random() % (8 * bytes.size());
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    const auto after = Hash(bytes);
    turned += __builtin_popcountll(before.first ^ after.first) + __builtin_popcountll(before.second ^ after.second);
  }
  Expect(turned / kTurns > 62 && turned / kTurns < 66, "bits are not spread");
}

struct Layer {
  explicit Layer(int of) : content(of) { ++living; }
  ~Layer() { --living; }
  const int content;
  static std::atomic<int> living;
};
std::atomic<int> Layer::living{0};

void Sharing() {
  SharedByContent<Layer> shared;
  const auto key = [](int content) { return Hash({static_cast<unsigned char>(content)}); };
  auto one = shared.Share(key(1), std::make_shared<Layer>(1));
  auto again = std::make_shared<Layer>(1);
  again = shared.Share(key(1), again);
  Expect(one == again && Layer::living == 1, "equal contents are not shared");
  auto other = shared.Share(key(2), std::make_shared<Layer>(2));
  Expect(other != one && Layer::living == 2 && shared.size() == 2, "different contents are shared");
  one.reset();
  Expect(Layer::living == 2, "freed while it is used");
  again.reset();
  Expect(Layer::living == 1 && shared.size() == 1, "not freed with its last user");
  one = shared.Share(key(1), std::make_shared<Layer>(1));
  Expect(one && one->content == 1 && Layer::living == 2, "not made anew");
}

// Sessions that come and go on many threads.
void Threads() {
  SharedByContent<Layer> shared;
  std::atomic<bool> wrong{false};
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::shared_ptr<Layer>> held(4);
    for (int turn = 0; turn < 3000; ++turn) {
      const int content = static_cast<int>(random() % 6);
      const auto layer = shared.Share(Hash({static_cast<unsigned char>(content)}), std::make_shared<Layer>(content));
      if (layer->content != content) wrong = true;
      held[random() % held.size()] = layer;
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (auto& thread : threads) thread.join();
  Expect(!wrong, "a layer of other contents");
  Expect(Layer::living == 0 && shared.size() == 0, "layers without users");
}

}  // namespace

int main(int count, char** arguments) {
  const std::string scenario = count > 1 ? arguments[1] : "";
  if (scenario == "pieces") Pieces();
  if (scenario == "differences") Differences();
  if (scenario == "spread") Spread();
  if (scenario == "sharing") Sharing();
  if (scenario == "threads") Threads();
  return failures ? 1 : 0;
}
