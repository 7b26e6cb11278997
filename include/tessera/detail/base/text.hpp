// Text for people: numbers that can be read, and what an exception says.
#pragma once

#include <cstddef>
#include <exception>
#include <string>

namespace tessera {

// A decimal number with a comma between each three digits before the point: "1234567.8" as
// "1,234,567.8". What holds no digit ("nan") stays as it is.
inline std::string with_commas(std::string number) {
  const std::size_t first = number.find_first_of("0123456789"), dot = number.find('.');
  if (first == std::string::npos) return number;
  for (std::size_t at = dot == std::string::npos ? number.size() : dot; at > first + 3;)
    number.insert(at -= 3, 1, ',');
  return number;
}

// What `error` says, for a message that quotes it: also of what is no std::exception. An Error that
// knows no rank gets `rank`, which the message does not show.  Requires: error is not null.
std::string describe_exception(const std::exception_ptr& error = std::current_exception(),
                               int rank = -1);

}  // namespace tessera
