// Hooks of a program's own behind a unit's reductions: values, streams, memory, replicas that it
// sums itself, and what is refused.
#include <set>

#include "tessera/device/device_context.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/double_on_stream.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

struct HookedWay {
  int replicas = 1;
  bool is_bf16 = false;
  std::int64_t piece_bytes = 32 << 20;
  Offload offload = Offload::none;
  std::optional<StreamId> stream{};
};

// The model whose gradients are compared: a table in slices, layers, the root's own.
struct TableAndStack : nn::Module {
  nn::Embedding table{11, 5};
  Stack stack{std::vector<std::int64_t>{5, 7, 1, 3}};
  TableAndStack() {
    register_module("table", table);
    register_module("stack", stack);
  }
  Tensor operator()(const Tensor& ids) {
    return call([&] { return stack(table(ids)); });
  }
};

struct HookedGradients {
  Values gradients;  // whole, of two micro-batches that are reduced each
  int calls = 0;
  std::vector<StreamId> streams;
  std::int64_t peak = 0;
};

enum class HookUse { none, doubles, in_turn };  // in_turn: of the first micro-batch alone

HookedGradients hooked_gradients(World& world, const HookedWay& way, HookUse hook) {
  TableAndStack model;
  ShardOptions options{.mesh = mesh_of(world, way.replicas),
                       .slice_bytes = 1,
                       .piece_bytes = way.piece_bytes,
                       .offload = way.offload};
  if (way.is_bf16) options.precision = {.param = bf16, .reduce = bf16};
  fully_shard(model.table, options);
  model.stack.shard(options);
  fully_shard(model, options);
  nn::init(model, {11}, world.device());
  HookedGradients found;
  const auto set = [&](bool is_set) {
    for (const auto& [name, module] : model.named_modules())
      if (module->hook())
        set_all_reduce_hook(*module,
                            is_set ? AllReduceHook([&](const ReducedGradient& g) {
                              ++found.calls;
                              found.streams.push_back(g.stream.id());
                              double_on_stream(g);
                            })
                                   : AllReduceHook(),
                            is_set ? way.stream : std::nullopt);
  };
  if (hook != HookUse::none) set(true);
  for (int micro = 0; micro < 2; ++micro) {
    if (hook == HookUse::in_turn && micro == 1) set(false);
    const Tensor ids = Tensor::arange(4, i32, world.device());
    mean_square(cast(model(ids), f32)).backward();
  }
  for (const auto& [name, p] : model.named_parameters())
    found.gradients[name] = p.distributed_grad().full().to_vector<float>();
  found.peak = Memory::of(world.device()).ledger().peak_bytes();
  return found;
}

Values scaled(double factor, Values values) {
  for (auto& [name, v] : values)
    for (float& x : v) x = static_cast<float>(x * factor);
  return values;
}

}  // namespace

TEST_CASE("what a hook does to a reduced gradient is what the gradient becomes",
          "[threads][fsdp2-021]") {
  const HookedWay way = GENERATE(
      HookedWay{}, HookedWay{.is_bf16 = true}, HookedWay{.piece_bytes = 1},
      HookedWay{.replicas = 2}, HookedWay{.replicas = 2, .is_bf16 = true}, HookedWay{.replicas = 4},
      HookedWay{.offload = Offload::cpu}, HookedWay{.stream = StreamId::replicate},
      HookedWay{.is_bf16 = true, .stream = StreamId::replicate},
      HookedWay{.piece_bytes = 1, .stream = StreamId::replicate},
      HookedWay{.offload = Offload::cpu, .stream = StreamId::replicate},
      HookedWay{.stream = StreamId::compute}, HookedWay{.stream = StreamId::gather});
  const ExecutorChoice executor =
      testing::threaded_and_shuffled(7)[GENERATE(as<std::size_t>{}, 0, 1)];
  CAPTURE(way.replicas, way.is_bf16, way.piece_bytes, static_cast<int>(way.offload), name(executor),
          way.stream ? name(*way.stream) : "its own");
  const auto run = [&](HookUse hook) {
    return on_ranks(4, {.executor = executor, .threads = 1},
                    [&](World& world) { return hooked_gradients(world, way, hook); });
  };
  const auto plain = run(HookUse::none), hooked = run(HookUse::doubles),
             in_turn = run(HookUse::in_turn);
  const StreamId own = way.replicas > 1 ? StreamId::replicate : StreamId::reduce;
  for (std::size_t rank = 0; rank < 4; ++rank) {
    CHECK(same_bits(hooked[rank].gradients, scaled(2, plain[rank].gradients)));
    // Both micro-batches give the same gradient: 2 + 1 of it where there was 1 + 1. A sum of three
    // f32 terms of one value rounds once.
    CHECK(distance(in_turn[rank].gradients, scaled(1.5, plain[rank].gradients)) <= 0x1p-23);
    CHECK(plain[rank].calls == 0);
    CHECK(hooked[rank].calls >= 2 * 5);  // each unit and slice in each micro-batch
    CHECK(hooked[rank].calls == 2 * in_turn[rank].calls);
    for (const StreamId stream : hooked[rank].streams) CHECK(stream == way.stream.value_or(own));
    CHECK(hooked[rank].peak == plain[rank].peak);
  }
}

namespace {

// In place, through the memory of the communicator.
void sum_over_replicas(const RankGroup& group, const Tensor& x) {
  const Access access = x.access(AccessMode::write);
  group.reduce().submit({.send = x.data(),
                         .recv = x.data(),
                         .count = x.numel(),
                         .kind = CollectiveKind::all_reduce,
                         .dtype = x.dtype()},
                        "sum of replicas", {&access, 1});
}

struct TwoProducts : nn::Module {
  nn::Linear in{10, 40, {.bias = false}}, out{40, 10, {.bias = false}};
  TwoProducts() {
    register_module("in", in);
    register_module("out", out);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return out(in(x)); });
  }
};

}  // namespace

TEST_CASE("a hook sums over replicas that the mesh of the units does not have",
          "[threads][fsdp2-022]") {
  const bool uses_tensors = GENERATE(false, true);  // on compute, with their collectives
  struct Rows {
    std::vector<float> in, out;
    std::map<std::string, float> counts;
  };
  const auto all = on_ranks(4, [&](World& world) {
    const DeviceMesh mesh =
        DeviceMesh::grid(world, {{"inter", 2, {.reduce = StreamId::replicate}}, {"intra", 2}});
    const RankGroup& inter = mesh.group("inter");
    TwoProducts model;
    const bool is_second = inter.rank() == 1;
    model.in.weight.set_initializer(Initializer::constant(is_second ? 1 : 0));
    model.out.weight.set_initializer(Initializer::constant(is_second ? 2 : 0));
    fully_shard(model, {.mesh = mesh["intra"]});
    nn::init(model, {1}, world.device());
    set_gradient_divide_factor(model, 4);
    if (uses_tensors)
      set_all_reduce_hook(
          model,
          [&](const ReducedGradient& g) {
            for (const Tensor& x : {g.values, g.counts})
              raw::copy_into(x, dist::all_reduce(x, inter));
          },
          StreamId::compute);
    else
      set_all_reduce_hook(
          model,
          [&](const ReducedGradient& g) {
            for (const Tensor& x : {g.values, g.counts}) sum_over_replicas(inter, x);
          },
          StreamId::replicate);
    const Tensor x = raw::reshape(Tensor::arange(10, f32, world.device()), {1, 10});
    sum(model(x)).backward();
    return Rows{model.in.weight.grad().to_vector<float>(),
                model.out.weight.grad().to_vector<float>(), arrival_counts(model)};
  });
  std::vector<float> rows;
  for (int row = 0; row < 20; ++row)
    for (int i = 0; i < 10; ++i) rows.push_back(static_cast<float>(10 * i));
  for (const Rows& rank : all) {
    CHECK(rank.out == std::vector<float>(5 * 40, 22.5f));
    CHECK(rank.in == rows);
    for (const auto& [name, count] : rank.counts) CHECK(count == 4);
  }
}

namespace {

// What operations of that name cost, and where they were queued.
class OperationCosts final : public Observer {
 public:
  OperationCosts(const Device& device, std::string_view name) : device_(device), name_(name) {
    device_.context().add_observer(*this);
  }
  ~OperationCosts() override { device_.context().remove_observer(*this); }
  void launched(StreamId stream, Tick, const Op& op) override {
    if (op.name != name_) return;
    bytes += op.cost.bytes;
    streams.insert(stream);
  }
  double bytes = 0;
  std::set<StreamId> streams;

 private:
  Device device_;
  std::string_view name_;
};

}  // namespace

// As in shard/runtime_control.hpp: of 256 by 256, which no staging of a collective holds.
TEST_CASE("a hook on compute sums weights of any size, to the bits of a hybrid mesh", "[threads]") {
  const auto gradients = [](bool is_hybrid) {
    return on_ranks(4, [&](World& world) {
      const DeviceMesh mesh = DeviceMesh::grid(world, {{"replicas", 2}, {"shards", 2}});
      Stack model({256, 256});
      fully_shard(model, {.mesh = is_hybrid ? mesh : mesh["shards"]});
      nn::init(model, {1}, world.device());
      if (!is_hybrid) {
        set_gradient_divide_factor(model, 4);
        set_all_reduce_hook(
            model,
            [group = &mesh.group("replicas")](const ReducedGradient& g) {
              for (const Tensor& x : {g.values, g.counts})
                raw::copy_into(x, dist::all_reduce(x, *group));
            },
            StreamId::compute);
      }
      mean_square(model(rows_of(1, 4 * world.rank(), 4, 256, world.device()))).backward();
      return shard_gradients(model);
    });
  };
  const auto hooked = gradients(false), hybrid = gradients(true);
  for (std::size_t rank = 0; rank < hooked.size(); ++rank)
    CHECK(same_bits(hooked[rank], hybrid[rank]));
}

TEST_CASE("a hook whose operations on compute are not ordered with the gradients is an error",
          "[threads]") {
  const int replicas = GENERATE(1, 2);
  const bool is_ordered = GENERATE(false, true);
  CAPTURE(replicas, is_ordered);
  std::vector<std::string> heard(4);
  // Without the race checker, which would tell the races that the error is about.
  run_local(4, {.threads = 1}, [&](World& world) {
    Stack model({5, 7, 5});
    model.shard({.mesh = DeviceMesh::hybrid(world, {replicas, 4 / replicas})});
    nn::init(model, {5}, world.device());
    const Stream compute = world.device().compute();
    for (const auto& [name, module] : model.named_modules())
      if (module->hook())
        set_all_reduce_hook(*module, [=](const ReducedGradient& g) {
          if (is_ordered) compute.wait(g.stream.record());
          raw::copy_into(g.values, raw::mul(g.values, 0.5));
          if (is_ordered) g.stream.wait(compute.record());
        });
    try {
      mean_square(model(rows_of(1, world.rank(), 2, 5, world.device()))).backward();
    } catch (const std::exception& error) {  // a peer's may come first
      heard[static_cast<std::size_t>(world.rank())] = error.what();
      reset(model);
    }
  });
  for (const std::string& said : heard) {
    if (is_ordered) {
      CHECK(said.empty());
    } else {
      CHECK_THAT(said, Contains("its all-reduce hook has queued operations on compute") &&
                           Contains(replicas == 1 ? "on reduce; give set_all_reduce_hook "
                                                    "StreamId::compute, or let"
                                                  : "on replicate; let compute wait for g.stream"));
    }
  }
}

TEST_CASE("a dry run calls a hook and prices what it queues", "[fsdp2-021]") {
  const RaceCheck check;
  const World world = World::emulated(1, 4, check({.executor = ExecutorKind::virtual_}));
  Stack model({64, 64, 64});
  start(model, world, 1);
  int calls = 0;
  for (nn::Linear& layer : model.layers)
    set_all_reduce_hook(
        layer,
        [&](const ReducedGradient& g) {
          ++calls;
          const Access access = g.values.access(AccessMode::write);
          g.stream.launch({.name = "priced", .cost = {.bytes = 12}, .accesses = {&access, 1}},
                          [](Exec&) {});
        },
        StreamId::replicate);
  const OperationCosts costs(world.device(), "priced");
  mean_square(model(rows_of(1, 0, 4, 64, world.device()))).backward();
  CHECK(calls == 2);
  CHECK(costs.bytes == 2 * 12);
  CHECK(costs.streams == std::set{StreamId::replicate});
}

TEST_CASE("what a hook can't be set for is refused in one line", "[threads][fsdp2-021]") {
  const AllReduceHook hook = [](const ReducedGradient&) {};
  for (const auto& errors : on_ranks(2, [&](World& world) {
         Stack flat({5, 7, 3}), hybrid({5, 7, 3});
         flat.shard({.mesh = DeviceMesh::flat(world)});
         hybrid.shard({.mesh = mesh_of(world, 2)});
         nn::init(flat, {11}, world.device());
         nn::init(hybrid, {11}, world.device());
         nn::Linear loose(2, 2);
         std::string in_pass;
         set_all_reduce_hook(flat, [&](const ReducedGradient&) {
           in_pass = thrown_by([&] { set_all_reduce_hook(flat, hook); });
         });
         mean_square(flat(rows_of(5, 0, 2, 5, world.device()))).backward();
         return std::vector<std::string>{
             thrown_by([&] { set_all_reduce_hook(hybrid, hook, StreamId::reduce); }),
             thrown_by([&] { set_all_reduce_hook(flat, {}, StreamId::reduce); }),
             thrown_by([&] { set_all_reduce_hook(flat, hook, StreamId::offload); }),
             thrown_by([&] { set_all_reduce_hook(loose, hook); }), in_pass};
       })) {
    CHECK_THAT(errors[0],
               Contains("has replicas, so the hook runs on the stream that sums over them"));
    CHECK_THAT(errors[1], Contains("stream 'reduce' is given without a hook"));
    CHECK_THAT(errors[2], Contains("stream 'offload' has no kernels of the device"));
    CHECK_THAT(errors[3], Contains("is not a unit"));
    CHECK_THAT(errors[4], Contains("call set_all_reduce_hook between steps"));
  }
  run_local(1, {.threads = 1}, [&](World& world) {
    Stack alone({5, 3});
    alone.shard({.mesh = DeviceMesh::flat(world)});
    CHECK_THAT(thrown_by([&] { set_all_reduce_hook(alone, hook); }),
               Contains("is on one rank, where nothing is reduced"));
  });
}

TEST_CASE("ranks that have a hook and ranks that have none are told so by name, each of them",
          "[threads]") {
  const int replicas = GENERATE(1, 2);
  const auto all = on_ranks(2, [&](World& world) {
    Stack model({5, 7, 3});
    model.shard({.mesh = mesh_of(world, replicas)});
    nn::init(model, {11}, world.device());
    if (world.rank() == 1) set_all_reduce_hook(model, [](const ReducedGradient&) {});
    const std::string heard = thrown_by<CommError>([&] {
      mean_square(model(rows_of(5, 0, 2, 5, world.device()))).backward();
      world.device().synchronize();
    });
    reset(model);
    return heard;
  });
  const std::string call = replicas == 1 ? "'reduce_scatter (root)" : "'all_reduce (root)";
  for (const std::string& heard : all)
    CHECK_THAT(heard, Contains(call + "'") && Contains(call + " before a hook'") &&
                          Contains("every rank must submit the same collectives"));
}

TEST_CASE("after a hook that throws, reset makes the next step possible", "[threads]") {
  const auto all = on_ranks(2, [&](World& world) {
    Stack model({5, 7, 3});
    start(model, world, 11);
    const auto backward = [&] {
      mean_square(model(rows_of(5, 2 * world.rank(), 2, 5, world.device()))).backward();
    };
    bool throws = true;
    set_all_reduce_hook(model.layers[0], [&](const ReducedGradient& g) {
      if (throws) throw std::runtime_error("no replicas today");
      double_on_stream(g);
    });
    std::string cause;
    try {
      backward();
    } catch (const std::exception& error) {
      cause = error.what();
    }
    reset(model);
    throws = false;
    backward();
    Values hooked = shard_gradients(model);
    optim::SGD(model.parameters(), {.lr = 0}).zero_grad();
    set_all_reduce_hook(model.layers[0], {});
    backward();
    return std::tuple(cause, hooked, shard_gradients(model));
  });
  for (const auto& [cause, hooked, plain] : all) {
    CHECK_THAT(cause, Contains("no replicas today"));
    for (const auto& [name, values] : plain) {
      CAPTURE(name);
      const double factor = name.starts_with("layers.0") ? 2 : 1;
      CHECK(same_bits(hooked.at(name), scaled(factor, {{name, values}}).at(name)));
    }
  }
}
