// Forwards of the root: without a backward, several before theirs, of micro-batches, and how far
// the host runs ahead of the device.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

class Plain final : public Stack {
 public:
  Plain() : Stack({5, 6, 6, 3}) { make_positive(*this); }
};

}  // namespace

TEST_CASE("a forward without backward changes nothing of the step after it",
          "[threads][fsdp2-097]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  enum class Before { nothing, evaluation, training, kept };
  for (const Reshard reshard : kReshards) {
    const auto train = [&](Before before) {
      struct Result {
        Values values;
        ShardCounters counters;
        bool operator==(const Result& other) const { return same_bits(values, other.values); }
      };
      return on_ranks(3, [&](World& world) {
        Plain model;
        start(model, world, 77, reshard);
        optim::AdamW optimizer(model.parameters(), {.lr = 0.02});
        Tensor kept;
        for (int step = 0; step < 3; ++step) {
          if (before == Before::evaluation) {
            const NoGradGuard no_grad;
            model(own_rows(world, seed + 9));
          } else if (before == Before::training) {
            model(own_rows(world, seed + 9));
          } else if (before == Before::kept) {
            kept = model(own_rows(world, seed + 9));
          }
          mean_square(model(own_rows(world, seed + static_cast<std::uint64_t>(step)))).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        return Result{full_values(model), shard_counters(model)};
      });
    };
    const auto plain = train(Before::nothing);
    for (const Before before : {Before::evaluation, Before::training, Before::kept}) {
      INFO("case " << static_cast<int>(before) << ", reshard " << reshard);
      const auto other = train(before);
      for (std::size_t rank = 0; rank < 3; ++rank) {
        CHECK(plain[rank] == other[rank]);
        // A peer's backward may reach a forward that is gone here, so it is gone back along, too;
        // the last one that is kept is not.
        const std::uint64_t expected = plain[rank].counters.reductions;
        const std::uint64_t more = before == Before::training ? expected
                                   : before == Before::kept   ? expected / 3 * 2
                                                              : 0;
        CHECK(other[rank].counters.reductions == expected + more);
      }
    }
  }
}

TEST_CASE("several forwards before their backwards give the sum of their gradients",
          "[threads][fsdp2-039]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  struct Result {
    Values gradients;
    std::uint64_t reductions = 0;
  };
  for (const Reshard reshard : kReshards)
    for (const int ranks : {1, 2}) {
      const auto train = [&](int way) {
        return on_ranks(ranks, [&](World& world) {
          Plain model;
          start(model, world, 77, reshard);
          const Tensor x = own_rows(world, seed), y = own_rows(world, seed + 1);
          if (way == 0) {
            mean_square(model(x)).backward();
            mean_square(model(y)).backward();
          } else if (way == 1) {
            const Tensor first = mean_square(model(x)), second = mean_square(model(y));
            first.backward();
            second.backward();
          } else {
            const Tensor first = mean_square(model(x)), second = mean_square(model(y));
            (first + second).backward();
          }
          return Result{shard_gradients(model), shard_counters(model).reductions};
        });
      };
      const auto one_by_one = train(0);
      for (const int way : {1, 2}) {
        INFO(ranks << " ranks, way " << way << ", reshard " << reshard);
        const auto other = train(way);
        for (std::size_t rank = 0; rank < other.size(); ++rank) {
          CHECK(distance(one_by_one[rank].gradients, other[rank].gradients) < kRounding);
          CHECK(other[rank].reductions <= one_by_one[rank].reductions);
        }
      }
    }
}

TEST_CASE("micro-batches accumulate to the gradient of the whole batch", "[threads][fsdp2-088]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto train = [&](int ranks, int micro_batches, DType wire) {
    std::vector<Values> shards = on_ranks(ranks, [&](World& world) {
      Plain model;
      ShardOptions options{.mesh = DeviceMesh::flat(world)};
      if (wire != f32) options.precision = {.param = wire};
      model.shard(options);
      nn::init(model, {77}, world.device());
      const std::int64_t rows = 24 / ranks / micro_batches;
      for (int m = 0; m < micro_batches; ++m) {
        const std::int64_t first = world.rank() * (24 / ranks) + m * rows;
        const Tensor x = positive_rows(seed, first, rows, 5, world.device(), wire);
        (mean_square(model(x)) / micro_batches).backward();
      }
      return shard_gradients(model);
    });
    for (Values& shard : shards) shard.erase("offset");  // every rank has its one element
    return assemble(shards);
  };
  const Values whole = train(1, 1, f32);
  CHECK(whole.size() == 7);
  for (const int ranks : {1, 2, 3})
    for (const int micro_batches : {1, 2, 4}) {
      INFO(ranks << " ranks, " << micro_batches << " micro-batches");
      CHECK(distance(whole, train(ranks, micro_batches, f32)) < kRounding);
      // bf16 keeps 8 bits: one rounding is 2^-8 at most. An output has 17 of input, 3 * (weight,
      // product, bias, tanh), scale and offset; the derivative by it 4 more; its way back 2 of the
      // scale, 3 * 3 of layers, 0.25 * (13 + 9 + 5) of 1 - y^2; an activation 9; product, micro-
      // batches, ranks and means 9: 57 * 2^-8 < 0.25.
      const Values narrow = train(ranks, micro_batches, bf16);
      CHECK(distance(whole, narrow) < 0.25);
      CHECK(distance(whole, narrow) > 0);
    }
}

TEST_CASE("the host is at most `forwards_ahead` forwards ahead, though the program reads nothing",
          "[shard][threads]") {
  for (const bool is_root_called : {true, false})
    for (const int ahead : {1, 2, 5}) {
      INFO(ahead << (is_root_called ? " forwards ahead" : " calls of one unit ahead"));
      std::atomic<bool> is_open = false;
      std::atomic<int> begun = 0;
      const int calls = ahead + 3;
      std::thread host([&] {
        run_local(1, {.threads = 1}, [&](World& world) {
          Stack model({5, 7, 1, 3});
          model.shard({.mesh = DeviceMesh::flat(world), .forwards_ahead = ahead});
          nn::init(model, {3}, world.device());
          nn::Module& called = is_root_called ? static_cast<nn::Module&>(model) : model.layers[0];
          called.register_forward_pre_hook([&](nn::Module&, nn::CallTensors) {
            if (++begun == 1)  // what the device has to end before anything else of this forward
              world.device().compute().launch({.name = "gate"},
                                              [&](Exec&) { is_open.wait(false); });
          });
          const Tensor x = rows_of(5, 0, 2, 5, world.device());
          if (!is_root_called) shard_plan(model);  // who the root is
          for (int call = 0; call < calls; ++call) is_root_called ? model(x) : model.layers[0](x);
        });
      });
      while (begun < ahead) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for one that goes further
      const int seen = begun;
      is_open = true;
      is_open.notify_all();
      host.join();
      CHECK(seen == ahead);
      CHECK(begun == calls);
    }
}
