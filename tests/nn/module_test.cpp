// Which parameters are streamed, of those that several modules have.
#include "tessera/nn/module.hpp"

#include <initializer_list>

#include "tests/support/catch.hpp"

using namespace tessera;

namespace {

Parameter table() { return {{6, 2}, Initializer::constant(0)}; }

struct Holder : nn::Module {
  Holder(const Parameter& p, std::initializer_list<const char*> names) {
    for (const char* const name : names) register_parameter(name, p);
  }
};

}  // namespace

TEST_CASE("a module that says twice that it streams a parameter speaks for itself only", "[nn]") {
  const Parameter p = table();
  Holder twice(p, {"p"});
  twice.stream_parameter(p);
  twice.stream_parameter(p);
  CHECK(p.is_streamed());
  Holder whole(p, {"p"});
  CHECK_FALSE(p.is_streamed());
  whole.stream_parameter(p);
  CHECK(p.is_streamed());
}

TEST_CASE("a module that has a parameter under two names streams it under both", "[nn]") {
  const Parameter p = table();
  Holder two(p, {"a", "b"});
  two.stream_parameter(p);
  CHECK(p.is_streamed());
}

TEST_CASE("a module that is gone has no say in whether a parameter is streamed", "[nn]") {
  const Parameter p = table();
  Holder streams(p, {"p"});
  streams.stream_parameter(p);
  {
    const Holder whole(p, {"a", "b"});
    CHECK_FALSE(p.is_streamed());
  }
  CHECK(p.is_streamed());
  {
    Holder other(p, {"p"});
    other.stream_parameter(p);
  }
  CHECK(p.is_streamed());
  const Holder whole(p, {"p"});
  CHECK_FALSE(p.is_streamed());
}

TEST_CASE("a parameter that is not registered, or has no rows, can't be streamed", "[nn]") {
  const Parameter p = table(), scalar({}, Initializer::constant(0));
  Holder holder(scalar, {"scalar"});
  CHECK_THROWS_WITH(holder.stream_parameter(p), Catch::Contains("call register_parameter"));
  CHECK_THROWS_WITH(holder.stream_parameter(scalar), Catch::Contains("of shape []"));
}
