// A build without Asio says in one line what is missing.
#include "runtime/comm/store/store.hpp"
#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;

TEST_CASE("a build without Asio names the package when processes look for each other") {
  std::string message;
  try {
    detail::Store::join({.host = "localhost", .port = 29500, .run_id = "none"}, 0,
                        std::chrono::seconds(1));
  } catch (const CommError& error) {
    message = error.what();
  }
  CHECK(message.find("libasio-dev") != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}
