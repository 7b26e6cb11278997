// The five exceptions of the library, and the check that throws the commonest of them. Every layer
// throws through here. Below `ts::run` nothing prints or ends the process. An exception that has to
// be caught, for example on a worker's thread, is thrown again by the next call that may throw.
#pragma once

#include "tessera/base/compiler.hpp"  // first

#include <initializer_list>
#include <ostream>
#include <source_location>
#include <stdexcept>
#include <string>

namespace tessera {

// The base of every exception of the library. The message names function, values and remedy. In it
// paths and values of more than 200 bytes are shortened.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message,
                 std::source_location where = std::source_location::current());

  const std::source_location& where() const noexcept { return where_; }

  // The rank on which it was thrown; -1: not known. `World` sets it on the way out.
  int rank() const noexcept { return rank_; }
  void set_rank(int rank) noexcept { rank_ = rank; }

 private:
  std::source_location where_;
  int rank_ = -1;
};

// The caller broke a stated requirement.
class ContractError : public Error {
 public:
  using Error::Error;

  // Whether `where` is the line that called an operation, and not a line of the library.
  bool is_at_caller() const noexcept { return is_at_caller_; }
  void set_at_caller() noexcept { is_at_caller_ = true; }

 private:
  bool is_at_caller_ = false;
};
// A device, its driver or the system refused.
class DeviceError : public Error {
  using Error::Error;
};
// No memory of a device is left; the message carries the ledger.
class OutOfMemory : public Error {
  using Error::Error;
};
// A peer is missing, late or disagrees. comm/lost_rank.hpp has a kind of it.
class CommError : public Error {
  using Error::Error;
};
// A file or other input from outside is bad.
class DataError : public Error {
  using Error::Error;
};

namespace detail {
// `error` with the rank that met it: throw with_rank(DataError(message), 0).
template <class E>
E with_rank(E error, int rank) {
  error.set_rank(rank);
  return error;
}
[[noreturn]] void fail_contract(const std::string& message, std::source_location where);
[[noreturn]] void fail_assert(const char* condition, std::source_location where);
}  // namespace detail

// The line that calls an operation. An operation takes it as its last parameter, defaulted to
// Caller::current(). No Caller can be written as {}, so options before it can.
struct Caller {
  std::source_location where;

  constexpr Caller(const std::source_location& line) : where(line) {}
  static constexpr Caller current(
      const std::source_location line = std::source_location::current()) {
    return line;
  }
};

// The operation that runs in this scope on this thread. A ContractError of TESSERA_EXPECT in it
// begins with the operation's name, and its `where` is the line that called it. The outermost scope
// counts, since an operation may be made of others. It costs two accesses of a thread's variable.
class CallSite {
 public:
  // `operation` outlives the scope. Without a caller, errors keep the line of the scope around, or
  // their own line.
  explicit CallSite(const char* operation, const Caller& at = std::source_location()) noexcept;
  // For code that is made of operations, such as a layer. Errors name the operation, and this line.
  explicit CallSite(const Caller& at) noexcept : CallSite(nullptr, at) {}
  ~CallSite();
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

 private:
  friend void detail::fail_contract(const std::string& message, std::source_location where);

  const char* operation_;
  std::source_location at_;
  const CallSite* outer_;
};

namespace detail {
// A part of a text, and how it is written. It is compiled once for each type, not for each text.
struct TextPart {
  const void* value;
  void (*write)(std::ostream& out, const void* value);

  TextPart(const char* text)
      : value(text),
        write([](std::ostream& out, const void* v) { out << static_cast<const char*>(v); }) {}
  template <class T>
  TextPart(const T& part)
      : value(static_cast<const void*>(&part)),
        write([](std::ostream& out, const void* v) { out << *static_cast<const T*>(v); }) {}
};
std::string join(std::initializer_list<TextPart> parts);
}  // namespace detail

// Joins its arguments with `operator<<`: concat("expected ", 3, " rows").
template <class... Parts>
std::string concat(const Parts&... parts) {
  return detail::join({parts...});
}

namespace detail {
// Out of line, so that a function that checks keeps its values in registers and may be inlined.
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail_contract(std::source_location where,
                                                          const Parts&... parts) {
  fail_contract(concat(parts...), where);
}
}  // namespace detail

}  // namespace tessera

// Throws ContractError with the joined parts unless `condition` holds. It is always on.
#define TESSERA_EXPECT(condition, ...)                                                \
  do {                                                                                \
    if (!(condition)) [[unlikely]]                                                    \
      ::tessera::detail::fail_contract(std::source_location::current(), __VA_ARGS__); \
  } while (false)
