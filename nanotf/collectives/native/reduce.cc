#include "reduce.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace nanotf {

const ReduceVariant& BestReduce() {
  static const ReduceVariant best = [] {
#if defined(NANOTF_X86_VARIANTS)
    // __builtin_cpu_supports also asks whether the operating system saves the wide registers.
    __builtin_cpu_init();
    const char* wanted = getenv("NANOTF_VECTORS");
    auto allowed = [&](const char* name) { return wanted == nullptr || !strcmp(wanted, name); };
    if (allowed("avx512") && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return ReduceVariant{"avx512", ReduceAvx512};
    }
    if (allowed("avx2") && __builtin_cpu_supports("avx2")) return ReduceVariant{"avx2", ReduceAvx2};
#endif
    return ReduceVariant{"baseline", ReduceBaseline};
  }();
  return best;
}

#if defined(__x86_64__)
IeeeArithmetic::IeeeArithmetic() : saved_(_mm_getcsr()) {
  _mm_setcsr(0x1f80);  // all exceptions masked, round to nearest, no flushing
}
IeeeArithmetic::~IeeeArithmetic() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
IeeeArithmetic::IeeeArithmetic() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" ::"r"(0ull));
}
IeeeArithmetic::~IeeeArithmetic() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
IeeeArithmetic::IeeeArithmetic() : saved_(0) {}
IeeeArithmetic::~IeeeArithmetic() {}
#endif

}  // namespace nanotf
