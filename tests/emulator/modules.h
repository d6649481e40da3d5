// The PTX that libraries bring along, and their kernels.
#pragma once

#include <cstddef>

#include "machine.h"

namespace emulator {

// A kernel as the runtime knows it.
struct HostFunction {
  int library = 0;
  const char* name = "";
  int dynamic_limit = 48 * 1024;
  bool big_clusters = false;
  std::unique_ptr<Kernel> kernel;  // decoded at its first use
};

int add_library(const void* wrapper);  // what __cudaRegisterFatBinary gets
void add_function(int library, const void* host, const char* name);
HostFunction* find_function(const void* host);  // null if there is none
Kernel& kernel_of(HostFunction& f);             // throws Fault

}  // namespace emulator
