// The collectives: what is copied and reduced in each round. See layout.h for the protocol.

#ifndef NANOTF_COLLECTIVES_NATIVE_COLLECTIVES_H_
#define NANOTF_COLLECTIVES_NATIVE_COLLECTIVES_H_

#include "group.h"

namespace nanotf {

// All throw Failure.
void AllReduce(Group& group, const NanotfCall& what, NanotfType type, NanotfReduction reduction,
               const NanotfFragment* fragments, int64_t count);
void AllGather(Group& group, const NanotfCall& what, const void* in, uint64_t rows,
               uint64_t row_bytes, NanotfAllocate allocate, void* context);
void Broadcast(Group& group, const NanotfCall& what, int root, const void* in, void* out,
               uint64_t bytes);
void Barrier(Group& group, const NanotfCall& what);

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_COLLECTIVES_H_
