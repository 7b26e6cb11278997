// What a lesson asserts with: says what does not hold and ends the lesson as failed.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: this should hold: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (false)
