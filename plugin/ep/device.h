// One device that the EP serves: the CPU, or one CUDA device.
#pragma once

#include <string>

#include "ort.h"

namespace deltafuse::ep {

struct Device {
  bool cuda = false;
  int ordinal = 0;             // CUDA ordinal
  int compute_capability = 0;  // 90 for 9.0
  std::string name = "cpu";
  const OrtMemoryInfo* memory = nullptr;  // where the kernels' operands and workspace lie; the factory owns it
};

}  // namespace deltafuse::ep
