// Compiles a function twice, for every processor and for those with AVX2, and chooses at the call. Done by hand,
// because the compilers' own way (target_clones) needs a linker feature that clang on musl, among others, lacks.
// Matrix products are compiled for AVX-512, too.
#pragma once
#include <cstdint>

#define HOPLOOM_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define HOPLOOM_AVX2 __attribute__((target("avx2,bmi,bmi2,fma,popcnt")))
#define HOPLOOM_AVX512 __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,bmi,bmi2,fma,popcnt")))
#endif

namespace hoploom {

// Prefetches bytes into the second-level cache, to be read or written.
template <int kWrite = 0>
HOPLOOM_INLINE void request(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const uint8_t*>(from) + at, kWrite, 2);
}

#if defined(HOPLOOM_AVX2)

inline bool has_avx2() {
  static const bool has = (__builtin_cpu_init(), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                                                     __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") &&
                                                     __builtin_cpu_supports("popcnt"));
  return has;
}

template <auto kernel, typename... Args>
HOPLOOM_AVX2 void run_with_avx2(Args&... args) {
  kernel(args...);
}

inline bool has_avx512() {
  static const bool has = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return has;
}

template <auto kernel, typename... Args>
HOPLOOM_AVX512 void run_with_avx512(Args&... args) {
  kernel(args...);
}

#endif

// Calls kernel(args...), which must be HOPLOOM_INLINE: only inlined code is compiled for the processor.
template <auto kernel, typename... Args>
void run_fastest(Args... args) {
#if defined(HOPLOOM_AVX2)
  if (has_avx2()) return run_with_avx2<kernel>(args...);
#endif
  kernel(args...);
}

// Calls wide(args...) on processors with AVX-512, else narrow(args...); both must be HOPLOOM_INLINE.
template <auto narrow, auto wide, typename... Args>
void run_widest(Args... args) {
#if defined(HOPLOOM_AVX2)
  if (has_avx512()) return run_with_avx512<wide>(args...);
#endif
  run_fastest<narrow>(args...);
}

}  // namespace hoploom
