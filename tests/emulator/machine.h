// What runs: decoded kernels, and the state of a launch, its blocks and its warps.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ptx.h"

namespace emulator {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;

// Generic addresses of shared and local memory: the byte at the top tells them from the host's addresses.
constexpr uint64_t kSharedWindow = uint64_t{1} << 56, kLocalWindow = uint64_t{2} << 56;
// Offsets in shared memory begin here, so that 0 is not one. The bits from 24 on: 0 for the block's own memory, else
// one more than the rank of the cluster's block.
constexpr uint32_t kSharedStart = 1024, kRankShift = 24, kOffsetMask = (1u << kRankShift) - 1;

// A register: byte offset of its 32 lanes among the warp's rows, or with bit 0 set among the kernel's constants.
// Up to 32 bits take 4 bytes a lane, 64 bits take 8. Predicates are numbers of Warp::predicates.
using Ref = int32_t;

enum class Kind : uint8_t {
  kInteger,
  kFloat,
  kDouble,
  kConvert,
  kSharedLoad,
  kSharedStore,
  kGlobalLoad,
  kGlobalStore,
  kLocal,
  kParameter,
  kShuffle,
  kBarrier,
  kTensor,
  kBranch,
  kCopy,
  kOther,
  kCount
};

struct Warp;
struct Inst;
using Handler = void (*)(Warp&, const Inst&, uint32_t lanes);

struct Inst {
  Handler run = nullptr;
  int32_t guard = -1;  // 2 * predicate + negated
  Ref r[6] = {0, 0, 0, 0, 0, 0};
  int64_t number = 0;            // an address's offset, a jump's target, ...
  uint32_t shared_constant = 0;  // free for handlers
  uint8_t count = 1;             // elements of a vector
  bool wide = false;             // the address is a 64-bit register
  bool writes_second = false;    // "%r|%p"
  Kind kind = Kind::kOther;
  std::vector<Ref> list, more;         // registers of vectors
  int source = 0;                      // index among Kernel::instructions
  mutable uint64_t low = 1, high = 0;  // the memory that the last access lay in
};

enum class Special : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLane,
  kWarp,
  kNwarp,
  kSm,
  kLaneLt,
  kLaneLe,
  kLaneGt,
  kLaneGe,
  kLaneEq,
  kClusterRank,
  kClusterSize,
  kClusterX,
  kClusterY,
  kClusterZ,
  kNclusterX,
  kNclusterY,
  kNclusterZ,
  kClusterCtaX,
  kClusterCtaY,
  kClusterCtaZ,
  kClusterNctaX,
  kClusterNctaY,
  kClusterNctaZ,
  kDynamicShared,
  kTotalShared
};

struct Kernel {
  std::string name;
  const Module* module = nullptr;
  std::vector<Inst> code;
  std::vector<const Instruction*> instructions;
  std::vector<std::string> function_of;  // of each instruction
  int64_t row_bytes = 0, local_bytes = 0, shared_bytes = 0;
  int predicates = 0, dynamic_shared = 0;  // offset of the dynamic part
  std::vector<char> constants;
  std::vector<std::pair<Special, Ref>> specials;
  std::vector<char> params;  // of the launch that runs; their addresses are constants of the code
  std::vector<int> param_offset, param_bytes;
  int max_threads = 0;
  std::vector<uint64_t> executed;  // of each instruction
  std::vector<uint64_t> work;      // its wavefronts or sectors, with EMU_STATS
};

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

struct Block;

// Lanes that run together.
struct Group {
  const Inst* pc = nullptr;
  uint32_t lanes = 0;
  std::vector<const Inst*> returns;
};

// Copies that have been asked for and not been waited for.
struct PendingCopy {
  char* to;
  const char* from;
  uint32_t bytes, zeros;
};

struct Multiplication;  // of wgmma
struct Words;           // of races.h
using Clock = std::vector<uint32_t>;

enum class WarpState : uint8_t { kReady, kBarrier, kClusterBarrier, kDone };

struct Warp {
  char* base[2] = {nullptr, nullptr};
  uint32_t* predicates = nullptr;
  const Inst* pc = nullptr;
  const Inst* meet = nullptr;  // where the next of `others` waits
  uint32_t lanes = 0, exited = 0;
  int budget = 0;
  int gathered = 0, in_vain = 0;  // the budget when lanes last waited for others, and how often one after the other
  bool failed_wait = false;       // the last thing it did was to look at a barrier in vain
  WarpState state = WarpState::kReady;
  int id = 0, barrier = -1;
  uint32_t cluster_phase = 0;  // in which it came to the cluster's barrier
  Block* block = nullptr;
  char* local = nullptr;
  std::vector<const Inst*> returns;
  std::vector<Group> others;
  std::vector<std::unique_ptr<char[]>> storage;
  std::vector<PendingCopy> copies;
  std::deque<std::vector<PendingCopy>> copy_groups;
  std::vector<std::shared_ptr<Multiplication>> products;
  std::deque<std::vector<std::shared_ptr<Multiplication>>> product_groups;
  uint64_t executed = 0;
  Clock clock;                     // with EMU_RACES
  uint64_t fenced = 0;             // Machine::order at its last fence.proxy.async
  bool waited = false;             // is ordered after a griddepcontrol.wait of the block
  std::vector<uint64_t> unfenced;  // words of global memory that it has written since its last fence, with EMU_PDL

  uint32_t* row32(Ref r) const { return reinterpret_cast<uint32_t*>(base[r & 1] + (r & ~1)); }
  uint64_t* row64(Ref r) const { return reinterpret_cast<uint64_t*>(base[r & 1] + (r & ~1)); }
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0;
  uint32_t reduction = 0;
  bool waited = false;
  Clock clock;
  std::vector<Warp*> waiting;
};

struct Cluster;

struct Block {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;
  uint64_t number = 0;
  Dim index;
  std::vector<char> shared;
  uint32_t shared_end = 0;
  std::deque<Warp> warps;
  NamedBarrier barriers[16];
  int running = 0;
  uint64_t executed = 0;
  bool waited = false;             // one of its warps has done griddepcontrol.wait
  bool let = false;                // one of its warps has done griddepcontrol.launch_dependents
  std::vector<uint64_t> unfenced;  // of all warps, from before their last barrier
  std::shared_ptr<Words> words;
  std::map<uint32_t, Clock> clocks;  // of its mbarriers
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  uint32_t arrived = 0, phase = 0;
  Dim index;
  int running = 0;  // warps that have not ended
  Clock clock;
};

// A bulk copy that lies in wait until somebody looks at its barrier.
struct PendingBulk {
  Block* block;
  uint32_t barrier;
  std::function<void()> copy;
};

struct Launch {
  Kernel* kernel = nullptr;
  Dim grid, threads, cluster;
  uint32_t dynamic_shared = 0;
  bool cooperative = false;
  bool programmatic = false;  // may begin before the launch before it has ended
};

struct Counters {
  uint64_t shared_accesses = 0, shared_wavefronts = 0, shared_least = 0, global_accesses = 0, global_sectors = 0,
           bulk_bytes = 0, async_bytes = 0;
  double tensor_flops = 0;
};

// The launch that is under way.
struct Machine {
  Launch launch;
  bool late = false;  // asynchronous work is done when it is waited for, not when it is asked for
  bool statistics = false, races = false, dependence = false;
  uint64_t order = 0;     // counts generic writes to shared memory and fences, with EMU_RACES
  uint64_t progress = 0;  // counts what may let a waiting warp go on
  std::vector<PendingBulk> bulk;
  Counters counters;
};
extern Machine machine;

// What a kernel does wrong. Ends the launch.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] void fault(const Warp& w, const Inst& in, const std::string& what);

// decode.cc: the kernel of that name and all functions it calls, ready to run.
std::unique_ptr<Kernel> decode(const Module& module, const std::string& name);
// schedule.cc
void run_launch(const Launch& launch);
void pause(Warp& w);                                       // lets others run
void branch(Warp& w, const Inst* target, uint32_t taken);  // lanes in `taken` go there, the others on
void leave(Warp& w, uint32_t lanes);                       // these lanes have ended
void regroup(Warp& w);                                     // lets the group that is furthest behind run
// For instructions that need all lanes in `wanted` at once: false if the warp has been set to run others first.
bool gather(Warp& w, const Inst& in, uint32_t wanted);

}  // namespace emulator
