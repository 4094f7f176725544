// The layout of a group's shared memory, and the protocol that runs over it.
//
// A group has one anonymous memory file:
//
//   [common page][region of rank 0][region of rank 1] ...
//
// Only its own rank writes a region. So its pages are on that rank's NUMA node, and no shared
// word needs a lock. (Any rank may write two words: `sleepers`, by atomic addition, and `aborted`,
// always with the same 1.) A region holds a header, 16 slots, this rank's acknowledgements of the
// others' slots, and the slots' buffers. A slot carries one collective from call to return. Its
// tag is (key << 32 | number of the call with that key). Ranks match calls by tag, never by the
// order of the calls.
//
// One collective, seen from one rank ("post" is a release store, "wait" ends in an acquire load):
//
//   1. Claim a free slot of the own region: no other thread of this process uses it, and every
//      peer has acknowledged its current tag. Write the description of the call.
//   2. Produce round 0: copy the first chunk of the input to buffer 0. Post the tag.
//   3. Produce round k + 1 in buffer (k + 1) mod 4 and post `posted`.
//   4. Wait until every peer has posted round k; in round 0 find the peers' slots by tag and
//      compare the signatures of the calls. If they differ, go to 4a. All ranks compare the same
//      headers, so all of them do.
//   5. Consume round k: reduce all ranks' chunks in the order of ranks, or copy from them.
//   6. Repeat 3 to 5 for the next k.
//   7. Acknowledge every peer's slot. Return without waiting.
//
//   4a. Write the size of the call's description in bytes, then send the description in rounds:
//       copy its next chunk to a buffer, post, wait until every peer has posted, copy from all.
//       Stop when the longest description is complete. Name the first tensor that differs. Go to 7.
//
// The rounds of 4a are numbered from 2^62, so that rounds of steps 2 and 3 cannot be mistaken for
// them. They may overwrite the data of steps 2 and 3: no rank reads those once signatures differ.
//
// Why 4 buffers suffice: a rank that produces round k + 1 has seen (step 4 for k - 1) that every
// peer has posted round k - 1. A peer does that after it has consumed round k - 3. So the buffer of
// round k - 3 = (k + 1) - 4 is the latest one that no rank reads any more.
//
// Why there is no barrier at the end: data that peers still read stay in the slot until they
// acknowledge it; the next call takes another slot. A peer that has yet to acknowledge needs
// nothing more from this rank, so a wait for a free slot always ends. Successive calls need 2
// slots: at call n + 2 every peer has posted call n + 1 and thus acknowledged call n. Sixteen slots
// allow as many keys at once; the seventeenth waits in step 1.
//
// Large all-reduces of more than two ranks split step 5 in two, so that a rank reads
// 2 (N - 1) / N instead of N - 1 times the message:
//
//   5a. Reduce the own N-th of chunk k to result buffer k mod 4; post `reduced`.
//   5b. Wait until every peer has posted `reduced` for k - 1; copy all N parts of round k - 1.
//
// The same four buffers suffice. Inputs: a rank produces k + 1 after 5b for k - 2. By then every
// peer has reduced k - 2 and no longer reads older inputs. Results: a rank reduces k after every
// peer has posted k. By then each has finished its iteration k - 2, which copied the results of
// round k - 3.
//
// If the ranks are on several NUMA nodes, equally many on each, these steps have three waits. A
// chunk then crosses from node to node once, not once for every other rank:
//
//   5a. Divide chunk k into as many parts as the node has ranks. Reduce the own part of the inputs
//       of this node's ranks to result buffer k mod 4; post `reduced`.
//   5b. Wait until the ranks with that part on the other nodes have posted `reduced` for k - 1;
//       reduce their results in the order of nodes to total buffer (k - 1) mod 4; post `combined`.
//   5c. Wait until this node's ranks have posted `combined` for k - 2; copy their totals.
//
// Again the same four buffers suffice. Results: a rank reduces k after every peer has posted k. By
// then each has finished its iteration k - 2, which combined the results of round k - 3. Reducing k
// overwrites those of k - 4. Totals: a rank combines k - 1 in iteration k. By then every peer has
// finished its iteration k - 2, which copied the totals of round k - 4. Combining k - 1 overwrites
// those of k - 5.
//
// Joining: a rank that will make no more calls increments `joins`, and then takes part in those
// that it finds in the slots of its guide: the first rank that has not joined. Whoever has not
// joined comes to each call, so one guide is enough. It copies the guide's signature, and gives
// zeros to a sum and no rows to a gather. So it has made as many calls of each key as the others
// when all have joined; that is decided by rank 0, which the others follow to the end.
//
// Waiting: a rank increments its own `event` after each post. A peer that has spun without success
// adds itself to `sleepers` and sleeps in a futex on `event`. Both are sequentially consistent, so
// either the sleeper sees the new event or the poster sees the sleeper. A sleeper also wakes 20
// times a second to check `aborted`, the peer's process and the deadline.

#ifndef NANOTF_COLLECTIVES_NATIVE_LAYOUT_H_
#define NANOTF_COLLECTIVES_NATIVE_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm.h"

namespace nanotf {

constexpr uint64_t kMagic = 0x6e616e6f74663035;  // "nanotf05": changes with the layout
constexpr int kSlots = 16;
constexpr int kBuffers = 4;
constexpr uint64_t kDescribing = uint64_t{1} << 62;  // the first round of step 4a
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

enum RankState : uint32_t { kAbsent = 0, kAttached = 1, kClosed = 2 };

// The reason for an abort. Written once, by the owner of the page that holds it.
struct AbortRecord {
  std::atomic<uint32_t> set;  // 1 after `failure` is complete
  NanotfFailure failure;
};

struct Common {
  uint64_t magic;  // by the parent, before any rank maps
  uint64_t nonce;
  uint64_t size;
  uint64_t chunk_bytes;
  uint64_t nodes;
  alignas(kLine) std::atomic<uint32_t> aborted;  // stays 1; by any rank, after an AbortRecord
  alignas(1024) AbortRecord record;              // by the parent
};

struct RankHeader {
  std::atomic<uint32_t> event;                 // by the rank, after each post
  std::atomic<uint32_t> sleepers;              // by peers' threads, around a sleep on `event`
  alignas(kLine) std::atomic<uint32_t> state;  // RankState, by the rank
  uint32_t pid;                                // by the rank, before `state`
  std::atomic<uint32_t> joins;                 // by the rank: how often it has joined
  alignas(kLine) std::atomic<uint64_t> tags[kSlots];  // by the rank, with the first round
  alignas(1024) AbortRecord record;                   // by the rank
};

struct SlotHeader {
  std::atomic<uint64_t> posted;                  // rounds produced; 0 before the tag is posted
  alignas(kLine) std::atomic<uint64_t> reduced;  // rounds reduced (two-step all-reduce)
  std::atomic<uint64_t> combined;                // rounds combined (several nodes)
  alignas(kLine) uint64_t signature;             // if it differs between ranks, the call fails
  uint64_t rows;      // all-gather: this rank's rows; in step 4a: bytes of its description
  NanotfOffer offer;  // what a rank that has joined needs to take part
  uint32_t text_length;
  char text[332];  // description of the call, for people
};

static_assert(sizeof(AbortRecord) == 2048);
static_assert(sizeof(Common) <= kPage);
static_assert(sizeof(RankHeader) <= kPage);
static_assert(sizeof(SlotHeader) == 512);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

constexpr size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Offsets in bytes, from the start of the file or of a region.
struct Layout {
  size_t size;         // ranks
  size_t chunk_bytes;  // a multiple of kLine
  size_t nodes;        // NUMA nodes; the first `size / nodes` ranks are on the first node

  static constexpr size_t kSlotHeaders = kPage;
  static constexpr size_t kAcknowledgements = kSlotHeaders + kSlots * sizeof(SlotHeader);

  size_t ranks_of_node() const { return size / nodes; }
  size_t part_bytes() const {
    return RoundUp((chunk_bytes + ranks_of_node() - 1) / ranks_of_node(), kLine);
  }
  size_t buffers() const {
    return RoundUp(kAcknowledgements + size * kSlots * sizeof(uint64_t), kPage);
  }
  size_t slot_bytes() const {
    return kBuffers * (chunk_bytes + (nodes > 1 ? 2 : 1) * part_bytes());
  }
  size_t region_bytes() const { return RoundUp(buffers() + kSlots * slot_bytes(), kPage); }
  size_t total_bytes() const { return kPage + size * region_bytes(); }
};

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_LAYOUT_H_
