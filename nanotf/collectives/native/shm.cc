// The C interface: handles, and exceptions turned into return values.

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
using nanotf::MakeFailure;

// A call holds its group, so that closing the group does not unmap memory under the call.
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
      throw MakeFailure(kNanotfMisused, -1, "the group is closed in this process",
                        "Trace the function again with the present group.");
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

template <typename Body>
int Guard(NanotfFailure* failure, Body body) {
  try {
    body();
    return 0;
  } catch (const Failure& thrown) {
    *failure = thrown;
  } catch (const std::exception& exception) {
    *failure = MakeFailure(kNanotfMisused, -1, exception.what());
  }
  return 1;
}

// Runs a collective: like Guard, and also counts its time and remembers its failure.
template <typename Body>
int Collective(int64_t handle, NanotfFailure* failure, Body body) {
  std::shared_ptr<Group> group;
  const int failed = Guard(failure, [&] {
    group = Groups().Get(handle);
    struct Timer {
      nanotf::Times& times;
      const nanotf::Clock::time_point began = nanotf::Clock::now();
      ~Timer() { times.EndCall(began); }
    } timer{group->times()};
    body(*group);
  });
  if (failed && group) group->Remember(*failure);
  return failed;
}

}  // namespace

extern "C" {

int64_t nanotf_attach(const NanotfConfig* config, int fd, int rank, NanotfFailure* failure) {
  int64_t handle = 0;
  Guard(failure, [&] { handle = Groups().Add(std::make_shared<Group>(*config, fd, rank)); });
  return handle;
}

int nanotf_rank(int64_t handle) {
  NanotfFailure unused;
  int rank = -1;
  Guard(&unused, [&] { rank = Groups().Get(handle)->rank(); });
  return rank;
}

int nanotf_all_reduce(int64_t handle, const NanotfCall* call, NanotfType type,
                      NanotfReduction reduction, const NanotfFragment* fragments, int64_t count,
                      NanotfFailure* failure) {
  return Collective(handle, failure, [&](Group& group) {
    nanotf::AllReduce(group, *call, type, reduction, fragments, count);
  });
}

int nanotf_reduce_scatter(int64_t handle, const NanotfCall* call, NanotfType type,
                          const NanotfFragment* fragments, int64_t count, void* out,
                          uint64_t out_bytes, NanotfFailure* failure) {
  return Collective(handle, failure, [&](Group& group) {
    nanotf::ReduceScatter(group, *call, type, fragments, count, out, out_bytes);
  });
}

int nanotf_gather_parts(int64_t handle, const NanotfCall* call, const void* part,
                        uint64_t part_bytes, uint64_t element_bytes,
                        const NanotfFragment* fragments, int64_t count, NanotfFailure* failure) {
  return Collective(handle, failure, [&](Group& group) {
    nanotf::GatherParts(group, *call, part, part_bytes, element_bytes, fragments, count);
  });
}

int nanotf_gather_shared(int64_t handle, const NanotfCall* call, int64_t place, const void* part,
                         uint64_t part_bytes, uint64_t element_bytes, NanotfFragment* fragments,
                         int64_t count, void** holds, int* shared, NanotfFailure* failure) {
  return Collective(handle, failure, [&](Group& group) {
    *shared = nanotf::GatherShared(group, *call, place, part, part_bytes, element_bytes, fragments,
                                   count, holds);
  });
}

void nanotf_release(void* hold) { delete static_cast<nanotf::Hold*>(hold); }

int nanotf_drop_values(int64_t handle, int64_t place) {
  NanotfFailure unused;
  return Guard(&unused, [&] { Groups().Get(handle)->DropValues(place); });
}

int nanotf_all_gather(int64_t handle, const NanotfCall* call, const void* in, uint64_t rows,
                      uint64_t row_bytes, NanotfAllocate allocate, void* context,
                      NanotfFailure* failure) {
  return Collective(handle, failure, [&](Group& group) {
    nanotf::AllGather(group, *call, in, rows, row_bytes, allocate, context);
  });
}

int nanotf_update_shared(int64_t handle, const NanotfCall* call, int64_t place,
                         const NanotfRows* rows, NanotfFragment* table, void** hold,
                         NanotfFailure* failure) {
  return Collective(handle, failure, [&](Group& group) {
    *hold = nanotf::UpdateShared(group, *call, place, *rows, table);
  });
}

int nanotf_update_rows(int64_t handle, const NanotfCall* call, const NanotfRows* rows,
                       const NanotfFragment* table, NanotfFailure* failure) {
  return Collective(handle, failure,
                    [&](Group& group) { nanotf::UpdateRows(group, *call, *rows, *table); });
}

int nanotf_broadcast(int64_t handle, const NanotfCall* call, int root, const void* in, void* out,
                     uint64_t bytes, NanotfFailure* failure) {
  return Collective(handle, failure,
                    [&](Group& group) { nanotf::Broadcast(group, *call, root, in, out, bytes); });
}

int nanotf_barrier(int64_t handle, const NanotfCall* call, NanotfFailure* failure) {
  return Collective(handle, failure, [&](Group& group) { nanotf::Barrier(group, *call); });
}

int nanotf_join(int64_t handle) {
  NanotfFailure unused;
  return Guard(&unused, [&] { Groups().Get(handle)->Join(); });
}

int nanotf_next(int64_t handle, int milliseconds, NanotfOffer* offer, NanotfFailure* failure) {
  std::shared_ptr<Group> group;
  const int failed = Guard(failure, [&] {
    group = Groups().Get(handle);
    *offer = group->Next(milliseconds);
  });
  if (failed && group) group->Remember(*failure);
  return failed;
}

int nanotf_abort(int64_t handle, const char* text) {
  NanotfFailure unused;
  return Guard(&unused, [&] {
    const std::shared_ptr<Group> group = Groups().Get(handle);
    group->Abort(MakeFailure(kNanotfAborted, group->rank(), text));
  });
}

int64_t nanotf_failures(int64_t handle, NanotfFailure* last) {
  int64_t count = 0;
  Guard(last, [&] { count = Groups().Get(handle)->Failures(last); });
  return count;
}

int nanotf_close(int64_t handle) {
  const std::shared_ptr<Group> group = Groups().Remove(handle);
  if (group) group->Close();
  return 0;
}

int nanotf_begin_steps(int64_t handle, int64_t* numbers) {
  NanotfFailure unused;
  return Guard(&unused, [&] {
    const std::shared_ptr<Group> group = Groups().Get(handle);
    const auto values = group->times().Read();
    std::copy(values.begin(), values.end(), numbers);
    group->times().BeginSteps();
  });
}

int nanotf_times(int64_t handle, int64_t* numbers) {
  NanotfFailure unused;
  return Guard(&unused, [&] {
    const auto values = Groups().Get(handle)->times().Read();
    std::copy(values.begin(), values.end(), numbers);
  });
}

int nanotf_stamp(int64_t handle, NanotfFailure* failure) {
  return Guard(failure, [&] { Groups().Get(handle)->times().Stamp(); });
}

void nanotf_layout_of(uint64_t size, uint64_t chunk_bytes, uint64_t nodes, NanotfLayout* layout) {
  using nanotf::Layout;
  const Layout sizes{size, chunk_bytes, nodes};
  *layout = {
      nanotf::kMagic,
      nanotf::kSlots,
      nanotf::kPage,
      offsetof(nanotf::Common, aborted),
      offsetof(nanotf::Common, record),
      offsetof(nanotf::AbortRecord, failure),
      offsetof(nanotf::RankHeader, tags),
      offsetof(nanotf::RankHeader, record),
      Layout::kSlotHeaders,
      sizeof(nanotf::SlotHeader),
      offsetof(nanotf::SlotHeader, text_length),
      offsetof(nanotf::SlotHeader, text),
      sizeof(nanotf::SlotHeader::text),
      Layout::kAcknowledgements,
      sizes.region_bytes(),
      sizes.total_bytes(),
  };
}

const char* nanotf_vectors(void) { return nanotf::BestReduce().name; }

}  // extern "C"
