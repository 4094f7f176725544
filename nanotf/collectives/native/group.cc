#include "group.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace nanotf {

Failure MakeFailure(NanotfFailureKind kind, int rank, const std::string& text,
                    const std::string& remedy, const std::vector<int>& missing) {
  Failure failure = {};
  failure.kind = kind;
  failure.rank = rank;
  for (const int one : missing) failure.missing[one / 32] |= 1u << one % 32;
  text.copy(failure.text, sizeof(failure.text) - 1);
  remedy.copy(failure.remedy, sizeof(failure.remedy) - 1);
  return failure;
}

Group::Group(const NanotfConfig& config, int fd, int rank)
    : config_(config), layout_{config.size, config.chunk_bytes, config.nodes}, rank_(rank) {
  struct stat file;
  if (fstat(fd, &file) != 0 || static_cast<size_t>(file.st_size) < layout_.total_bytes()) {
    // Accessing a mapping past the end of the file would kill the process with SIGBUS.
    throw MakeFailure(
        kNanotfMisused, rank,
        "the descriptor must be the file of the group. Received: fd=" + std::to_string(fd),
        "Pass the descriptor that came with the specification.");
  }
  void* base = mmap(nullptr, layout_.total_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    throw MakeFailure(kNanotfMisused, rank,
                      "could not map " + std::to_string(layout_.total_bytes()) +
                          " bytes of shared memory: " + strerror(errno));
  }
  base_ = static_cast<char*>(base);
  if (common().magic != kMagic || common().nonce != config.nonce || common().size != config.size ||
      common().chunk_bytes != config.chunk_bytes || common().nodes != config.nodes) {
    munmap(base, layout_.total_bytes());
    throw MakeFailure(kNanotfMisused, rank,
                      "the descriptor belongs to another group than the specification",
                      "Pass the descriptor that came with it.");
  }
  if (header(rank_).state.load(std::memory_order_acquire) != kAbsent) {
    const uint32_t pid = header(rank_).pid;
    munmap(base, layout_.total_bytes());
    throw MakeFailure(kNanotfMisused, rank,
                      "a rank can be attached once. Received: rank=" + std::to_string(rank) +
                          ", which process " + std::to_string(pid) + " has");
  }
  // The first write places a page on the writer's NUMA node. Owners write their buffers first
  // anyway. Of the pages that peers may read earlier, only the tags' page cannot be written first.
  memset(At<char>(rank_, kPage), 0, layout_.buffers() - kPage);
  header(rank_).pid = static_cast<uint32_t>(getpid());
  header(rank_).state.store(kAttached, std::memory_order_release);
  Announce();
}

Group::~Group() { munmap(base_, layout_.total_bytes()); }

void Group::Announce() {
  RankHeader& own = header(rank_);
  own.event.fetch_add(1, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) WakeAll(own.event);
}

void Group::Abort(const Failure& failure) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    AbortRecord& record = header(rank_).record;
    if (record.set.load(std::memory_order_relaxed) == 0) {
      record.failure = failure;
      record.set.store(1, std::memory_order_release);
    }
  }
  common().aborted.store(1, std::memory_order_seq_cst);
  for (int rank = 0; rank < size(); ++rank) WakeAll(header(rank).event);
}

void Group::CheckAborted() const {
  if (closed_.load(std::memory_order_relaxed)) {
    throw MakeFailure(kNanotfMisused, rank_, "the group is closed on rank " + std::to_string(rank_),
                      "Attach to a new group.");
  }
  if (common().aborted.load(std::memory_order_acquire) == 0) return;
  const AbortRecord* record = &common().record;
  for (int rank = 0; rank < size() && record->set.load(std::memory_order_acquire) == 0; ++rank) {
    record = &header(rank).record;
  }
  throw record->failure;
}

void Group::Remember(const Failure& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++failures_;
  last_failure_ = failure;
}

int64_t Group::Failures(Failure* last) {
  std::lock_guard<std::mutex> lock(mutex_);
  *last = last_failure_;
  return failures_;
}

bool Group::FindValues(int64_t place, std::shared_ptr<SharedValues>* values) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = values_.find(place);
  if (found == values_.end()) return false;
  *values = found->second;
  return true;
}

void Group::KeepValues(int64_t place, std::shared_ptr<SharedValues> values) {
  std::lock_guard<std::mutex> lock(mutex_);
  values_[place] = std::move(values);
}

void Group::DropValues(int64_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  values_.erase(place);
}

void Group::Close() {
  closed_.store(true);
  header(rank_).state.store(kClosed, std::memory_order_release);
  Announce();
}

void Group::Join() {
  header(rank_).joins.fetch_add(1, std::memory_order_release);
  Announce();
}

int Group::Guide() const {
  const uint32_t own = header(rank_).joins.load(std::memory_order_relaxed);
  for (int peer = 0; peer < size(); ++peer) {
    if (header(peer).joins.load(std::memory_order_acquire) < own) return peer;
  }
  return 0;
}

bool Group::FindOffer(int peer, NanotfOffer* offer) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int index = 0; index < kSlots; ++index) {
    const uint64_t tag = header(peer).tags[index].load(std::memory_order_acquire);
    const uint32_t key = static_cast<uint32_t>(tag >> 32);
    // A peer that has begun the next call with the key waits there for this rank.
    if (tag == 0 || static_cast<uint32_t>(tag) != keys_[key].calls + 1) continue;
    *offer = slot(peer, index).offer;
    return true;
  }
  return false;
}

NanotfOffer Group::Next(int milliseconds) {
  NanotfOffer offer = {};
  const auto end = Clock::now() + std::chrono::milliseconds(milliseconds);
  const Preempting preempting;
  for (;;) {
    const int guide = Guide();
    if (guide == rank_) {
      offer.kind = kNanotfAllJoined;
      return offer;
    }
    RankHeader& theirs = header(guide);
    const uint32_t event = theirs.event.load();
    const uint32_t state = theirs.state.load(std::memory_order_acquire);
    if (FindOffer(guide, &offer)) return offer;
    if (Guide() != guide) continue;
    CheckAborted();
    if (state == kClosed || (state == kAttached && !IsAlive(theirs.pid))) {
      const Failure failure =
          MakeFailure(kNanotfLost, rank_,
                      "rank " + std::to_string(guide) + " (process " + std::to_string(theirs.pid) +
                          ") " + (state == kClosed ? "left the group" : "ended") + " while rank " +
                          std::to_string(rank_) + ", which has joined, waited for it",
                      "See that rank's log.", {guide});
      Abort(failure);
      throw failure;
    }
    if (Clock::now() >= end) return offer;
    if (SpinUntil([&] { return theirs.event.load() != event; }, config_.spin_seconds)) continue;
    theirs.sleepers.fetch_add(1);
    SleepOn(theirs.event, event, 50);
    theirs.sleepers.fetch_sub(1);
  }
}

uint32_t Group::Enter(uint32_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  KeyState& state = keys_[key];
  if (state.in_flight) {
    throw MakeFailure(kNanotfMisused, rank_,
                      "one rank may have one collective of a key in flight. Received: key=" +
                          std::to_string(key) + " on rank " + std::to_string(rank_) +
                          " from two threads at once",
                      "Give each its own key.");
  }
  // No number is used twice: a slot may still have the tag of the first call with that number.
  if (state.calls == UINT32_MAX) {
    throw MakeFailure(kNanotfMisused, rank_,
                      "a group numbers 2**32 - 1 collectives of a key. Received: one more of key=" +
                          std::to_string(key) + " on rank " + std::to_string(rank_),
                      "Attach to a new group.");
  }
  state.in_flight = true;
  return ++state.calls;  // begins at 1: a tag of 0 marks an unused slot
}

void Group::Leave(uint32_t key, int slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  keys_[key].in_flight = false;
  if (slot >= 0) busy_[slot] = false;
}

int Group::TryClaim() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int index = 0; index < kSlots; ++index) {
    if (busy_[index]) continue;
    const uint64_t tag = header(rank_).tags[index].load(std::memory_order_relaxed);
    bool free = true;
    for (int peer = 0; peer < size() && free; ++peer) {
      free =
          peer == rank_ || acknowledged(peer, rank_, index).load(std::memory_order_acquire) == tag;
    }
    if (free) {
      busy_[index] = true;
      return index;
    }
  }
  return -1;
}

}  // namespace nanotf
