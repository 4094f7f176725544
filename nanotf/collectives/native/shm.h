// The C interface of _shm.so: what ../native_engine.py (ctypes) and ops.cc call.
//
// Functions that can fail return 0 on success; otherwise they write the reason to `failure`.

#ifndef NANOTF_COLLECTIVES_NATIVE_SHM_H_
#define NANOTF_COLLECTIVES_NATIVE_SHM_H_

#include <stddef.h>
#include <stdint.h>

#define NANOTF_EXPORT __attribute__((visibility("default")))

extern "C" {

enum { kNanotfMaxSize = 1024 };  // ranks

// Why a collective failed; values are part of the interface with wire/failures.py.
enum NanotfFailureKind {
  kNanotfMisused = 1,    // it was called wrongly, or the group cannot be used
  kNanotfAborted = 2,    // a rank or the parent gave up
  kNanotfExpired = 3,    // a rank waited until the deadline
  kNanotfLost = 4,       // a rank's process ended or left the group while another waited for it
  kNanotfDifferent = 5,  // ranks called different collectives; the group can be used further
};

// What is known of a failure. Lies in shared memory, too. Callers decide by the numbers; the texts
// are for people alone.
struct NanotfFailure {
  uint32_t kind;                          // NanotfFailureKind
  int32_t rank;                           // that noticed; -1: the parent, or nobody in particular
  uint32_t missing[kNanotfMaxSize / 32];  // a bit for each rank that was waited for in vain
  char text[1652];                        // what happened, terminated, without the last stop
  char remedy[256];                       // what to do about it, terminated; may be empty
};

// Types that can be reduced; values are part of the interface with native_engine.py.
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
  uint64_t nodes;            // NUMA nodes that the ranks are on, as many on each, in order
  uint64_t symmetric_bytes;  // all-reduces of more than 2 ranks above this take two steps
  double spin_seconds;       // how long to spin before sleeping
  double deadline_seconds;   // how long one wait may take
};

// A tensor of a collective; in an all-reduce `in` and `out` may be the same.
struct NanotfFragment {
  const void* in;
  void* out;
  uint64_t bytes;
};

// What a call is: on ranks that differ in any of it but the key it is an error.
struct NanotfCall {
  uint32_t key;
  const char* name;       // "all_reduce(sum)"
  const char* type;       // of all tensors: "float32"
  const int64_t* shapes;  // of each tensor the number of dimensions, then these, -1 for any
  int64_t count;          // tensors
};

// Makes the output of a gather of `rows` rows and stores its address; returns 0 on success.
typedef int (*NanotfAllocate)(void* context, uint64_t rows, void** out);

// Maps the group's file; returns a handle > 0, or 0 with `failure` set. `fd` stays the caller's.
NANOTF_EXPORT int64_t nanotf_attach(const NanotfConfig* config, int fd, int rank,
                                    NanotfFailure* failure);
// The rank that a handle was attached as; -1 if it is closed.
NANOTF_EXPORT int nanotf_rank(int64_t handle);
NANOTF_EXPORT int nanotf_all_reduce(int64_t handle, const NanotfCall* call, NanotfType type,
                                    NanotfReduction reduction, const NanotfFragment* fragments,
                                    int64_t count, NanotfFailure* failure);
// Sums tensors that are seen as one vector of E elements, and gives each rank a part of it: rank r
// gets the elements from r * P on, where P is E / ranks rounded up, and P of them or as many as
// there are. `out_bytes` is their size. Only `in` of the fragments is used.
NANOTF_EXPORT int nanotf_reduce_scatter(int64_t handle, const NanotfCall* call, NanotfType type,
                                        const NanotfFragment* fragments, int64_t count, void* out,
                                        uint64_t out_bytes, NanotfFailure* failure);
// The way back: every rank gives its part, and gets all. Only `out` of the fragments is used.
NANOTF_EXPORT int nanotf_gather_parts(int64_t handle, const NanotfCall* call, const void* part,
                                      uint64_t part_bytes, uint64_t element_bytes,
                                      const NanotfFragment* fragments, int64_t count,
                                      NanotfFailure* failure);
// Concatenates what the ranks give, in the order of ranks; `rows` may differ between them.
NANOTF_EXPORT int nanotf_all_gather(int64_t handle, const NanotfCall* call, const void* in,
                                    uint64_t rows, uint64_t row_bytes, NanotfAllocate allocate,
                                    void* context, NanotfFailure* failure);
// `in` is read on the root alone, `out` is written on all others (and on the root if not null).
NANOTF_EXPORT int nanotf_broadcast(int64_t handle, const NanotfCall* call, int root, const void* in,
                                   void* out, uint64_t bytes, NanotfFailure* failure);
NANOTF_EXPORT int nanotf_barrier(int64_t handle, const NanotfCall* call, NanotfFailure* failure);
// Every rank that is in a collective, or enters one, fails with `text`.
NANOTF_EXPORT int nanotf_abort(int64_t handle, const char* text);
// Returns how many collectives of this rank have failed, and writes why the last of them did.
NANOTF_EXPORT int64_t nanotf_failures(int64_t handle, NanotfFailure* last);
// Calls that are still running fail; the memory is unmapped when the last has returned.
NANOTF_EXPORT int nanotf_close(int64_t handle);
// Writes where this rank's time went since it attached, 4 numbers: collectives that have ended;
// the nanoseconds in them; those of these that it waited for peers; those that steps waited for
// their data, as far as they were stamped.
NANOTF_EXPORT int nanotf_times(int64_t handle, int64_t* numbers);
// Same, and says that an execution of steps begins.
NANOTF_EXPORT int nanotf_begin_steps(int64_t handle, int64_t* numbers);
// Says that the data of a step are there.
NANOTF_EXPORT int nanotf_stamp(int64_t handle, NanotfFailure* failure);
// Writes the numbers that layout.py must agree with; returns how many.
NANOTF_EXPORT int nanotf_layout(uint64_t size, uint64_t chunk_bytes, uint64_t nodes,
                                uint64_t* numbers);
// The name of the vector instructions in use: "avx512", "avx2" or "baseline".
NANOTF_EXPORT const char* nanotf_vectors(void);

}  // extern "C"

#endif  // NANOTF_COLLECTIVES_NATIVE_SHM_H_
