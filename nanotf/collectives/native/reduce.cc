#include "reduce.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if defined(NANOTF_X86_VARIANTS)
#include <cpuid.h>
#endif

namespace nanotf {

#if defined(NANOTF_X86_VARIANTS)
namespace {

struct Vectors {
  bool avx2 = false;
  bool avx512 = false;
};

// Returns what the CPU computes and the operating system saves. __builtin_cpu_supports would do the
// same with gcc, but zig 0.17 links a stub of it that supports nothing, and the wheels are built
// with zig. See "Detection of AVX-512 Foundation Instructions" in Intel's manual, volume 1.
Vectors SupportedVectors() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) return {};
  unsigned saved, high;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return {};
  constexpr unsigned kYmm = 0x06, kZmm = 0xe6;  // registers, in XCR0
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  return Vectors{(saved & kYmm) == kYmm && (ebx & bit_AVX2),
                 (saved & kZmm) == kZmm && (ebx & kAvx512) == kAvx512};
}

}  // namespace
#endif

const ReduceVariant& BestReduce() {
  static const ReduceVariant best = [] {
#if defined(NANOTF_X86_VARIANTS)
    const Vectors supported = SupportedVectors();
    const char* wanted = getenv("NANOTF_VECTORS");
    auto allowed = [&](const char* name) { return wanted == nullptr || !strcmp(wanted, name); };
    if (allowed("avx512") && supported.avx512) return ReduceVariant{"avx512", ReduceAvx512};
    if (allowed("avx2") && supported.avx2) return ReduceVariant{"avx2", ReduceAvx2};
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
