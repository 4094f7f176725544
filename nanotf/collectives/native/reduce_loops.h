// The loops behind reduce.h. Included by each reduce_*.cc, which defines NANOTF_REDUCE_NAME and is
// compiled for its own instruction set. Everything is in an anonymous namespace and uses no
// function of the standard library: if the linker shared a template compiled for AVX-512 with the
// baseline, CPUs without AVX-512 would crash.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "reduce.h"

namespace nanotf {
namespace {

constexpr size_t kBlock = 1024;  // elements; an accumulator block stays in the L1 cache

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

inline uint32_t Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float Float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// The accumulator of a type, with the conversions to and from it.
template <typename T>
struct Accumulate {
  using Type = T;
  static inline T Load(T value) { return value; }
  static inline T Store(T value) { return value; }
};

template <>
struct Accumulate<Brain> {
  using Type = float;
  static inline float Load(Brain value) { return Float(static_cast<uint32_t>(value.bits) << 16); }
  static inline Brain Store(float value) {
    const uint32_t bits = Bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest even
    const uint32_t nan = (bits >> 16) | 0x40;
    return Brain{static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
  }
};

template <>
struct Accumulate<Half> {
  using Type = float;
  static inline float Load(Half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
    const uint32_t magnitude = value.bits & 0x7fff;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = (magnitude << 13) | 0x7f800000;  // infinity and NaN
    const uint32_t subnormal = Bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t finite = magnitude < 0x400 ? subnormal : normal;
    return Float(sign | (magnitude >= 0x7c00 ? special : finite));
  }
  static inline Half Store(float value) {
    const uint32_t bits = Bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 lets the adder round a subnormal result: its unit is then 2^-24.
    const uint32_t subnormal = Bits(Float(magnitude) + 0.5f) - Bits(0.5f);
    const uint32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    // 65520 = 0x477ff000 and above round to infinity.
    const uint32_t large = magnitude > 0x7f800000 ? nan : 0x7c00;
    return Half{static_cast<uint16_t>(sign | (magnitude >= 0x477ff000 ? large : finite))};
  }
};

// A NaN on any rank is a NaN in the minimum and maximum, as in NumPy.
struct Sum {
  template <typename T>
  static inline T Apply(T a, T b) {
    return a + b;
  }
  static inline int32_t Apply(int32_t a, int32_t b) {  // wraps around, which C++ leaves undefined
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
  static inline int64_t Apply(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
struct Min {
  template <typename T>
  static inline T Apply(T a, T b) {
    return (b < a) | (b != b) ? b : a;
  }
};
struct Max {
  template <typename T>
  static inline T Apply(T a, T b) {
    return (b > a) | (b != b) ? b : a;
  }
};

// `ivdep` holds even if `out` is one of the inputs: an element depends only on its own index.
#if defined(__clang__)
#define NANOTF_VECTORISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define NANOTF_VECTORISE _Pragma("GCC ivdep")
#endif

template <typename T, typename Op>
void ReducePair(const T* a, const T* b, T* out, size_t count) {
  using A = Accumulate<T>;
  NANOTF_VECTORISE
  for (size_t i = 0; i < count; ++i) out[i] = A::Store(Op::Apply(A::Load(a[i]), A::Load(b[i])));
}

template <typename T, typename Op>
void ReduceMany(const void* const* inputs, int count, T* out, size_t elements) {
  using A = Accumulate<T>;
  typename A::Type total[kBlock];
  for (size_t start = 0; start < elements; start += kBlock) {
    const size_t n = elements - start < kBlock ? elements - start : kBlock;
    const T* first = static_cast<const T*>(inputs[0]) + start;
    for (size_t i = 0; i < n; ++i) total[i] = A::Load(first[i]);
    for (int rank = 1; rank < count; ++rank) {
      const T* next = static_cast<const T*>(inputs[rank]) + start;
      for (size_t i = 0; i < n; ++i) total[i] = Op::Apply(total[i], A::Load(next[i]));
    }
    T* result = out + start;
    for (size_t i = 0; i < n; ++i) result[i] = A::Store(total[i]);
  }
}

template <typename T, typename Op>
void ReduceTyped(const void* const* inputs, int count, void* out, size_t bytes) {
  T* result = static_cast<T*>(out);
  const size_t elements = bytes / sizeof(T);
  if (count == 2) {
    ReducePair<T, Op>(static_cast<const T*>(inputs[0]), static_cast<const T*>(inputs[1]), result,
                      elements);
  } else {
    ReduceMany<T, Op>(inputs, count, result, elements);
  }
}

template <typename T>
void ReduceWith(NanotfReduction reduction, const void* const* inputs, int count, void* out,
                size_t bytes) {
  switch (reduction) {
    case kNanotfSum:
      return ReduceTyped<T, Sum>(inputs, count, out, bytes);
    case kNanotfMin:
      return ReduceTyped<T, Min>(inputs, count, out, bytes);
    case kNanotfMax:
      return ReduceTyped<T, Max>(inputs, count, out, bytes);
  }
}

}  // namespace

void NANOTF_REDUCE_NAME(NanotfType type, NanotfReduction reduction, const void* const* inputs,
                        int count, void* out, size_t bytes) {
  switch (type) {
    case kNanotfFloat32:
      return ReduceWith<float>(reduction, inputs, count, out, bytes);
    case kNanotfFloat64:
      return ReduceWith<double>(reduction, inputs, count, out, bytes);
    case kNanotfFloat16:
      return ReduceWith<Half>(reduction, inputs, count, out, bytes);
    case kNanotfBfloat16:
      return ReduceWith<Brain>(reduction, inputs, count, out, bytes);
    case kNanotfInt32:
      return ReduceWith<int32_t>(reduction, inputs, count, out, bytes);
    case kNanotfInt64:
      return ReduceWith<int64_t>(reduction, inputs, count, out, bytes);
  }
}

}  // namespace nanotf
