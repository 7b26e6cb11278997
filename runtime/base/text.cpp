#include "tessera/detail/base/text.hpp"

#include "tessera/base/error.hpp"

namespace tessera {

std::string describe_exception(const std::exception_ptr& error, int rank) {
  try {
    std::rethrow_exception(error);
  } catch (Error& e) {
    if (e.rank() < 0) e.set_rank(rank);
    return e.what();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace tessera
