// What a lesson asserts with: throws what does not hold. Nobody catches it, so the lesson ends
// there, as failed.
#pragma once

#include <stdexcept>
#include <string>

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition))                                                                   \
      throw std::runtime_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + \
                               ": this should hold: " #condition);                      \
  } while (false)
