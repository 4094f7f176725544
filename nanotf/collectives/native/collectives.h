// The collectives: the copies and reductions of each round. See layout.h for the protocol.

#ifndef NANOTF_COLLECTIVES_NATIVE_COLLECTIVES_H_
#define NANOTF_COLLECTIVES_NATIVE_COLLECTIVES_H_

#include "group.h"

namespace nanotf {

// All of these throw Failure.
void AllReduce(Group& group, const NanotfCall& what, NanotfType type, NanotfReduction reduction,
               const NanotfFragment* fragments, int64_t count);
// Writes this rank's part of the sum to `out`: see nanotf_reduce_scatter.
void ReduceScatter(Group& group, const NanotfCall& what, NanotfType type,
                   const NanotfFragment* fragments, int64_t count, void* out, uint64_t out_bytes);
void GatherParts(Group& group, const NanotfCall& what, const void* part, uint64_t part_bytes,
                 uint64_t element_bytes, const NanotfFragment* fragments, int64_t count);
// The same in memory that all ranks share: see nanotf_gather_shared. Returns false, on all ranks,
// if there is no such memory or a rank still holds both sets of values.
bool GatherShared(Group& group, const NanotfCall& what, int64_t place, const void* part,
                  uint64_t part_bytes, uint64_t element_bytes, NanotfFragment* fragments,
                  int64_t count, void** holds);
void AllGather(Group& group, const NanotfCall& what, const void* in, uint64_t rows,
               uint64_t row_bytes, NanotfAllocate allocate, void* context);
// Replaces rows of a table in memory that all ranks share: see nanotf_update_shared. Returns
// nullptr, on all ranks, if there is no such memory or a rank still holds both sets of values.
Hold* UpdateShared(Group& group, const NanotfCall& what, int64_t place, const NanotfRows& rows,
                   NanotfFragment* table);
void UpdateRows(Group& group, const NanotfCall& what, const NanotfRows& rows,
                const NanotfFragment& table);
void Broadcast(Group& group, const NanotfCall& what, int root, const void* in, void* out,
               uint64_t bytes);
void Barrier(Group& group, const NanotfCall& what);

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_COLLECTIVES_H_
