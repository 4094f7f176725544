// Element-wise reductions of several arrays into one.
//
// The loops are in reduce_loops.h, plain C++ that the compiler vectorizes. They are compiled once
// per instruction set (build.py gives the flags) and chosen when the library is loaded, because
// one binary must run on every CPU of its architecture.

#ifndef NANOTF_COLLECTIVES_NATIVE_REDUCE_H_
#define NANOTF_COLLECTIVES_NATIVE_REDUCE_H_

#include <cstddef>

#include "shm.h"

namespace nanotf {

// out[i] = inputs[0][i] op inputs[1][i] op ... in this order, for `bytes` of elements. `out` may be
// one of the inputs. 16-bit floats are accumulated in float32 and rounded once.
using ReduceFunction = void (*)(NanotfType type, NanotfReduction reduction,
                                const void* const* inputs, int count, void* out, size_t bytes);

void ReduceBaseline(NanotfType, NanotfReduction, const void* const*, int, void*, size_t);
#if defined(NANOTF_X86_VARIANTS)
void ReduceAvx2(NanotfType, NanotfReduction, const void* const*, int, void*, size_t);
void ReduceAvx512(NanotfType, NanotfReduction, const void* const*, int, void*, size_t);
#endif

struct ReduceVariant {
  const char* name;
  ReduceFunction function;
};

// The best variant that this CPU can run; the environment variable NANOTF_VECTORS ("avx512",
// "avx2", "baseline"; read once) limits the choice, for tests.
const ReduceVariant& BestReduce();

// Sets the floating-point environment to IEEE defaults during its lifetime. TensorFlow flushes
// denormals to zero only in its own threads. Replicas must not differ by the thread in which a
// collective happens to run.
class IeeeArithmetic {
 public:
  IeeeArithmetic();
  ~IeeeArithmetic();
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

 private:
  unsigned long long saved_;
};

}  // namespace nanotf

#endif  // NANOTF_COLLECTIVES_NATIVE_REDUCE_H_
