// Work for the device: done at once, or kept while a graph is being captured.
#pragma once

#include <functional>

namespace emulator {

// Runs `work`, or adds it to the capture. Returns what it returns (0: it went well).
int submit(std::function<int()> work);
bool capturing();

}  // namespace emulator
