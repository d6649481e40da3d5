// The special registers of a thread.
#include "synchronize.h"

namespace emulator {

uint32_t special_value(Special special, const Warp& w, uint32_t thread) {
  const Launch& l = machine.launch;
  const Block& b = *w.block;
  const Dim& c = b.cluster->index;
  const uint32_t lane = thread % 32;
  switch (special) {
    case Special::kTidX:
      return thread % l.threads.x;
    case Special::kTidY:
      return thread / l.threads.x % l.threads.y;
    case Special::kTidZ:
      return thread / l.threads.x / l.threads.y;
    case Special::kNtidX:
      return l.threads.x;
    case Special::kNtidY:
      return l.threads.y;
    case Special::kNtidZ:
      return l.threads.z;
    case Special::kCtaidX:
      return b.index.x;
    case Special::kCtaidY:
      return b.index.y;
    case Special::kCtaidZ:
      return b.index.z;
    case Special::kNctaidX:
      return l.grid.x;
    case Special::kNctaidY:
      return l.grid.y;
    case Special::kNctaidZ:
      return l.grid.z;
    case Special::kLane:
      return lane;
    case Special::kWarp:
      return static_cast<uint32_t>(w.id);
    case Special::kNwarp:
      return 64;
    case Special::kSm:
      return static_cast<uint32_t>(b.number % 132);
    case Special::kLaneLt:
      return (1u << lane) - 1;
    case Special::kLaneLe:
      return (2u << lane) - 1;
    case Special::kLaneGt:
      return ~((2u << lane) - 1);
    case Special::kLaneGe:
      return ~((1u << lane) - 1);
    case Special::kLaneEq:
      return 1u << lane;
    case Special::kClusterRank:
      return b.rank;
    case Special::kClusterSize:
      return static_cast<uint32_t>(l.cluster.count());
    case Special::kClusterX:
      return c.x;
    case Special::kClusterY:
      return c.y;
    case Special::kClusterZ:
      return c.z;
    case Special::kNclusterX:
      return l.grid.x / l.cluster.x;
    case Special::kNclusterY:
      return l.grid.y / l.cluster.y;
    case Special::kNclusterZ:
      return l.grid.z / l.cluster.z;
    case Special::kClusterCtaX:
      return b.rank % l.cluster.x;
    case Special::kClusterCtaY:
      return b.rank / l.cluster.x % l.cluster.y;
    case Special::kClusterCtaZ:
      return b.rank / l.cluster.x / l.cluster.y;
    case Special::kClusterNctaX:
      return l.cluster.x;
    case Special::kClusterNctaY:
      return l.cluster.y;
    case Special::kClusterNctaZ:
      return l.cluster.z;
    case Special::kDynamicShared:
      return l.dynamic_shared;
    case Special::kTotalShared:
      return b.shared_end - kSharedStart;
  }
  return 0;
}

}  // namespace emulator
