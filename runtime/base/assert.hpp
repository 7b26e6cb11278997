// TESSERA_ASSERT: a check of our own mistakes, for .cpp and .cu files only (never in a public
// header). On unless NDEBUG is defined. What a caller can trigger is TESSERA_EXPECT instead.
#pragma once

#include "tessera/base/error.hpp"

#ifdef NDEBUG
#define TESSERA_ASSERT(condition) ((void)0)
#else
#define TESSERA_ASSERT(condition) \
  ((condition) ? (void)0          \
               : ::tessera::detail::fail_assert(#condition, std::source_location::current()))
#endif
