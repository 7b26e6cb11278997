#include "tests/promises/load_memory.hpp"

using namespace tessera::testing;

TEST_CASE("a load holds two pieces beside the shards, a save four", "[promises]") {
  check_load_memory({.threads = 1});
}
