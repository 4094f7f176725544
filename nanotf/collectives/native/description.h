// What a call is, for peers and people. ../description.py is the same in Python.

#ifndef NANOTF_COLLECTIVES_NATIVE_DESCRIPTION_H_
#define NANOTF_COLLECTIVES_NATIVE_DESCRIPTION_H_

#include <cstdint>
#include <string>

#include "shm.h"

namespace nanotf {

// Peers compare these at every meeting; calls of different descriptions have different ones.
uint64_t Signature(const NanotfCall& call);

// In one line, for people: "all_reduce(sum) of float32[2, 3], float32[7]". Only the first tensors.
std::string Summary(const NanotfCall& call);

// A line for the name and one for each tensor: what ranks of different signatures exchange.
std::string Details(const NanotfCall& call);

// Says for people in what the details of rank 0 and of another rank differ.
std::string Difference(const std::string& first, int rank, const std::string& other);

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_DESCRIPTION_H_
