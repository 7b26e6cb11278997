// What is offloaded, read and written from either side, moved there with its moments, and after a
// step that failed.
#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "tessera/distributed/distributed_tensor.hpp"
#include "tests/shard/cuts.hpp"
#include "tests/shard/offload_job.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("values and state of what is offloaded are read and written from either side",
          "[threads][fsdp2-108]") {
  for (const int ranks : {1, 2}) {
    const auto failures = on_ranks(ranks, [&](World& world) {
      std::vector<std::string> failed;
      const auto check = [&](bool holds, const char* what) {
        if (!holds) failed.emplace_back(what);
      };
      OffloadJob job(world, Offload::cpu), other(world, Offload::cpu), device(world, Offload::none);
      optim::AdamW optimizer(job.stack.parameters()), of_other(other.stack.parameters()),
          of_device(device.stack.parameters());
      for (int k = 0; k < 2; ++k) job.step(k, optimizer);
      const Parameter& weight = job.stack.layers[0].weight;
      const Values values = full_values(job.stack);

      const StateDict full = job.stack.state_dict({.form = StateForm::full});
      for (const auto& [name, entry] : full)
        check(entry.values.device().is_host() && entry.spec.world == 1, "a whole dict on the host");
      for (nn::Module* to :
           {static_cast<nn::Module*>(&other.stack), static_cast<nn::Module*>(&device.stack)}) {
        to->load(full);
        check(testing::same_bits(values, full_values(*to)), "loaded whole");
      }
      const auto names = job.stack.named_parameters();
      const StateDict state = optimizer.state_dict(names, {.form = StateForm::full});
      of_other.load(other.stack.named_parameters(), state);
      of_device.load(device.stack.named_parameters(), state);
      for (int k = 2; k < 4; ++k)
        for (const auto& [one, by] : {std::pair(&job, &optimizer), std::pair(&other, &of_other),
                                      std::pair(&device, &of_device)})
          one->step(k, *by);
      check(testing::same_bits(full_values(job.stack), full_values(other.stack)), "goes on");
      check(testing::same_bits(full_values(job.stack), full_values(device.stack)),
            "goes on where it is not offloaded");

      // A tensor of the device becomes the shard of the host.
      const Shape rows = weight.spec().local_shape();
      weight.assign(Tensor::full(rows, 0.25, f32, world.device()));
      for (const float x : weight.shard().to_vector<float>()) check(x == 0.25f, "assigned");
      const Tensor moved = raw::moved(weight.shard(), world.device());
      check(moved.device() == world.device(), "moved to the device");
      for (const float x : moved.to_vector<float>()) check(x == 0.25f, "moved");
      const Tensor whole = weight.distributed().full();
      check(whole.shape() == weight.shape(), "whole");
      for (const float x : whole.to_vector<float>()) check(x == 0.25f, "gathered");

      // From rank 0 into models of either kind.
      const RankGroup& group = world;
      other.stack.load(full, {.from_rank_0 = &group});
      check(testing::same_bits(values, full_values(other.stack)), "sent by rank 0");
      return failed;
    });
    for (const auto& failed : failures) CHECK(failed == std::vector<std::string>{});
  }
}

TEST_CASE("a model that has values moves to the host when it is sharded, its moments with it",
          "[threads]") {
  for (const int ranks : {1, 2})
    for (const bool same : on_ranks(ranks, [&](World& world) {
           const auto run = [&](Offload offload) {
             Stack stack({4, 5, 3});
             nn::init(stack, {3}, world.device());
             optim::AdamW optimizer(stack.parameters());
             const auto step = [&] {
               mean_square(stack(rows_of(1, 0, 2, 4, world.device()))).backward();
               optimizer.step();
               optimizer.zero_grad();
             };
             step();
             stack.shard({.mesh = DeviceMesh::flat(world), .offload = offload});
             step();
             step();
             return full_values(stack);
           };
           return testing::same_bits(run(Offload::none), run(Offload::cpu));
         }))
      CHECK(same);
}

TEST_CASE("updates from before a model moved to the host are no steps that a failure there loses",
          "[threads]") {
  for (const std::int64_t steps : on_ranks(2, [](World& world) {
         Stack stack({4, 5, 3});
         nn::init(stack, {3}, world.device());
         optim::SGD optimizer(stack.parameters(), {.lr = 0.1});
         const auto loss = [&] { return mean_square(stack(rows_of(1, 0, 2, 4, world.device()))); };
         for (int k = 0; k < 20; ++k) {  // many operations of `compute`
           loss().backward();
           optimizer.step();
           optimizer.zero_grad();
         }
         stack.shard({.mesh = DeviceMesh::flat(world), .offload = Offload::cpu});
         loss().backward();
         optimizer.step();
         world.device().synchronize();
         world.barrier();
         if (world.rank() == 1)
           world.device().context().add_observer(std::make_shared<Cuts>(1, "copy_to_host"));
         bool has_failed = false;
         try {
           loss().backward();
           world.barrier();
         } catch (const std::exception&) {
           has_failed = true;
         }
         const bool is_consistent = reset(stack).parameters_are_consistent;
         return has_failed && is_consistent ? optimizer.steps() : -1;
       }))
    CHECK(steps == 21);
}

TEST_CASE("a backward of a forward from before fully_shard is refused") {
  const World world = World::single();
  Stack stack({4, 5, 3});
  nn::init(stack, {3}, world.device());
  const Tensor loss = mean_square(stack(rows_of(1, 0, 2, 4, world.device())));
  stack.shard({.mesh = DeviceMesh::flat(world)});
  CHECK_THAT(thrown_by([&] { loss.backward(); }),
             Contains("was sharded since the forward that used it"));
}

TEST_CASE("after a step that failed, on the host or on its way there, the next ones are as planned",
          "[threads]") {
  const char* const name =
      GENERATE("cast_shard", "copy_to_device", "pack_shard", "copy_to_host", "accumulate_shard");
  const int at = GENERATE(1, 3);
  CAPTURE(name, at);
  struct Seen {
    bool was_cut = false, is_consistent = true;
    Values parameters;
  };
  const auto run = [&](bool cuts) {
    return on_ranks(2, [&](World& world) {
      OffloadJob job(world, Offload::cpu, bf16, bf16);
      optim::AdamW optimizer(job.stack.parameters());
      job.step(0, optimizer);
      world.device().synchronize();
      world.barrier();
      if (cuts && world.rank() == 1)
        world.device().context().add_observer(std::make_shared<Cuts>(at, name));
      Seen out;
      try {
        job.step(1, optimizer);
        world.barrier();
      } catch (const std::exception&) {
        out.was_cut = true;
        out.is_consistent = reset(job.stack).parameters_are_consistent;
      }
      for (int k = static_cast<int>(optimizer.steps()); k < 3; ++k) job.step(k, optimizer);
      out.parameters = full_values(job.stack);
      return out;
    });
  };
  const auto cut = run(true), whole = run(false);
  for (std::size_t rank = 0; rank < cut.size(); ++rank) {
    CHECK(cut[rank].was_cut);
    CHECK(cut[rank].is_consistent);
    CHECK(testing::same_bits(cut[rank].parameters, whole[rank].parameters));
  }
}
