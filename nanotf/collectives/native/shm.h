// The C interface of _shm.so, for ../native_engine.py (ctypes) and ops.cc.
//
// Functions that can fail return 0 on success; otherwise they write the reason to `failure`.

#ifndef NANOTF_COLLECTIVES_NATIVE_SHM_H_
#define NANOTF_COLLECTIVES_NATIVE_SHM_H_

#include <stddef.h>
#include <stdint.h>

#define NANOTF_EXPORT __attribute__((visibility("default")))

extern "C" {

enum { kNanotfMaxSize = 1024 };  // ranks

// The kinds of failures; the values are part of the interface with wire/failures.py.
enum NanotfFailureKind {
  kNanotfMisused = 1,    // an invalid call, or the group is unusable
  kNanotfAborted = 2,    // a rank or the parent gave up
  kNanotfExpired = 3,    // a rank waited until the deadline
  kNanotfLost = 4,       // a rank's process exited or left the group while another waited for it
  kNanotfDifferent = 5,  // ranks called different collectives; the group stays usable
};

// A failure, also stored in shared memory. Callers decide by the numbers; the texts are only for
// people.
struct NanotfFailure {
  uint32_t kind;                          // NanotfFailureKind
  int32_t rank;                           // that noticed; -1: the parent or unknown
  uint32_t missing[kNanotfMaxSize / 32];  // a bit for each rank that did not arrive
  char text[1652];                        // what happened, terminated, without a final period
  char remedy[256];                       // the remedy, terminated; may be empty
};

// Reducible types; the values are part of the interface with native_engine.py.
enum NanotfType {
  kNanotfFloat32 = 0,
  kNanotfFloat64 = 1,
  kNanotfFloat16 = 2,
  kNanotfBfloat16 = 3,
  kNanotfInt32 = 4,
  kNanotfInt64 = 5,
};

enum NanotfReduction { kNanotfSum = 0, kNanotfMin = 1, kNanotfMax = 2 };

struct NanotfConfig {
  uint64_t nonce;
  uint64_t size;             // ranks
  uint64_t chunk_bytes;      // a multiple of 64
  uint64_t nodes;            // NUMA nodes, with equally many ranks on each, in order
  uint64_t symmetric_bytes;  // all-reduces of more than 2 ranks above this take two steps
  double spin_seconds;       // spin time before sleeping
  double deadline_seconds;   // limit of one wait
};

// A tensor of a collective. In an all-reduce, `in` and `out` may be the same.
struct NanotfFragment {
  const void* in;
  void* out;
  uint64_t bytes;
};

// The kinds of collectives; the values are part of the interface with joined_rank.py.
enum NanotfKind {
  kNanotfNothing = 0,
  kNanotfAllReduce = 1,
  kNanotfAllGather = 2,
  kNanotfBarrier = 3,
  kNanotfBroadcast = 4,
  kNanotfSpread = 5,     // the last step of a collective over hosts: a broadcast on one host
  kNanotfOther = 6,      // no rank that has joined takes part in it
  kNanotfAllJoined = 7,  // no call: all ranks have joined
};

// A call that a rank which has joined may take part in.
struct NanotfOffer {
  uint32_t key;
  uint32_t kind;       // NanotfKind
  uint32_t type;       // NanotfType, of reductions
  uint32_t reduction;  // NanotfReduction
  uint64_t bytes;      // all; of a gather those of a row
};

// The description of a call. Except for the key, it must be equal on all ranks.
struct NanotfCall {
  uint32_t key;
  const char* name;       // "all_reduce(sum)"
  const char* type;       // of all tensors: "float32"
  const int64_t* shapes;  // per tensor the number of dimensions, then the sizes, -1 for any
  int64_t count;          // tensors
  uint32_t follows;       // 1: this rank has joined, and makes the call as its guide does
  uint32_t kind;          // NanotfKind that ranks which have joined see; kNanotfNothing: its own
};

// The offsets and sizes in a group's memory that Python needs, in bytes; see layout.h.
struct NanotfLayout {
  uint64_t magic;
  uint64_t slots;  // their number
  uint64_t page;
  // In the common page.
  uint64_t aborted;
  uint64_t common_record;
  // In an abort record.
  uint64_t record_failure;
  // In a rank's region.
  uint64_t tags;
  uint64_t rank_record;
  uint64_t slot_headers;
  uint64_t slot_header_bytes;
  // In a slot's header.
  uint64_t text_length;
  uint64_t text;
  uint64_t text_bytes;
  // In a rank's region, after the slots' headers.
  uint64_t acknowledgements;
  uint64_t region_bytes;
  uint64_t total_bytes;
};

// Makes the output of a gather, of `rows` rows, and stores its address; returns 0 on success.
typedef int (*NanotfAllocate)(void* context, uint64_t rows, void** out);

// Maps the group's file; returns a handle > 0, or 0 with `failure` set. The caller keeps `fd`.
NANOTF_EXPORT int64_t nanotf_attach(const NanotfConfig* config, int fd, int rank,
                                    NanotfFailure* failure);
// Returns the rank of a handle, -1 if it is closed.
NANOTF_EXPORT int nanotf_rank(int64_t handle);
NANOTF_EXPORT int nanotf_all_reduce(int64_t handle, const NanotfCall* call, NanotfType type,
                                    NanotfReduction reduction, const NanotfFragment* fragments,
                                    int64_t count, NanotfFailure* failure);
// Sums tensors, treated as one vector of E elements, and gives each rank a part of the sum. With P
// = E / ranks, rounded up, rank r gets up to P elements from r * P. `out_bytes` is the size of its
// part. Only `in` of the fragments is used.
NANOTF_EXPORT int nanotf_reduce_scatter(int64_t handle, const NanotfCall* call, NanotfType type,
                                        const NanotfFragment* fragments, int64_t count, void* out,
                                        uint64_t out_bytes, NanotfFailure* failure);
// Reverses nanotf_reduce_scatter: every rank gives its part and gets all. What counts as an element
// may be a row, of `element_bytes`. Only `out` of the fragments is used.
NANOTF_EXPORT int nanotf_gather_parts(int64_t handle, const NanotfCall* call, const void* part,
                                      uint64_t part_bytes, uint64_t element_bytes,
                                      const NanotfFragment* fragments, int64_t count,
                                      NanotfFailure* failure);
// The same in memory that all ranks map: copies only this rank's part. Sets `out` of the fragments
// to the tensors there, and `holds`, of `count` places, to what nanotf_release gets once nothing
// needs the tensor. The memory has two sets of tensors, and lies in `place`: a number that names
// it. It has to be free of the values before the last: if any rank still holds both sets, or cannot
// map the memory, `*shared` is 0 on all ranks, and nothing else is done.
NANOTF_EXPORT int nanotf_gather_shared(int64_t handle, const NanotfCall* call, int64_t place,
                                       const void* part, uint64_t part_bytes,
                                       uint64_t element_bytes, NanotfFragment* fragments,
                                       int64_t count, void** holds, int* shared,
                                       NanotfFailure* failure);
NANOTF_EXPORT void nanotf_release(void* hold);
// Frees the memory of `place` once no tensor lies in it.
NANOTF_EXPORT int nanotf_drop_values(int64_t handle, int64_t place);
// Concatenates the ranks' rows in the order of ranks; `rows` may differ between ranks.
NANOTF_EXPORT int nanotf_all_gather(int64_t handle, const NanotfCall* call, const void* in,
                                    uint64_t rows, uint64_t row_bytes, NanotfAllocate allocate,
                                    void* context, NanotfFailure* failure);
// Rows that a rank replaces in a table. With P = rows of the table / ranks, rounded up, rank r may
// replace up to P rows from r * P.
typedef struct {
  int64_t count;
  uint64_t row_bytes;
  const int64_t* indices;  // `count` rows of the table
  const void* values;      // their new values; of a row that occurs twice, equal ones
} NanotfRows;

// Replaces the rows of all ranks in a table, `in` of the fragment, with equal values on all ranks;
// writes the result to `out`.
NANOTF_EXPORT int nanotf_update_rows(int64_t handle, const NanotfCall* call, const NanotfRows* rows,
                                     const NanotfFragment* table, NanotfFailure* failure);
// The same in memory that all ranks map, see nanotf_gather_shared: sets `out` to the table there. A
// rank copies its own rows, and of these those alone that have changed since the memory was
// written.
// `*hold` is null on all ranks if nothing is done.
NANOTF_EXPORT int nanotf_update_shared(int64_t handle, const NanotfCall* call, int64_t place,
                                       const NanotfRows* rows, NanotfFragment* table, void** hold,
                                       NanotfFailure* failure);
// Reads `in` only on the root and writes `out` on all others (and on the root if not null).
NANOTF_EXPORT int nanotf_broadcast(int64_t handle, const NanotfCall* call, int root, const void* in,
                                   void* out, uint64_t bytes, NanotfFailure* failure);
NANOTF_EXPORT int nanotf_barrier(int64_t handle, const NanotfCall* call, NanotfFailure* failure);
// Tells the other ranks that this one makes no more calls, but follows theirs until all have
// joined.
NANOTF_EXPORT int nanotf_join(int64_t handle);
// Waits until the guide of this rank, which has joined, makes a call, at most `milliseconds`. The
// offer's kind says what has come: kNanotfNothing if nothing has.
NANOTF_EXPORT int nanotf_next(int64_t handle, int milliseconds, NanotfOffer* offer,
                              NanotfFailure* failure);
// Makes every rank's present and future collectives fail with `text`.
NANOTF_EXPORT int nanotf_abort(int64_t handle, const char* text);
// Returns the number of this rank's failed collectives and writes the last failure.
NANOTF_EXPORT int64_t nanotf_failures(int64_t handle, NanotfFailure* last);
// Makes running calls fail. The memory is unmapped when the last one has returned.
NANOTF_EXPORT int nanotf_close(int64_t handle);
// Writes 4 numbers since this rank attached: completed collectives; nanoseconds in them; part of
// these spent waiting for peers; nanoseconds that steps waited for their data, if stamped.
NANOTF_EXPORT int nanotf_times(int64_t handle, int64_t* numbers);
// Writes the same numbers and marks the start of an execution of steps.
NANOTF_EXPORT int nanotf_begin_steps(int64_t handle, int64_t* numbers);
// Marks the moment when a step's data have arrived.
NANOTF_EXPORT int nanotf_stamp(int64_t handle, NanotfFailure* failure);
// Describes the memory of a group.
NANOTF_EXPORT void nanotf_layout_of(uint64_t size, uint64_t chunk_bytes, uint64_t nodes,
                                    NanotfLayout* layout);
// Returns the name of the vector instructions in use: "avx512", "avx2" or "baseline".
NANOTF_EXPORT const char* nanotf_vectors(void);

}  // extern "C"

#endif  // NANOTF_COLLECTIVES_NATIVE_SHM_H_
