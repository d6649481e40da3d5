// The arena as ORT's allocator, and the statistics of those that live.
#pragma once

#include <string>

#include "arena.h"
#include "ort.h"

namespace deltafuse::ep {

// `tag` names the session for those who ask for statistics.
OrtStatus* CreateArenaAllocator(const Api& api, Owned<OrtMemoryInfo> info, const Arena::Backend& backend,
                                size_t limit_bytes, bool keep, std::string tag, OrtAllocator** allocator);
void ReleaseArenaAllocator(OrtAllocator* allocator);

// JSON list of the living arenas of the session with this tag; of all of them when the tag is "".
std::string ArenaStatsJson(const std::string& tag);

// " (limit 64.0 MiB, in use 12.5 MiB)" as an allocator of whatever kind tells it, or "" where it does not.
std::string MemoryText(const Api& api, const OrtAllocator* allocator);

// The same of the living arenas on a CUDA device that have a limit, for errors that no allocator is known for.
std::string LimitedArenasText(int ordinal);

}  // namespace deltafuse::ep
