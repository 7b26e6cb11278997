// What tests ask of a message.
#pragma once

#include <string_view>

namespace tessera::testing {

inline bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace tessera::testing
