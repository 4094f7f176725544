// One rank's view of a group: the mapping, the slots, and the waits. See layout.h for the protocol.

#ifndef NANOTF_COLLECTIVES_NATIVE_GROUP_H_
#define NANOTF_COLLECTIVES_NATIVE_GROUP_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "layout.h"
#include "shared_values.h"
#include "shm.h"
#include "wait.h"

namespace nanotf {

// The exception of a collective; the C interface passes it to the caller.
using Failure = NanotfFailure;

Failure MakeFailure(NanotfFailureKind kind, int rank, const std::string& text,
                    const std::string& remedy = "", const std::vector<int>& missing = {});

// This rank's times, in nanoseconds of `Clock`. Concurrent calls add up.
class Times {
 public:
  void EndCall(Clock::time_point began) {
    const int64_t now = Now();
    calls_.fetch_add(1, std::memory_order_relaxed);
    in_calls_.fetch_add(now - Nanoseconds(began), std::memory_order_relaxed);
    ended_.store(now, std::memory_order_relaxed);
  }
  void AddWait(Clock::time_point began) {
    waited_.fetch_add(Now() - Nanoseconds(began), std::memory_order_relaxed);
  }
  void BeginSteps() { began_.store(Now(), std::memory_order_relaxed); }
  // The step's data have arrived. The step waited for them since it began or, if several steps are
  // one execution, since the last collective of the step before. A second stamp with neither in
  // between counts nothing.
  void Stamp() {
    const int64_t now = Now();
    const int64_t since =
        std::max(began_.load(std::memory_order_relaxed), ended_.load(std::memory_order_relaxed));
    const int64_t last = stamped_.exchange(now, std::memory_order_relaxed);
    if (since > last) input_.fetch_add(now - since, std::memory_order_relaxed);
  }
  // In the order of nanotf_times.
  std::array<int64_t, 4> Read() const {
    auto get = [](const std::atomic<int64_t>& number) {
      return number.load(std::memory_order_relaxed);
    };
    return {get(calls_), get(in_calls_), get(waited_), get(input_)};
  }

 private:
  static int64_t Nanoseconds(Clock::time_point at) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
  }
  static int64_t Now() { return Nanoseconds(Clock::now()); }

  // Written by the threads that run this rank's ops; in this process's private memory.
  std::atomic<int64_t> calls_{0}, in_calls_{0}, waited_{0}, input_{0};
  std::atomic<int64_t> began_{0}, ended_{0}, stamped_{0};
};

class Group {
 public:
  // Maps the file. Throws Failure.
  Group(const NanotfConfig& config, int fd, int rank);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const NanotfConfig& config() const { return config_; }
  Times& times() { return times_; }
  int size() const { return static_cast<int>(layout_.size); }
  int rank() const { return rank_; }
  int nodes() const { return static_cast<int>(layout_.nodes); }
  int ranks_of_node() const { return static_cast<int>(layout_.ranks_of_node()); }

  RankHeader& header(int rank) const { return *At<RankHeader>(rank, 0); }
  SlotHeader& slot(int rank, int index) const {
    return *At<SlotHeader>(rank, Layout::kSlotHeaders + index * sizeof(SlotHeader));
  }
  // In `reader`'s region: the last tag of slot `index` of `owner` that it has finished with.
  std::atomic<uint64_t>& acknowledged(int reader, int owner, int index) const {
    return At<std::atomic<uint64_t>>(reader, Layout::kAcknowledgements)[owner * kSlots + index];
  }
  char* input_buffer(int rank, int index, uint64_t round) const {
    return At<char>(rank, layout_.buffers() + index * layout_.slot_bytes() +
                              (round % kBuffers) * layout_.chunk_bytes);
  }
  char* result_buffer(int rank, int index, uint64_t round) const {
    return At<char>(rank, layout_.buffers() + index * layout_.slot_bytes() +
                              kBuffers * layout_.chunk_bytes +
                              (round % kBuffers) * layout_.part_bytes());
  }
  // Only with several nodes.
  char* total_buffer(int rank, int index, uint64_t round) const {
    return result_buffer(rank, index, round) + kBuffers * layout_.part_bytes();
  }

  // Announces that this rank has posted something.
  void Announce();
  // Sets the abort flag, with `failure` unless this rank has already reported one.
  void Abort(const Failure& failure);
  // Throws Failure if the group was aborted or closed.
  void CheckAborted() const;
  // Tells the others that this rank makes no more calls; see "Joining" in layout.h.
  void Join();
  // The rank that this one, which has joined, follows. This rank itself if all have joined and it
  // is the one that decides so.
  int Guide() const;
  // Waits for a call of the guide, at most `milliseconds`. Throws Failure if the guide is gone.
  NanotfOffer Next(int milliseconds);
  // Ends this rank's part: its running calls fail, and waiting peers see that it left.
  void Close();
  // Remembers that a collective has failed, for callers that ask after TensorFlow has lost the
  // failure itself.
  void Remember(const Failure& failure);
  // Returns how many have failed; `last` gets the last failure.
  int64_t Failures(Failure* last);
  // Returns false if the ranks have not yet tried to share values in `place`; nullptr if they
  // cannot.
  bool FindValues(int64_t place, std::shared_ptr<SharedValues>* values);
  void KeepValues(int64_t place, std::shared_ptr<SharedValues> values);
  void DropValues(int64_t place);

 private:
  friend class Call;

  template <typename T>
  T* At(int rank, size_t offset) const {
    return reinterpret_cast<T*>(base_ + kPage + rank * layout_.region_bytes() + offset);
  }
  Common& common() const { return *reinterpret_cast<Common*>(base_); }

  // Returns the number of this call with `key`; throws if the key is in flight.
  uint32_t Enter(uint32_t key);
  void Leave(uint32_t key, int slot);
  int TryClaim();
  // Finds a call of a peer that this rank has not come to.
  bool FindOffer(int peer, NanotfOffer* offer);

  const NanotfConfig config_;
  const Layout layout_;
  const int rank_;
  char* base_ = nullptr;
  std::atomic<bool> closed_{false};
  Times times_;

  struct KeyState {
    uint32_t calls = 0;
    bool in_flight = false;
  };
  // Guards the fields below and writes of the abort record. Held only briefly, never in a wait.
  std::mutex mutex_;
  int64_t failures_ = 0;
  Failure last_failure_ = {};
  std::unordered_map<uint32_t, KeyState> keys_;
  std::unordered_map<int64_t, std::shared_ptr<SharedValues>> values_;
  bool busy_[kSlots] = {};
};

// One collective from call to return: a slot here and the peers' slots with the same tag.
class Call {
 public:
  // Claims a slot and writes its header (step 1). `offer`, but for its key, is what the call moves.
  // This rank gives `rows` rows to a gather.
  Call(Group& group, const NanotfCall& what, NanotfOffer offer, uint64_t rows = 0);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  char* input(int rank, uint64_t round) const {
    return group_.input_buffer(rank, slots_[rank], round);
  }
  char* result(int rank, uint64_t round) const {
    return group_.result_buffer(rank, slots_[rank], round);
  }
  char* total(int rank, uint64_t round) const {
    return group_.total_buffer(rank, slots_[rank], round);
  }
  uint64_t rows(int rank) const { return group_.slot(rank, slots_[rank]).rows; }

  void PostProduced(uint64_t rounds);
  void PostReduced(uint64_t rounds);
  void PostCombined(uint64_t rounds);
  // Step 4 for the first round: finds the peers' slots and compares the calls.
  void Meet();
  // Waits until every peer has posted `rounds` rounds.
  void AwaitProduced(uint64_t rounds);
  void AwaitReduced(uint64_t rounds);
  // Wait for one peer only.
  void AwaitReducedBy(int peer, uint64_t rounds);
  void AwaitCombinedBy(int peer, uint64_t rounds);

 private:
  template <typename Ready>
  void Await(int peer, Ready ready);
  template <typename Ready>
  void AwaitAsleep(int peer, Ready ready);
  void ClaimSlot();
  // Returns the signature of this call; a rank that has joined waits for its guide's.
  uint64_t FindSignature();
  // Step 4a: sends the details of this rank's call, returns those of all ranks.
  std::vector<std::string> Exchange(const std::string& details);
  bool Find(int peer);
  [[noreturn]] void Expire(int peer);
  [[noreturn]] void PeerLost(int peer, const char* how);
  // Aborts the group and throws.
  [[noreturn]] void GiveUp(NanotfFailureKind kind, const std::string& text,
                           const std::string& remedy, const std::vector<int>& missing = {});
  std::string Describe() const;
  // Returns the ranks that have not arrived or made no progress, at least `awaited`. Appends a
  // text about each to `names`.
  std::vector<int> Missing(int awaited, std::string* names);
  std::string Lacking(int peer, bool found) const;

  Group& group_;
  const NanotfCall what_;
  const std::string summary_;
  const uint32_t number_;
  const uint64_t tag_;
  std::vector<int> slots_;  // by rank; -1 until found
  bool met_ = false;        // true once the peers' slots are known; they must then be acknowledged
};

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_GROUP_H_
