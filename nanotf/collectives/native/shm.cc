// The C interface: handles, and exceptions turned into messages.

#include "shm.h"

#include <string.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "collectives.h"
#include "group.h"
#include "reduce.h"

namespace {

using nanotf::Failure;
using nanotf::Group;

// A call holds its group, so that closing it does not unmap memory under a running collective.
class Registry {
 public:
  int64_t Add(std::shared_ptr<Group> group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_[++last_] = std::move(group);
    return last_;
  }
  std::shared_ptr<Group> Get(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(handle);
    if (found == groups_.end()) {
      throw Failure{
          "the group is closed in this process. Trace the function again with the "
          "present group."};
    }
    return found->second;
  }
  std::shared_ptr<Group> Remove(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(handle);
    if (found == groups_.end()) return nullptr;
    std::shared_ptr<Group> group = std::move(found->second);
    groups_.erase(found);
    return group;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Group>> groups_;
  int64_t last_ = 0;
};

// Never destroyed: TensorFlow's threads may still run when static destructors do.
Registry& Groups() {
  static Registry* registry = new Registry;
  return *registry;
}

void Report(const std::string& message, char* error) {
  static const char kPrefix[] = "nanotf collective: ";
  std::string text =
      message.compare(0, strlen(kPrefix), kPrefix) == 0 ? message : kPrefix + message;
  const size_t length = std::min<size_t>(text.size(), kNanotfErrorBytes - 1);
  memcpy(error, text.data(), length);
  error[length] = 0;
}

template <typename Body>
int Guard(char* error, Body body) {
  try {
    body();
    return 0;
  } catch (const Failure& failure) {
    Report(failure.message, error);
  } catch (const std::exception& exception) {
    Report(exception.what(), error);
  }
  return 1;
}

// A collective: as Guard, and its time is counted.
template <typename Body>
int Collective(int64_t handle, char* error, Body body) {
  return Guard(error, [&] {
    const std::shared_ptr<Group> group = Groups().Get(handle);
    struct Timer {
      nanotf::Times& times;
      const nanotf::Clock::time_point began = nanotf::Clock::now();
      ~Timer() { times.EndCall(began); }
    } timer{group->times()};
    body(*group);
  });
}

}  // namespace

extern "C" {

int64_t nanotf_attach(const NanotfConfig* config, int fd, int rank, char* error) {
  int64_t handle = 0;
  Guard(error, [&] { handle = Groups().Add(std::make_shared<Group>(*config, fd, rank)); });
  return handle;
}

int nanotf_rank(int64_t handle) {
  char error[kNanotfErrorBytes];
  int rank = -1;
  Guard(error, [&] { rank = Groups().Get(handle)->rank(); });
  return rank;
}

int nanotf_all_reduce(int64_t handle, const NanotfCall* call, NanotfType type,
                      NanotfReduction reduction, const NanotfFragment* fragments, int64_t count,
                      char* error) {
  return Collective(handle, error, [&](Group& group) {
    nanotf::AllReduce(group, *call, type, reduction, fragments, count);
  });
}

int nanotf_reduce_scatter(int64_t handle, const NanotfCall* call, NanotfType type,
                          const NanotfFragment* fragments, int64_t count, void* out,
                          uint64_t out_bytes, char* error) {
  return Collective(handle, error, [&](Group& group) {
    nanotf::ReduceScatter(group, *call, type, fragments, count, out, out_bytes);
  });
}

int nanotf_gather_parts(int64_t handle, const NanotfCall* call, const void* part,
                        uint64_t part_bytes, uint64_t element_bytes,
                        const NanotfFragment* fragments, int64_t count, char* error) {
  return Collective(handle, error, [&](Group& group) {
    nanotf::GatherParts(group, *call, part, part_bytes, element_bytes, fragments, count);
  });
}

int nanotf_all_gather(int64_t handle, const NanotfCall* call, const void* in, uint64_t rows,
                      uint64_t row_bytes, NanotfAllocate allocate, void* context, char* error) {
  return Collective(handle, error, [&](Group& group) {
    nanotf::AllGather(group, *call, in, rows, row_bytes, allocate, context);
  });
}

int nanotf_broadcast(int64_t handle, const NanotfCall* call, int root, const void* in, void* out,
                     uint64_t bytes, char* error) {
  return Collective(handle, error,
                    [&](Group& group) { nanotf::Broadcast(group, *call, root, in, out, bytes); });
}

int nanotf_barrier(int64_t handle, const NanotfCall* call, char* error) {
  return Collective(handle, error, [&](Group& group) { nanotf::Barrier(group, *call); });
}

int nanotf_abort(int64_t handle, const char* message) {
  char error[kNanotfErrorBytes];
  return Guard(error, [&] { Groups().Get(handle)->Abort(message); });
}

int nanotf_close(int64_t handle) {
  const std::shared_ptr<Group> group = Groups().Remove(handle);
  if (group) group->Close();
  return 0;
}

int nanotf_begin_steps(int64_t handle, int64_t* numbers) {
  char error[kNanotfErrorBytes];
  return Guard(error, [&] {
    const std::shared_ptr<Group> group = Groups().Get(handle);
    const auto values = group->times().Read();
    std::copy(values.begin(), values.end(), numbers);
    group->times().BeginSteps();
  });
}

int nanotf_times(int64_t handle, int64_t* numbers) {
  char error[kNanotfErrorBytes];
  return Guard(error, [&] {
    const auto values = Groups().Get(handle)->times().Read();
    std::copy(values.begin(), values.end(), numbers);
  });
}

int nanotf_stamp(int64_t handle, char* error) {
  return Guard(error, [&] { Groups().Get(handle)->times().Stamp(); });
}

int nanotf_layout(uint64_t size, uint64_t chunk_bytes, uint64_t* numbers) {
  using nanotf::Layout;
  const Layout layout{size, chunk_bytes};
  const uint64_t values[] = {
      nanotf::kMagic,
      nanotf::kSlots,
      nanotf::kBuffers,
      nanotf::kDescribing,
      nanotf::kPage,
      offsetof(nanotf::Common, aborted),
      offsetof(nanotf::Common, record),
      offsetof(nanotf::RankHeader, state),
      offsetof(nanotf::RankHeader, tags),
      offsetof(nanotf::RankHeader, record),
      Layout::kSlotHeaders,
      sizeof(nanotf::SlotHeader),
      offsetof(nanotf::SlotHeader, reduced),
      offsetof(nanotf::SlotHeader, signature),
      offsetof(nanotf::SlotHeader, rows),
      offsetof(nanotf::SlotHeader, text_length),
      offsetof(nanotf::SlotHeader, text),
      sizeof(nanotf::SlotHeader::text),
      Layout::kAcknowledgements,
      layout.part_bytes(),
      layout.buffers(),
      layout.slot_bytes(),
      layout.region_bytes(),
      layout.total_bytes(),
  };
  const int count = sizeof(values) / sizeof(values[0]);
  std::copy(values, values + count, numbers);
  return count;
}

const char* nanotf_vectors(void) { return nanotf::BestReduce().name; }

}  // extern "C"
