// One function compiled for several generations of a processor, chosen when it is loaded. Elsewhere: once.
#pragma once

#define HOPLOOM_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && !defined(HOPLOOM_NO_CLONES)
#define HOPLOOM_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define HOPLOOM_CLONES
#endif
