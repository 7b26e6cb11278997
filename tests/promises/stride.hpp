// How many of its places or steps a test tries: all, or a few under a sanitizer, which is about ten
// times slower and looks for other faults than the test does.
#pragma once

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TESSERA_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TESSERA_TEST_SANITIZED 1
#endif
#endif

namespace tessera::testing {

// One place in so many is tried.
#ifdef TESSERA_TEST_SANITIZED
inline constexpr std::uint64_t kStride = 37;
#else
inline constexpr std::uint64_t kStride = 1;
#endif

// The steps of a long run.
constexpr int long_run(int steps) { return kStride > 1 ? steps / 10 : steps; }

}  // namespace tessera::testing
