// What kernels on a device find wrong in the values of a call: each node has a word that the device writes and the host
// reads when the run is over.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "ort.h"

namespace deltafuse::ep {

class Faults {
 public:
  // The fault of a word in words.
  using Describe = const char* (*)(uint32_t fault);

  Faults() = default;
  ~Faults();
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  // A word for one node of a CUDA device, or null where the device gives no memory for it. `node` is what an error says
  // first.
  uint32_t* Add(const std::string& node, Describe describe);
  void Remove(uint32_t* word);
  // The first fault there is, and clears all: "" where there is none.
  std::string Take();
  bool empty() const { return words_.empty(); }

 private:
  struct Word {
    uint32_t* word;
    std::string node;
    Describe describe;
  };

  std::mutex mutex_;
  std::vector<Word> words_;
  std::vector<uint32_t*> pages_, unused_;
};

}  // namespace deltafuse::ep
