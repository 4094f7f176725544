// Descriptions of calls, for peers and people. ../description.py has those of calls across hosts.

#ifndef NANOTF_COLLECTIVES_NATIVE_DESCRIPTION_H_
#define NANOTF_COLLECTIVES_NATIVE_DESCRIPTION_H_

#include <cstdint>
#include <string>

#include "shm.h"

namespace nanotf {

// Peers compare these whenever they meet; different descriptions have different signatures.
uint64_t Signature(const NanotfCall& call);

// One line for people: "all_reduce(sum) of float32[2, 3], float32[7]". Only the first tensors.
std::string Summary(const NanotfCall& call);

// A line for the name and one for each tensor. Ranks exchange it if their signatures differ.
std::string Details(const NanotfCall& call);

// Describes for people how the details of rank 0 and of another rank differ.
std::string Difference(const std::string& first, int rank, const std::string& other);

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_DESCRIPTION_H_
