// The five exceptions of the library and the check that throws the commonest of them.
// Every layer throws through here; nothing below `ts::run` catches, prints or ends the process.
#pragma once

#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tessera {

// What every exception of the library derives from: one line that names function, values and
// remedy.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message,
                 std::source_location where = std::source_location::current())
      : std::runtime_error(message), where_(where) {}

  const std::source_location& where() const noexcept { return where_; }

  // The rank on which it was thrown, -1 where that is not known. `World` sets it on the way out.
  int rank() const noexcept { return rank_; }
  void set_rank(int rank) noexcept { rank_ = rank; }

 private:
  std::source_location where_;
  int rank_ = -1;
};

class ContractError : public Error {
  using Error::Error;
};  // the caller broke a stated requirement
class DeviceError : public Error {
  using Error::Error;
};  // a device or its driver refused
class OutOfMemory : public Error {
  using Error::Error;
};  // carries the ledger in its message
class CommError : public Error {
  using Error::Error;
};  // a peer is missing, late or disagrees
class DataError : public Error {
  using Error::Error;
};  // a file or other outside input is bad

// Joins its arguments with `operator<<`: concat("expected ", 3, " rows").
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

namespace detail {
[[noreturn]] void fail_contract(const std::string& message, std::source_location where);
[[noreturn]] void fail_assert(const char* condition, std::source_location where);
}  // namespace detail

}  // namespace tessera

// Throws ContractError with the joined parts unless `condition` holds. Always on.
#define TESSERA_EXPECT(condition, ...)                                   \
  do {                                                                   \
    if (!(condition)) [[unlikely]]                                       \
      ::tessera::detail::fail_contract(::tessera::concat(__VA_ARGS__),   \
                                       std::source_location::current()); \
  } while (false)
