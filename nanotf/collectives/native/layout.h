// How the shared memory of a group is laid out, and the protocol that runs over it.
//
// ../layout.py holds the same numbers for the pure-Python implementation; a test compares them.
//
// One anonymous memory file belongs to a group:
//
//   [common page][region of rank 0][region of rank 1] ...
//
// A region is written by its own rank alone, so that its pages lie on that rank's NUMA node and
// no shared word needs a lock. (Two words may be written by anyone: `sleepers`, by atomic
// addition, and `aborted`, to which everyone writes the same 1.) A region holds a header, 16
// slots, the acknowledgements that this rank gives to others, and the slots' buffers. A slot
// carries one collective from call to return. Its tag is (key << 32 | call number of that key):
// ranks find each other by tag, never by the order in which they happen to call.
//
// One collective, seen from one rank ("post" is a release store, "wait" ends in an acquire load):
//
//   1. Claim a free slot of the own region: not used by another thread of this process, and
//      every peer has acknowledged the tag in it. Write what the call is.
//   2. Produce round 0: copy the first chunk of the input to buffer 0. Post the tag.
//   3. Produce round k + 1 in buffer (k + 1) mod 4 and post `posted`.
//   4. Wait until every peer has posted round k; in round 0 find the peers' slots by tag and
//      compare the signatures of the calls. On a difference go to 4a: all ranks compare the same
//      headers, so all do.
//   5. Consume round k: reduce all ranks' chunks in the order of ranks, or copy from them.
//   6. Repeat 3 to 5 for the next k.
//   7. Acknowledge every peer's slot. Return, without waiting for anyone.
//
//   4a. Write the number of bytes that describe the call, then these in rounds: copy the next
//       chunk of them to a buffer, post, wait until every peer has posted, copy from all, until
//       the longest description is there. Name the first tensor that differs. Go to 7.
//
// The rounds of 4a are numbered from 2^62 on, so that none of steps 2 and 3 passes for one of
// them. They may overwrite the data of steps 2 and 3, which no rank reads once signatures differ.
//
// Why 4 buffers: a rank that produces round k + 1 has seen (step 4 for k - 1) that every peer has
// posted round k - 1, which a peer does after it consumed round k - 3. So the buffer of round
// k - 3 = (k + 1) - 4 is the youngest one that surely nobody reads any more.
//
// Why no barrier at the end: what peers still read stays in the slot until they acknowledge it;
// the next call takes another slot. A peer that has still to acknowledge needs nothing more from
// this rank, so a wait for a free slot always ends. Calls one after another need 2 slots: by the
// time of call n + 2 every peer has posted call n + 1, thus acknowledged call n. Sixteen allow as
// many keys at once; the seventeenth waits in step 1.
//
// Large all-reduces of more than two ranks have two steps in step 5, so that a rank reads
// 2 (N - 1) / N instead of N - 1 times the message:
//
//   5a. Reduce the own N-th of chunk k to result buffer k mod 4, post `reduced`.
//   5b. Wait until every peer has posted `reduced` for k - 1; copy all N parts of round k - 1.
//
// The same four buffers do. Inputs: producing k + 1 comes after 5b for k - 2, so every peer has
// reduced k - 2 and reads older inputs no more. Results: reducing k comes after every peer has
// posted k, so it has finished its iteration k - 2, which copied the results of round k - 3.
//
// Where the ranks are on several NUMA nodes, as many on each, these steps have three waits, so that
// a chunk crosses from node to node once instead of once for every other rank:
//
//   5a. Reduce the own part, of as many as the node has ranks, of what the ranks of this node gave
//       for chunk k, to result buffer k mod 4; post `reduced`.
//   5b. Wait until the ranks of that part on the other nodes have posted `reduced` for k - 1, and
//       reduce their results in the order of nodes, to total buffer (k - 1) mod 4; post `combined`.
//   5c. Wait until this node's ranks have posted `combined` for k - 2; copy their totals.
//
// The same four buffers do, once more. Results: reducing k comes after every peer has posted k, so
// it has finished its iteration k - 2, which combined the results of round k - 3; those of k - 4
// are what is overwritten. Totals: combining k - 1 comes in iteration k, when every peer has
// finished its iteration k - 2, which copied the totals of round k - 4; those of k - 5 are what is
// overwritten.
//
// A reduce-scatter of several nodes has 5a and 5b alone, a gather of parts the same two waits. A
// rank's peers have its place on the other nodes; a round moves a piece of every rank's part, so
// that a result buffer holds the pieces of a rank and its peers.
//
//   5a. Reduce-scatter: reduce what this node's ranks gave for those pieces to result buffer k mod
//       4. Gather: copy the pieces of this node's ranks to the output, those of the peers to result
//       buffer k mod 4. Post `reduced`.
//   5b. Wait until the peers (gather: this node's ranks) have posted `reduced` for k - 1. Reduce
//       the peers' results for the own piece (gather: copy the results) to the output.
//
// Inputs are read in 5a alone, as in steps 4 and 5; results are overwritten as those above are.
//
// The wait: a rank bumps its own `event` after everything that it posts; a peer that has spun in
// vain adds itself to `sleepers` and sleeps in a futex on `event`. Both are sequentially
// consistent, so either the sleeper sees the new event or the poster sees the sleeper. A sleeper
// wakes 20 times a second anyway, to look at `aborted`, the peer's process and the deadline.

#ifndef NANOTF_COLLECTIVES_NATIVE_LAYOUT_H_
#define NANOTF_COLLECTIVES_NATIVE_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm.h"

namespace nanotf {

constexpr uint64_t kMagic = 0x6e616e6f74663034;  // "nanotf04": changes with the layout
constexpr int kSlots = 16;
constexpr int kBuffers = 4;
constexpr uint64_t kDescribing = uint64_t{1} << 62;  // the first round of step 4a
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

enum RankState : uint32_t { kAbsent = 0, kAttached = 1, kClosed = 2 };

// Why the group was aborted. Written once by whoever owns the page it lies in.
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
  alignas(kLine) std::atomic<uint32_t> aborted;  // 1 forever, by anyone, after an AbortRecord
  alignas(1024) AbortRecord record;              // by the parent
};

struct RankHeader {
  std::atomic<uint32_t> event;                 // by the rank, after each post
  std::atomic<uint32_t> sleepers;              // by peers' threads, around a sleep on `event`
  alignas(kLine) std::atomic<uint32_t> state;  // RankState, by the rank
  uint32_t pid;                                // by the rank, before `state`
  alignas(kLine) std::atomic<uint64_t> tags[kSlots];  // by the rank, with the first round
  alignas(1024) AbortRecord record;                   // by the rank
};

struct SlotHeader {
  std::atomic<uint64_t> posted;                  // rounds produced; 0 before the tag is posted
  alignas(kLine) std::atomic<uint64_t> reduced;  // rounds reduced (two-step all-reduce)
  std::atomic<uint64_t> combined;                // rounds combined (of several nodes)
  alignas(kLine) uint64_t signature;             // equal on all ranks, else the call is an error
  uint64_t rows;  // all-gather: what this rank gives; in step 4a: bytes of its description
  uint32_t text_length;
  char text[360];  // what the call is, for people
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
  size_t nodes;        // NUMA nodes, the first `size / nodes` ranks on the first of them

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
