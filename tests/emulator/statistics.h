// What a launch executed, as a table on stderr: EMU_STATS=1, or EMU_STATS=lines for the source's lines as well.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "machine.h"

namespace emulator {

class Statistics {
 public:
  void block(const Block& b);  // when it has ended
  void print() const;

 private:
  using Kinds = std::array<uint64_t, static_cast<size_t>(Kind::kCount)>;
  uint64_t blocks_ = 0, least_ = ~uint64_t{0}, most_ = 0;
  Kinds least_kinds_{}, most_kinds_{}, before_{};
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::vector<uint64_t> warps_;  // instructions of the blocks' first warps, second warps, ...
  bool single_ = true;           // blocks ran one at a time, so that a block's share of each kind is known
};

}  // namespace emulator
