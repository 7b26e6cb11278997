// Which gathers a program lists to run ahead of others.
#include "tests/shard/submissions.hpp"
#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// Of the third step of rank 1 of 2 with four layers.
template <class F>
SubmittedStep order_of(Reshard way, const F& prepare) {
  const RaceCheck check;
  World world = World::emulated(1, 2, check({.executor = ExecutorKind::virtual_}));
  TrainedStack t(world, way, {4, 4, 4, 4, 4});
  prepare(t);
  SubmittedStep order;
  for (int k = 0; k < 3; ++k) {
    Submissions submitted(world.device(), true);
    const Tensor loss = t.loss();
    order.forward = submitted.take();
    loss.backward();
    order.backward = submitted.take();
    t.update();
  }
  return order;
}

std::vector<nn::Module*> layers_of(TrainedStack& t, const std::vector<std::size_t>& numbers) {
  std::vector<nn::Module*> out;
  for (const std::size_t i : numbers) out.push_back(&t.layer(i));
  return out;
}

}  // namespace

TEST_CASE("gathers that are listed run ahead of the calls, in forward and in backward",
          "[fsdp2-063][fsdp2-064]") {
  const auto forward = [](TrainedStack& t, std::size_t depth) {
    for (std::size_t i = 0; i < 4; ++i) {
      std::vector<std::size_t> next;
      for (std::size_t k = i + 1; k <= i + depth && k < 4; ++k) next.push_back(k);
      set_modules_to_forward_prefetch(t.layer(i), layers_of(t, next));
    }
  };
  const auto none = [](TrainedStack&) {};
  const std::string back = "2 -3 1 -2 0 -1 -0 -root";
  CHECK(order_of(Reshard::automatic, none) == SubmittedStep{"root 0* 1* 2* 3*", back});
  CHECK(order_of(Reshard::automatic, [&](TrainedStack& t) { forward(t, 1); }) ==
        SubmittedStep{"root 0 1* 2* 3**", back});
  CHECK(order_of(Reshard::automatic, [&](TrainedStack& t) { forward(t, 2); }) ==
        SubmittedStep{"root 0 1 2* 3***", back});
  CHECK(order_of(Reshard::automatic, [&](TrainedStack& t) {
          forward(t, 1);
          forward(t, 0);
        }) == SubmittedStep{"root 0* 1* 2* 3*", back});

  const auto backward = [](TrainedStack& t, std::size_t depth) {
    for (std::size_t i = 0; i < 4; ++i) {
      std::vector<std::size_t> next;
      for (std::size_t k = 1; k <= depth && k <= i; ++k) next.push_back(i - k);
      set_modules_to_backward_prefetch(t.layer(i), layers_of(t, next));
    }
  };
  const std::string calls = "root 0* 1* 2* 3*";
  CHECK(order_of(Reshard::always, none) == SubmittedStep{calls, "3 root 2 -3 1 -2 0 -1 -0 -root"});
  CHECK(order_of(Reshard::always, [&](TrainedStack& t) { backward(t, 1); }) ==
        SubmittedStep{calls, "3 root 2 -3 1 -2 0 -1 -0 -root"});
  CHECK(order_of(Reshard::always, [&](TrainedStack& t) { backward(t, 2); }) ==
        SubmittedStep{calls, "3 root 2 1 -3 0 -2 -1 -0 -root"});
  CHECK(order_of(Reshard::always, [&](TrainedStack& t) {
          set_modules_to_backward_prefetch(t.model, layers_of(t, {3, 1}));
        }) == SubmittedStep{calls, "3 1 root 2 -3 -2 0 -1 -0 -root"});
}

TEST_CASE("lists of units that come earlier, or not at all, change no value",
          "[threads][fsdp2-036][fsdp2-068]") {
  for (const Reshard way : kReshards)
    for (const auto& [is_same, unplanned] : on_ranks(2, [&](World& world) {
           TrainedStack t(world, way, {4, 4, 4, 4, 4}), plain(world, way, {4, 4, 4, 4, 4});
           for (std::size_t i = 0; i < 4; ++i) {
             set_modules_to_forward_prefetch(t.layer(i), layers_of(t, {(i + 2) % 4, 0}));
             set_modules_to_backward_prefetch(t.layer(i), layers_of(t, {(i + 1) % 4, 3}));
           }
           std::vector<std::uint64_t> counts;
           for (int k = 0; k < 10; ++k) {
             for (TrainedStack* const one : {&t, &plain}) {
               one->loss(static_cast<std::uint64_t>(k)).backward();
               one->update();
             }
             counts.push_back(shard_counters(t.model).unplanned_slots);
           }
           return std::pair(same_bits(full_values(t.model), full_values(plain.model)), counts);
         })) {
      CHECK(is_same);
      CHECK(unplanned[5] == unplanned.back());
    }
}

TEST_CASE("lists name units of one root, and say which is none") {
  for (const auto& said : on_ranks(2, [](World& world) {
         TrainedStack a(world, Reshard::always), b(world, Reshard::always);
         nn::Linear none(4, 4);
         std::vector<std::string> out;
         const auto list = [&](const std::vector<nn::Module*>& modules) {
           out.push_back(thrown_by([&] { set_modules_to_forward_prefetch(a.layer(0), modules); }));
           out.push_back(thrown_by([&] { set_modules_to_backward_prefetch(a.layer(0), modules); }));
         };
         list({&a.layer(1), &none});  // 0, 1
         list({nullptr});             // 2, 3
         a.loss();
         list({&b.layer(1)});  // 4, 5
         b.loss();
         list({&b.layer(1)});  // 6, 7
         TrainedStack c(world, Reshard::always), d(world, Reshard::always);
         set_modules_to_forward_prefetch(c.layer(0), {&d.layer(1)});  // roots not known yet
         out.push_back(thrown_by([&] { c.loss(); }));                 // 8
         out.push_back(thrown_by([&] { set_modules_to_forward_prefetch(none, {}); }));  // 9
         return out;
       })) {
    for (const std::size_t i : {0, 1}) CHECK_THAT(said[i], Contains("module 1 of the list"));
    for (const std::size_t i : {2, 3}) CHECK_THAT(said[i], Contains("module 0 of the list"));
    for (const std::size_t i : {4, 5, 6, 7, 8})
      CHECK_THAT(said[i], Contains("another root") && Contains("under one root"));
    CHECK_THAT(said[9], Contains("is not a unit"));
  }
}

TEST_CASE("a unit that is unsharded inside of another one's call is gathered ahead of its own",
          "[threads][fsdp2-072]") {
  class Ahead final : public Stack {
   public:
    using Stack::Stack;
    Tensor operator()(const Tensor& x) {
      return call([&] {
        Tensor h = x;
        for (std::size_t i = 0; i < layers.size(); ++i) {
          if (i + 1 < layers.size() && layers[i].hook()) unshard(layers[i + 1]);
          h = tanh(layers[i](h));
        }
        return h * scale.value() + offset.value();
      });
    }
  };
  for (const Reshard way : kReshards)
    for (const auto& [is_same, same_count] : on_ranks(3, [&](World& world) {
           Ahead ahead({4, 4, 4, 4});
           start(ahead, world, 3, way);
           optim::SGD optimizer(ahead.parameters(), {.lr = 0.1});
           TrainedStack plain(world, way);
           for (int k = 0; k < 10; ++k) {
             mean_square(ahead(rows_of(1, 2 * world.rank(), 2, 4, world.device()))).backward();
             optimizer.step();
             optimizer.zero_grad();
             plain.loss().backward();
             plain.update();
           }
           return std::pair(same_bits(full_values(ahead), full_values(plain.model)),
                            shard_counters(ahead).gathers == plain.gathers());
         })) {
      CHECK(is_same);
      CHECK(same_count);
    }
}
