// The waits of a collective, and the failures that they report.

#include <stdio.h>
#include <string.h>
#include <time.h>

#include <algorithm>

#include "description.h"
#include "group.h"

namespace nanotf {
namespace {

constexpr int kSleepMilliseconds = 50;  // longest delay until an abort or a death is noticed

std::string Seconds(double seconds) {
  char text[32];
  snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

uint64_t Tag(uint32_t key, uint32_t number) { return static_cast<uint64_t>(key) << 32 | number; }

// The time left for a wait. A late look counts as only one second: this process was frozen
// meanwhile (SIGSTOP, `docker pause`), and usually its peers too, so that they could not arrive.
class Patience {
 public:
  explicit Patience(double seconds) : left_(seconds) {}
  bool IsOver(Clock::time_point now) {
    left_ -= std::min(std::chrono::duration<double>(now - looked_).count(), 1.0);
    looked_ = now;
    return left_ < 0;
  }

 private:
  double left_;
  Clock::time_point looked_ = Clock::now();
};

}  // namespace

Call::Call(Group& group, const NanotfCall& what, NanotfOffer offer, uint64_t rows)
    : group_(group),
      what_(what),
      summary_(Summary(what)),
      number_(group.Enter(what.key)),
      tag_(Tag(what.key, number_)),
      slots_(group.size(), -1) {
  uint64_t signature = 0;
  try {
    group_.CheckAborted();
    ClaimSlot();
    signature = FindSignature();
  } catch (...) {
    group_.Leave(what_.key, slots_[group_.rank()]);
    throw;
  }
  SlotHeader& own = group_.slot(group_.rank(), slots_[group_.rank()]);
  own.posted.store(0, std::memory_order_relaxed);
  own.reduced.store(0, std::memory_order_relaxed);
  own.combined.store(0, std::memory_order_relaxed);
  own.signature = signature;
  own.rows = rows;
  own.offer = offer;
  own.offer.key = what_.key;
  if (what_.kind != kNanotfNothing) own.offer.kind = what_.kind;
  own.text_length = static_cast<uint32_t>(std::min(summary_.size(), sizeof(own.text)));
  memcpy(own.text, summary_.data(), own.text_length);
}

Call::~Call() {
  if (met_ && group_.size() > 1) {
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer == group_.rank()) continue;
      group_.acknowledged(group_.rank(), peer, slots_[peer]).store(tag_, std::memory_order_release);
    }
    group_.Announce();
  }
  group_.Leave(what_.key, slots_[group_.rank()]);
}

void Call::ClaimSlot() {
  int& own = slots_[group_.rank()];
  auto claimed = [&] { return (own = group_.TryClaim()) >= 0; };
  if (claimed()) return;
  Patience patience(group_.config().deadline_seconds);
  do {
    // Threads of this process and peers may free a slot. This wait is rare, so it just polls.
    struct timespec pause = {0, 100000};
    nanosleep(&pause, nullptr);
    group_.CheckAborted();
    if (patience.IsOver(Clock::now()) && !claimed()) {
      GiveUp(kNanotfExpired,
             "rank " + std::to_string(group_.rank()) + " waited " +
                 Seconds(group_.config().deadline_seconds) + " to begin " + Describe() +
                 ", because " + std::to_string(kSlots) + " collectives were in flight",
             "Ranks that begin more than " + std::to_string(kSlots) +
                 " at once must begin the same ones.");
    }
  } while (own < 0 && !claimed());
}

uint64_t Call::FindSignature() {
  const int guide = what_.follows ? group_.Guide() : group_.rank();
  if (guide == group_.rank()) return Signature(what_);
  Await(guide, [&] { return Find(guide); });
  return group_.slot(guide, slots_[guide]).signature;
}

void Call::PostProduced(uint64_t rounds) {
  const int index = slots_[group_.rank()];
  group_.slot(group_.rank(), index).posted.store(rounds, std::memory_order_release);
  if (rounds == 1) {
    group_.header(group_.rank()).tags[index].store(tag_, std::memory_order_release);
  }
  group_.Announce();
}

void Call::PostReduced(uint64_t rounds) {
  group_.slot(group_.rank(), slots_[group_.rank()])
      .reduced.store(rounds, std::memory_order_release);
  group_.Announce();
}

void Call::PostCombined(uint64_t rounds) {
  group_.slot(group_.rank(), slots_[group_.rank()])
      .combined.store(rounds, std::memory_order_release);
  group_.Announce();
}

bool Call::Find(int peer) {
  // Ranks that call in the same order use the same slot, so look at that one first.
  const std::atomic<uint64_t>* tags = group_.header(peer).tags;
  const int likely = slots_[group_.rank()];
  for (int i = 0; i < kSlots; ++i) {
    const int index = (likely + i) % kSlots;
    if (tags[index].load(std::memory_order_acquire) == tag_) {
      slots_[peer] = index;
      return true;
    }
  }
  return false;
}

void Call::Meet() {
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer != group_.rank()) Await(peer, [&] { return Find(peer); });
  }
  met_ = true;
  const uint64_t first = group_.slot(0, slots_[0]).signature;
  for (int rank = 1; rank < group_.size(); ++rank) {
    if (group_.slot(rank, slots_[rank]).signature == first) continue;
    const std::vector<std::string> details = Exchange(Details(what_));
    throw MakeFailure(
        kNanotfDifferent, group_.rank(),
        "all ranks must call the same collective on the same type and shape. Received: " +
            Difference(details[0], rank, details[rank]) + " (key " + std::to_string(what_.key) +
            ", call " + std::to_string(number_) + ")",
        "Check that every rank runs the same model on batches of the same structure.");
  }
}

std::vector<std::string> Call::Exchange(const std::string& details) {
  const uint64_t chunk = group_.config().chunk_bytes;
  std::vector<std::string> found(group_.size());
  group_.slot(group_.rank(), slots_[group_.rank()]).rows = details.size();
  uint64_t longest = 0;
  uint64_t begin = 0;
  do {
    const uint64_t round = kDescribing + begin / chunk;
    // Another rank's details may be longer and continue after these have ended.
    const std::string piece = details.substr(std::min<size_t>(begin, details.size()), chunk);
    memcpy(input(group_.rank(), round), piece.data(), piece.size());
    PostProduced(round + 1);
    AwaitProduced(round + 1);
    for (int rank = 0; rank < group_.size(); ++rank) {
      const uint64_t bytes = rows(rank);
      longest = std::max(longest, bytes);
      if (bytes > begin) found[rank].append(input(rank, round), std::min(chunk, bytes - begin));
    }
    begin += chunk;
  } while (begin < longest);
  return found;
}

void Call::AwaitProduced(uint64_t rounds) {
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    const auto& posted = group_.slot(peer, slots_[peer]).posted;
    Await(peer, [&] { return posted.load(std::memory_order_acquire) >= rounds; });
  }
}

void Call::AwaitReduced(uint64_t rounds) {
  for (int peer = 0; peer < group_.size(); ++peer) AwaitReducedBy(peer, rounds);
}

void Call::AwaitReducedBy(int peer, uint64_t rounds) {
  if (peer == group_.rank()) return;
  const auto& reduced = group_.slot(peer, slots_[peer]).reduced;
  Await(peer, [&] { return reduced.load(std::memory_order_acquire) >= rounds; });
}

void Call::AwaitCombinedBy(int peer, uint64_t rounds) {
  if (peer == group_.rank()) return;
  const auto& combined = group_.slot(peer, slots_[peer]).combined;
  Await(peer, [&] { return combined.load(std::memory_order_acquire) >= rounds; });
}

template <typename Ready>
void Call::Await(int peer, Ready ready) {
  if (ready()) return;  // the usual case if ranks are equally fast; it does not read the clock
  struct Wait {
    Times& times;
    const Clock::time_point began = Clock::now();
    ~Wait() { times.AddWait(began); }
  } wait{group_.times()};
  if (!SpinUntil(ready, group_.config().spin_seconds)) AwaitAsleep(peer, ready);
}

template <typename Ready>
void Call::AwaitAsleep(int peer, Ready ready) {
  RankHeader& header = group_.header(peer);
  struct Sleeper {
    std::atomic<uint32_t>& count;
    explicit Sleeper(std::atomic<uint32_t>& c) : count(c) { count.fetch_add(1); }
    ~Sleeper() { count.fetch_sub(1); }
  } sleeper(header.sleepers);
  const Preempting preempting;
  Patience patience(group_.config().deadline_seconds);
  auto checked = Clock::now();
  for (;;) {
    const uint32_t event = header.event.load();
    if (ready()) return;
    group_.CheckAborted();
    const auto now = Clock::now();
    if (now - checked >= std::chrono::milliseconds(kSleepMilliseconds)) {
      checked = now;  // rarely: reading /proc costs as much as the usual wait
      const uint32_t state = header.state.load(std::memory_order_acquire);
      if (state == kClosed || (state == kAttached && !IsAlive(header.pid))) {
        if (ready()) return;  // it posted, then exited
        PeerLost(peer, state == kClosed ? "left the group" : "ended");
      }
      if (patience.IsOver(now)) {
        if (ready()) return;  // it may have posted since this rank last looked
        Expire(peer);
      }
    }
    SleepOn(header.event, event, kSleepMilliseconds);
  }
}

void Call::PeerLost(int peer, const char* how) {
  GiveUp(kNanotfLost,
         "rank " + std::to_string(peer) + " (process " + std::to_string(group_.header(peer).pid) +
             ") " + how + " while rank " + std::to_string(group_.rank()) + " waited for it in " +
             Describe(),
         "See that rank's log.", {peer});
}

void Call::Expire(int peer) {
  std::string names;
  const std::vector<int> missing = Missing(peer, &names);
  GiveUp(kNanotfExpired,
         "rank " + std::to_string(group_.rank()) + " waited " +
             Seconds(group_.config().deadline_seconds) + " in " + Describe() + " for " + names,
         "Ranks must call the same collectives; if one is only slow, raise the deadline.", missing);
}

void Call::GiveUp(NanotfFailureKind kind, const std::string& text, const std::string& remedy,
                  const std::vector<int>& missing) {
  const Failure failure = MakeFailure(kind, group_.rank(), text, remedy, missing);
  group_.Abort(failure);
  throw failure;
}

std::string Call::Describe() const {
  return summary_ + " (key " + std::to_string(what_.key) + ", call " + std::to_string(number_) +
         ")";
}

// Includes at least `awaited`.
std::vector<int> Call::Missing(int awaited, std::string* names) {
  std::vector<int> missing;
  const uint64_t here = group_.slot(group_.rank(), slots_[group_.rank()]).posted.load();
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    // A rank looks for its peers one by one, so it has not yet looked for those after `awaited`.
    const bool found = slots_[peer] >= 0 || Find(peer);
    // Until all have met, none can proceed; in a gather they begin with different rounds.
    const bool proceeds = !met_ || group_.slot(peer, slots_[peer]).posted.load() >= here;
    if (found && proceeds) continue;
    *names += (missing.empty() ? "" : ", ") + Lacking(peer, found);
    missing.push_back(peer);
  }
  if (!missing.empty()) return missing;
  *names = Lacking(awaited, true);
  return {awaited};
}

std::string Call::Lacking(int peer, bool found) const {
  const bool absent = group_.header(peer).state.load() == kAbsent;
  return "rank " + std::to_string(peer) +
         (absent  ? " (never attached)"
          : found ? " (came, did not finish)"
                  : " (did not come)");
}

}  // namespace nanotf
