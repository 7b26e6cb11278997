#include "tessera/base/error.hpp"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <string_view>
#include <utility>

#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera {
namespace {

// The length of the first word, or of what stands in quotes there: "can't" ends none.
std::size_t unit_length(std::string_view text) {
  const std::size_t word = text.find_first_of(" \n");
  if (text[0] != '\'') return std::min(word, text.size());
  std::size_t end = 1;
  do end = text.find('\'', end) + 1;
  while (end != 0 && end < text.size() && std::isalnum(static_cast<unsigned char>(text[end])));
  return std::min(end == 0 ? word : end, text.size());
}

std::string with_short_units(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t unit = unit_length(text);
    out += shortened(text.substr(0, unit));
    text.remove_prefix(unit);
    const std::size_t blank = std::min(text.find_first_not_of(" \n"), text.size());
    out += text.substr(0, blank);
    text.remove_prefix(blank);
  }
  return out;
}

thread_local const CallSite* innermost = nullptr;

}  // namespace

CallSite::CallSite(const char* operation, const Caller& at) noexcept
    : operation_(operation), at_(at.where), outer_(innermost) {
  innermost = this;
}
CallSite::~CallSite() { innermost = outer_; }

Error::Error(const std::string& message, std::source_location where)
    : std::runtime_error(with_short_units(message)), where_(where) {}

}  // namespace tessera

namespace tessera::detail {

void fail_size(std::int64_t a, char operation, std::int64_t b) {
  TESSERA_EXPECT(a >= 0 && b >= 0, "a size is ", std::min(a, b), "; expected 0 or more");
  TESSERA_EXPECT(false, "size overflow: ", a, ' ', operation, ' ', b);
}

std::string join(std::initializer_list<TextPart> parts) {
  std::ostringstream out;
  for (const TextPart& part : parts) part.write(out, part.value);
  return std::move(out).str();
}

void fail_contract(const std::string& message, std::source_location where) {
  if (innermost == nullptr) throw ContractError(message, where);
  std::string_view operation;
  bool is_at_caller = false;
  for (const CallSite* site = innermost; site != nullptr; site = site->outer_) {
    if (site->operation_) operation = site->operation_;
    if (site->at_.line() == 0) continue;
    where = site->at_;
    is_at_caller = true;
  }
  const bool is_named = operation.empty() || (std::string_view(message).starts_with(operation) &&
                                              message.substr(operation.size(), 1) == ":");
  ContractError error(is_named ? message : concat(operation, ": ", message), where);
  if (is_at_caller) error.set_at_caller();
  throw error;
}

void fail_assert(const char* condition, std::source_location where) {
  throw Error(concat("internal assertion failed: ", condition, " (", where.file_name(), ":",
                     where.line(), "); please report this"),
              where);
}

}  // namespace tessera::detail
