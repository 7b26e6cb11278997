// The twin of the store's sources in a build without Asio.
#include "runtime/comm/store/store.hpp"
#include "tessera/base/error.hpp"

namespace tessera::detail {

std::unique_ptr<Store> Store::join(const StoreAddress&, int, std::chrono::milliseconds) {
  throw CommError(
      "Store::join: this build has no Asio; apt-get install libasio-dev and configure again");
}

}  // namespace tessera::detail
