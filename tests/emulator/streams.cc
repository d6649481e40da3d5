#include "streams.h"

#include <memory>
#include <vector>

#include "memory.h"

namespace emulator {
namespace {

using Graph = std::vector<std::function<int()>>;
std::unique_ptr<Graph> recording;

}  // namespace

int submit(std::function<int()> work) {
  if (!recording) return work();
  recording->push_back(std::move(work));
  return 0;
}

bool capturing() { return recording != nullptr; }

}  // namespace emulator

using namespace emulator;

// For the tests' stand-in of torch.cuda.
extern "C" {

void* emulator_malloc(size_t bytes) { return device_malloc(bytes); }
void emulator_free(void* data) { device_free(data); }
void emulator_begin_capture() { recording.reset(new Graph); }
void* emulator_end_capture() { return recording.release(); }
int emulator_replay(void* graph) {
  for (const auto& work : *static_cast<Graph*>(graph)) {
    if (const int status = work()) return status;
  }
  return 0;
}
void emulator_free_graph(void* graph) { delete static_cast<Graph*>(graph); }

}  // extern "C"
