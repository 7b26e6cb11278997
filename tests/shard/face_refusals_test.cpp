// Options and decisions that no unit can take: what is refused names the module by its parameters.
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("options and decisions that no unit can take name its parameters") {
  Stack model({5, 7, 3});
  const World world = World::single();
  const DeviceMesh mesh = DeviceMesh::flat(world);
  const int before = __LINE__;
  try {
    fully_shard({&model.layers[0], &model.layers[1]}, {.mesh = mesh, .reductions_in_flight = 0});
    FAIL_CHECK("refuses nothing");
  } catch (const ContractError& error) {  // a module has its whole name only under a root
    CHECK(error.is_at_caller());
    CHECK(error.where().line() == before + 2);
    CHECK_THAT(error.where().file_name(), Contains("face_refusals_test.cpp"));
  }
  CHECK_THAT(thrown_by([&] { fully_shard(model, {.mesh = mesh, .piece_bytes = -1}); }),
             Contains("the module of 'scale': piece_bytes is -1; expected 1 or more"));
  CHECK_THAT(thrown_by([&] {
               fully_shard(model, {.mesh = mesh, .reshard_after_forward = Reshard::to(3)});
             }),
             Contains("the module of 'scale': Reshard::to(3) does not split the 1 rank"));
  CHECK_THAT(thrown_by([&] { set_requires_gradient_sync(model, false); }),
             Contains("is not a unit, nor is one below it; call fully_shard"));
  nn::Linear plain(2, 2);
  for (const std::string& said : {thrown_by([&] { set_requires_all_reduce(plain, false, false); }),
                                  thrown_by([&] { set_gradient_divide_factor(plain, 2); })})
    CHECK_THAT(said, Contains("' is not a unit; call"));
  fully_shard(model, {.mesh = mesh});
  for (const double factor : {0., -1., double{NAN}, double{INFINITY}})
    CHECK_THAT(thrown_by([&] { set_gradient_divide_factor(model, factor); }),
               Contains(concat("the module of 'scale': factor is ", factor)) &&
                   Contains("finite number above 0"));
}
