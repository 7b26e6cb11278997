#include "tessera/base/error.hpp"

namespace tessera::detail {

void fail_contract(const std::string& message, std::source_location where) {
  throw ContractError(message, where);
}

void fail_assert(const char* condition, std::source_location where) {
  throw Error(concat("internal assertion failed: ", condition, " (", where.file_name(), ":",
                     where.line(), "); please report this"),
              where);
}

}  // namespace tessera::detail
