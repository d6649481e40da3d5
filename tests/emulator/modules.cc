#include "modules.h"

#include <map>
#include <mutex>
#include <vector>

namespace emulator {
namespace {

// The layouts of nvcc's fat binaries; only entries of uncompressed PTX are read.
struct Wrapper {
  int magic, version;
  const char* data;
};
struct Header {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct Entry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, options;
  uint16_t minor, major;
  uint32_t arch;
};
constexpr uint32_t kHeaderMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1;

struct Library {
  const char* data = nullptr;
  std::unique_ptr<Module> module;  // parsed at its first use
};

std::mutex mutex;
std::vector<Library>& libraries() {
  static std::vector<Library> all;
  return all;
}
std::map<const void*, std::unique_ptr<HostFunction>>& functions() {
  static std::map<const void*, std::unique_ptr<HostFunction>> all;
  return all;
}

std::string find_ptx(const char* data) {
  const auto* header = reinterpret_cast<const Header*>(data);
  if (header->magic != kHeaderMagic) throw Fault("a fat binary of an unknown form");
  const char *at = data + header->header_bytes, *end = at + header->bytes;
  uint32_t best = 0;
  std::string text;
  while (at < end) {
    const auto* entry = reinterpret_cast<const Entry*>(at);
    if (entry->kind == kPtx && entry->arch >= best) {
      if (entry->compressed_bytes) throw Fault("the PTX is compressed: build with -Xfatbin -compress=false");
      best = entry->arch;
      text.assign(at + entry->header_bytes, entry->bytes);
    }
    at += entry->header_bytes + entry->bytes;
  }
  if (text.empty()) throw Fault("a fat binary without PTX: build with code=compute_90a");
  return text;
}

}  // namespace

int add_library(const void* wrapper) {
  const std::lock_guard<std::mutex> lock(mutex);
  libraries().emplace_back();
  libraries().back().data = static_cast<const Wrapper*>(wrapper)->data;
  return static_cast<int>(libraries().size()) - 1;
}

void add_function(int library, const void* host, const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& f = functions()[host];
  f.reset(new HostFunction);
  f->library = library, f->name = name;
}

HostFunction* find_function(const void* host) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = functions().find(host);
  return found == functions().end() ? nullptr : found->second.get();
}

Kernel& kernel_of(HostFunction& f) {
  if (!f.kernel) {
    Library& library = libraries()[f.library];
    if (!library.module) library.module = parse_ptx(find_ptx(library.data));
    f.kernel = decode(*library.module, f.name);
  }
  return *f.kernel;
}

}  // namespace emulator
