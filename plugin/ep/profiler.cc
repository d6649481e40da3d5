#include "profiler.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <mutex>

#include "cuda_backend.h"

namespace deltafuse::ep {
namespace {

// Pairs of marks on the GPU that may wait to be read before they are read.
constexpr size_t kMostMarks = 4096;
// Events of one profile; what comes after is left out, as in ORT's own.
constexpr size_t kMostEvents = 1000000;

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

struct KernelScope::Event {
  std::string name;
  Arguments arguments;
  std::string parent;  // ORT's event that it belongs to
  int thread = 0;
  int64_t start = 0, duration = 0;  // nanoseconds, by this process's clock
  CudaMark begin, end;              // instead, where the times are still to be read from the GPU
};

class Profiler final : public OrtEpProfilerImpl {
 public:
  using Event = KernelScope::Event;

  explicit Profiler(std::shared_ptr<Session> session)
      : OrtEpProfilerImpl{}, api_(session->api()), session_(std::move(session)) {
    ort_version_supported = kOrtApiVersion;
    Release = [](OrtEpProfilerImpl* self) noexcept { delete static_cast<Profiler*>(self); };
    StartProfiling = [](OrtEpProfilerImpl* self, int64_t offset) noexcept -> OrtStatus* {
      auto* profiler = static_cast<Profiler*>(self);
      profiler->offset_ = offset - Now();
      return nullptr;
    };
    StartEvent = [](OrtEpProfilerImpl* self, uint64_t id) noexcept {
      auto* profiler = static_cast<Profiler*>(self);
      return Guard(profiler->api_, [&]() -> OrtStatus* {
        Top() = new Frame{profiler, id, {}, Top()};
        return nullptr;
      });
    };
    StopEvent = [](OrtEpProfilerImpl* self, uint64_t id, const OrtProfilingEvent* event) noexcept {
      auto* profiler = static_cast<Profiler*>(self);
      return Guard(profiler->api_, [&] { return profiler->Close(id, event); });
    };
    EndProfiling = [](OrtEpProfilerImpl* self, OrtProfilingEventsContainer* events) noexcept {
      auto* profiler = static_cast<Profiler*>(self);
      return Guard(profiler->api_, [&] { return profiler->Report(events); });
    };
  }

  // The innermost of ORT's events on this thread, if it is profiled.
  static Profiler* Current() { return Top() ? Top()->profiler : nullptr; }
  static void Add(Event event) {
    if (Top()) Top()->events.push_back(std::move(event));
  }

  // Pairs a moment on the stream with one of this process's clock, once: the GPU has a clock of its own.
  void SetBase(void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (base_) return;
    CudaMark mark = MarkCuda(session_->device(), stream);
    if (!mark || CudaMillisecondsBetween(mark, mark) < 0) return;
    base_time_ = Now();
    base_ = std::move(mark);
  }

 private:
  // One of ORT's events that has begun on this thread; ORT ends each of them.
  struct Frame {
    Profiler* profiler;
    uint64_t id;
    std::vector<Event> events;
    Frame* outer;
  };

  // The innermost frame. A plain pointer: it needs no destructor when a thread ends.
  static Frame*& Top() {
    thread_local Frame* top = nullptr;
    return top;
  }

  OrtStatus* Close(uint64_t id, const OrtProfilingEvent* ort_event) {
    Frame** link = &Top();
    while (*link && ((*link)->profiler != this || (*link)->id != id)) link = &(*link)->outer;
    if (!*link) return nullptr;
    const std::unique_ptr<Frame> frame(*link);
    *link = frame->outer;
    if (frame->events.empty()) return nullptr;
    const char* parent = nullptr;
    DF_RETURN_IF_ERROR(api_.ep->ProfilingEvent_GetName(ort_event, &parent));
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Event& event : frame->events) {
      if (events_.size() >= kMostEvents) break;
      event.parent = parent ? parent : "";
      events_.push_back(std::move(event));
    }
    if (events_.size() - read_ > kMostMarks) ReadMarks();
    return nullptr;
  }

  // Waits for the marks of all events so far and turns them into times.
  void ReadMarks() {
    for (; read_ < events_.size(); ++read_) {
      Event& event = events_[read_];
      if (!event.end) continue;
      const double duration = CudaMillisecondsBetween(event.begin, event.end);
      const double start = duration < 0 ? -1 : CudaMillisecondsBetween(base_, event.begin);
      if (start >= 0) {
        event.start = base_time_ + static_cast<int64_t>(1e6 * start);
        event.duration = static_cast<int64_t>(1e6 * duration);
        event.arguments.emplace_back("time", "device");
      } else {
        event.arguments.emplace_back("time", "host");
      }
      event.begin = event.end = nullptr;
    }
  }

  OrtStatus* Report(OrtProfilingEventsContainer* container) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ReadMarks();
    for (const Event& event : events_) {
      std::vector<const char*> keys, values;
      for (const auto& [key, value] : event.arguments) {
        keys.push_back(key.c_str());
        values.push_back(value.c_str());
      }
      keys.push_back("parent_name");
      values.push_back(event.parent.c_str());
      OrtProfilingEvent* made = nullptr;
      const int64_t start = (event.start + offset_) / 1000;
      DF_RETURN_IF_ERROR(api_.ep->CreateProfilingEvent(OrtProfilingEventCategory_KERNEL, getpid(), event.thread,
                                                       event.name.c_str(), start, event.duration / 1000, keys.data(),
                                                       values.data(), keys.size(), &made));
      const Owned<OrtProfilingEvent> owned = Own(made, api_.ep->ReleaseProfilingEvent);
      DF_RETURN_IF_ERROR(api_.ep->ProfilingEventsContainer_AddEvents(container, &made, 1));
    }
    events_.clear();
    read_ = 0;
    return nullptr;
  }

  const Api& api_;
  const std::shared_ptr<Session> session_;
  int64_t offset_ = 0;  // from this process's clock to the profile's, nanoseconds
  std::mutex mutex_;    // of what follows
  std::vector<Event> events_;
  size_t read_ = 0;  // events whose times are known
  CudaMark base_;
  int64_t base_time_ = 0;
};

OrtStatus* CreateProfiler(std::shared_ptr<Session> session, OrtEpProfilerImpl** profiler) {
  *profiler = new Profiler(std::move(session));
  return nullptr;
}

KernelScope::KernelScope(const Session& session, const char* name, const std::string& node, void* stream)
    : session_(session), stream_(stream) {
  if (session.options().nvtx) PushNvtxRange((std::string(name) + " " + node).c_str());
  Profiler* profiler = Profiler::Current();
  if (!profiler) return;
  event_ = std::make_unique<Event>();
  event_->name = name;
  event_->arguments.emplace_back("node", node);
  event_->thread = static_cast<int>(syscall(SYS_gettid));
  if (session.device().cuda) {
    profiler->SetBase(stream);
    event_->begin = MarkCuda(session.device(), stream);
  } else {
    event_->arguments.emplace_back("time", "host");
  }
  event_->start = Now();
}

KernelScope::~KernelScope() {
  if (event_) {
    event_->duration = Now() - event_->start;
    try {
      if (event_->begin) event_->end = MarkCuda(session_.device(), stream_);
      if (!event_->end && session_.device().cuda) event_->arguments.emplace_back("time", "host");
      Profiler::Add(std::move(*event_));
    } catch (...) {  // no memory: an event less
    }
  }
  if (session_.options().nvtx) PopNvtxRange();
}

void KernelScope::SetArguments(Arguments arguments) {
  if (!event_) return;
  for (auto& argument : arguments) event_->arguments.push_back(std::move(argument));
}

}  // namespace deltafuse::ep
