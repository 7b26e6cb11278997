// What a compiler must be and do for these headers and for the library. A program is checked here,
// as it is compiled. Without type information it would link, and end in an invalid access.
// tessera.hpp and base/error.hpp include this first, before anything that an older compiler lacks.
#pragma once

#if defined(__clang__) && __clang_major__ < 16
#error "Tessera needs clang 16 or newer"
#elif !defined(__clang__) && defined(__GNUC__) && __GNUC__ < 12
#error "Tessera needs g++ 12 or newer"
#elif __cplusplus < 202002L
#error "Tessera is C++20: compile with -std=c++20 or newer"
#endif
#ifndef __GXX_RTTI
#error "Tessera needs run-time type information: compile without -fno-rtti"
#endif
#ifndef __cpp_exceptions
#error "Tessera throws exceptions: compile without -fno-exceptions"
#endif
