// Whole state of sharded models and optimizers: gathered on every rank or on one, streamed, sent
// from one, on any number of ranks, and in how much memory.
#include "tessera/distributed/state.hpp"

#include "tests/shard/support.hpp"
#include "tests/support/launches.hpp"
#include "tests/support/state_bytes.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A stack with a counter, whose rows no number of ranks divides, and its optimizer.
struct Job {
  explicit Job(const Device& device = Device::meta()) : model(device) {}
  struct Counted : nn::Module {
    explicit Counted(const Device&) {
      register_module("stack", stack);
      register_buffer("count", count);
    }
    Stack stack{{4, 7, 5}};
    nn::Buffer count{{}, Initializer::constant(0), i64};
  } model;
  std::unique_ptr<optim::AdamW> optimizer;

  void shard(const World& world) {
    model.stack.shard({.mesh = DeviceMesh::flat(world)});
    fully_shard(model, {.mesh = DeviceMesh::flat(world)});
    make_optimizer();
  }
  void make_optimizer() {
    optimizer = std::make_unique<optim::AdamW>(model.parameters(), optim::AdamWOptions{.lr = 0.1});
  }
  // Steps on the same rows for any number of ranks: each takes all of them.
  void train(const World& world, int steps) {
    for (int i = 0; i < steps; ++i) {
      mean_square(model.stack(rows_of(7, optimizer->steps(), 6, 4, world.device()))).backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }
};

// Both, after some steps on that many ranks, on the host.
std::pair<StateDict, StateDict> trained(int ranks, std::uint64_t seed) {
  return on_ranks(ranks, [&](World& world) {
    Job job;
    job.shard(world);
    job.model.materialize(world.device());
    nn::init(job.model, {seed});
    job.train(world, 2);
    const StateDictOptions options{StateForm::full, StateRanks::rank_0, StateMemory::host};
    return std::pair(job.model.state_dict(options), job.optimizer->state_dict(job.model, options));
  })[0];
}

}  // namespace

TEST_CASE("whole state of model and optimizer is the rows of all ranks, on 1, 2 and 3",
          "[distributed][threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const int ranks : {1, 2, 3}) {
    INFO(ranks << " ranks");
    struct Found {
      StateDict rows;
      Bytes full, streamed, on_host;
      std::size_t on_rank_0 = 0;
      bool is_on_host = true;
    };
    const auto found = on_ranks(ranks, [&](World& world) {
      Job job;
      job.shard(world);
      job.model.materialize(world.device());
      nn::init(job.model, {seed});
      job.train(world, 2);
      Found f;
      const auto both = [&](const StateDictOptions& options) {
        StateDict all = job.model.state_dict(options);
        all.merge(job.optimizer->state_dict(job.model, options));
        return all;
      };
      f.rows = both({.memory = StateMemory::host});
      f.full = bytes_of(both({.form = StateForm::full}));
      for_each_full(both({.form = StateForm::view}),
                    [&](const std::string& name, const Tensor& whole) {
                      f.streamed.merge(bytes_of({{name, whole}}));
                    });
      const StateDict host = both({StateForm::full, StateRanks::rank_0, StateMemory::host});
      f.on_rank_0 = host.size();
      f.on_host = bytes_of(host);
      for (const auto& [name, entry] : host)
        f.is_on_host =
            f.is_on_host && entry.values.device() != world.device() && entry.spec.world == 1;
      return f;
    });
    Bytes joined;
    for (const Found& f : found)
      for (const auto& [name, rows] : bytes_of(f.rows)) {
        const bool is_first = &f == &found[0];
        const ShardSpec& spec = f.rows.at(name).spec;
        if (is_first || (spec.world > 1 && spec.shape.ndim() > 0))
          joined[name].insert(joined[name].end(), rows.begin(), rows.end());
      }
    CHECK(joined.size() == 5 * 6 + 2 + 1);
    for (std::size_t rank = 0; rank < found.size(); ++rank) {
      CHECK(found[rank].full == joined);
      CHECK(found[rank].streamed == joined);
      CHECK(found[rank].on_rank_0 == (rank == 0 ? joined.size() : 0));
      CHECK(found[rank].is_on_host);
    }
    CHECK(found[0].on_host == joined);
  }
}

TEST_CASE("what one number of ranks has trained goes on another, each rank loading it or rank 0",
          "[distributed][threads][fsdp2-018]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto [model, optimizer] = trained(2, seed);
  for (const int ranks : {1, 2, 3})
    for (const bool sends : {false, true}) {
      INFO(ranks << " ranks, sent from rank 0: " << sends);
      const bool renames = ranks == 2;
      const auto named = [&](const StateDict& state) {
        StateDict other;
        for (const auto& [name, entry] : state)
          other.emplace((renames ? "run." : "") + name, entry);
        return other;
      };
      const StateDict given = named(model), of_optimizer = named(optimizer);
      const auto found = on_ranks(ranks, [&](World& world) {
        Job job;
        job.shard(world);
        const StateDict none;
        const bool has = world.rank() == 0 || !sends;
        LoadOptions options{.from_rank_0 = sends ? &world : nullptr};
        if (renames) options.rename = {{"run.*", "*"}};
        if (!sends) job.model.materialize(world.device());
        job.model.load(has ? given : none, options);
        job.optimizer->load(job.model, has ? of_optimizer : none, options);
        StateDict all = job.model.state_dict({.form = StateForm::full});
        all.merge(job.optimizer->state_dict(job.model, {.form = StateForm::full}));
        const Bytes loaded = bytes_of(all);
        world.barrier();
        job.train(world, 1);
        return std::pair(loaded, full_values(job.model));
      });
      StateDict all = model;
      all.insert(optimizer.begin(), optimizer.end());
      for (const auto& [loaded, after] : found) {
        CHECK(loaded == bytes_of(all));
        CHECK(same_bits(after, found[0].second));
      }
    }
}

TEST_CASE("ranks that load one dict at once, each its columns, run nothing on its device",
          "[distributed][threads]") {
  constexpr StateDictOptions kHost{StateForm::full, StateRanks::rank_0, StateMemory::host};
  for (const int ranks : {1, 2, 4}) {
    INFO(ranks << " ranks");
    Stack whole({4, 8, 4});
    const Device cpu = Device::cpu();
    nn::init(whole, {5}, cpu);
    const StateDict saved = whole.state_dict(kHost);
    const Launches launches(saved.begin()->second.values.device());
    for (const Bytes& loaded : on_ranks(ranks, [&](World& world) {
           Stack model({4, 8, 4});
           ShardOptions options{.mesh = DeviceMesh::flat(world)};
           options.shard_placement_fn = [](const Parameter& p) {
             return Shard{p.shape().ndim() == 2 ? 1 : 0};
           };
           model.shard(options);
           model.materialize(world.device());
           model.load(saved);
           return bytes_of(model.state_dict({.form = StateForm::full}));
         }))
      CHECK(loaded == bytes_of(saved));
    CHECK(launches.counts().empty());
  }
}

TEST_CASE("what rank 0 refuses is refused on every rank, and nothing changes",
          "[distributed][threads]") {
  const auto [model, optimizer] = trained(1, 3);
  const auto said = on_ranks(3, [&, &model = model, &optimizer = optimizer](World& world) {
    Job job;
    job.shard(world);
    StateDict bad = model;
    bad.erase("stack.layers.0.bias");
    const auto load_bad = [&] {
      job.model.load(world.rank() == 0 ? bad : StateDict(), {.from_rank_0 = &world});
    };
    const std::string on_meta = thrown_by(load_bad);
    if (!job.model.parameters()[0].device().is_meta()) return std::string("materialized");
    job.model.materialize(world.device());
    nn::init(job.model, {1});
    const Values before = full_values(job.model);
    const std::string error = thrown_by(load_bad);
    if (error != on_meta) return concat("on meta: ", on_meta);
    const StateDict none{{"lr", StateTensor()}};  // has no tensor
    const auto load_optimizer = [&](int which, const StateDict& whole) {
      job.optimizer->load(job.model, world.rank() == which ? none : whole, {.from_rank_0 = &world});
    };
    load_optimizer(1, optimizer);  // what it gives isn't looked at
    if (thrown_by([&] { load_optimizer(0, {}); }).empty()) return std::string("accepted");
    const nn::LoadReport report =
        job.model.load(world.rank() == 0 ? StateDict{{"extra", model.at("count")}} : StateDict(),
                       {.strict = false, .from_rank_0 = &world});
    const bool is_kept = same_bits(full_values(job.model), before) && report.missing.size() == 7 &&
                         report.unexpected == std::vector<std::string>{"extra"};
    return is_kept ? error : "changed";
  });
  const std::string why =
      "load: the state dict has no tensor 'stack.layers.0.bias'; is it a model of this kind and "
      "size?";
  CHECK(said[0] == why);
  CHECK(said[1] == "rank 0 refuses: " + why);
  CHECK(said[2] == "rank 0 refuses: " + why);
}

TEST_CASE("ranks whose models differ are told so when rank 0 sends", "[distributed][threads]") {
  const auto said = on_ranks(2, [&](World& world) {
    Stack model({4, world.rank() == 0 ? 7 : 8, 5});
    model.materialize(world.device());
    return thrown_by([&] { model.load(StateDict(), {.from_rank_0 = &world}); });
  });
  for (const std::string& error : said)
    CHECK(error ==
          "load: the models of the ranks differ in names, shapes or dtypes; build the same on "
          "every rank");
}

TEST_CASE("a rank that does not take part in whole state is named in one line",
          "[distributed][threads]") {
  std::vector<std::string> said(2);
  CHECK_THROWS_AS(run_local(2, {.threads = 1},
                            [&](World& world) {
                              Job job;
                              job.shard(world);
                              job.model.materialize(world.device());
                              try {
                                if (world.rank() == 0)
                                  job.model.state_dict({.form = StateForm::full});
                                else
                                  world.sum(1);
                              } catch (const CommError& error) {
                                said[static_cast<std::size_t>(world.rank())] = error.what();
                                throw;
                              }
                            }),
                  CommError);
  for (const std::string& error : said) {
    INFO(error);
    CHECK(error.find('\n') == std::string::npos);
    CHECK_FALSE(error.empty());
  }
}

TEST_CASE("state of ranks that have made other numbers of steps is not put together",
          "[distributed][threads]") {
  for (const auto& said : on_ranks(2, [](World& world) {
         Job job;
         job.shard(world);
         job.model.materialize(world.device());
         nn::init(job.model, {1});
         mean_square(job.model.stack(rows_of(7, 0, 6, 4, world.device()))).backward();
         if (world.rank() == 0) job.optimizer->step();
         const StateDictOptions full{StateForm::full};
         const std::vector said{
             thrown_by([&] { job.model.state_dict(full); }),
             thrown_by([&] { job.optimizer->state_dict(job.model, full); }), thrown_by([&] {
               for_each_full(job.model.state_dict({StateForm::view}),
                             [](const std::string&, const Tensor&) {});
             }),
             thrown_by([&] {
               for_each_full(job.model.state_dict(), [](const std::string&, const Tensor&) {});
             }),
             thrown_by(
                 [&] { for_each_full_parameter(job.model, [](const auto&, const auto&) {}); })};
         if (world.rank() == 1) job.optimizer->step();
         return said;
       }))
    for (const std::string& message : said)
      CHECK_THAT(
          message,
          Catch::Contains("optimizers have made different numbers of steps") &&
              Catch::Contains("every rank must make the same calls of step, set_steps and load"));
}

TEST_CASE("rows on the host are not gathered on the device, and say so", "[distributed]") {
  for (const std::string& said : on_ranks(2, [](World& world) {
         Job job;
         job.shard(world);
         job.model.materialize(world.device());
         const StateDict rows = job.model.state_dict({.memory = StateMemory::host});
         return thrown_by([&] { for_each_full(rows, [](const auto&, const Tensor&) {}); });
       }))
    CHECK_THAT(said, Catch::Contains("lies on another device than its mesh"));
}

TEST_CASE("parameters without memory are no state, and nothing is read of them", "[distributed]") {
  for (const auto& said : on_ranks(2, [](World& world) {
         Job job;
         job.shard(world);
         return std::vector{thrown_by([&] { job.model.state_dict(); }), thrown_by([&] {
                              for_each_full_parameter(job.model, [](const auto&, const auto&) {});
                            })};
       }))
    for (const std::string& message : said)
      CHECK_THAT(message,
                 Catch::Contains("parameter 'stack.") && Catch::Contains(" has no memory yet"));
}

TEST_CASE("options of a state dict that say nothing together are refused", "[distributed]") {
  Stack model({2, 2});
  model.materialize(Device::cpu());
  CHECK(thrown_by([&] {
          model.state_dict({.ranks = StateRanks::rank_0});
        }).starts_with("state_dict: only whole tensors can be for rank 0 alone"));
  CHECK(thrown_by([&] {
          model.state_dict({.form = StateForm::view, .memory = StateMemory::host});
        }).starts_with("state_dict: views lie where the model is"));
  const StateDict rows{{"x", {Tensor::ones({1}, f32, Device::cpu()), ShardSpec{{2}, 2, 0}}}};
  CHECK(thrown_by([&] { for_each_full(rows, [](const auto&, const auto&) {}); }) ==
        "for_each_full: 'x' holds the rows of rank 0 of 2 and has no mesh; give what a state_dict "
        "has made");
}

TEST_CASE("a view of state is read, never written, and a lent tensor is not kept",
          "[distributed]") {
  Stack model({2, 2});
  model.materialize(Device::cpu());
  StateDict views = model.state_dict({.form = StateForm::view});
  CHECK(views.at("scale").values.data() == model.scale.shard().data());
  CHECK(thrown_by([&] { raw::fill(views.at("scale").values, 1); }).find("scale") !=
        std::string::npos);
  Tensor kept;
  for_each_full(views, [&](const std::string&, const Tensor& whole) { kept = whole; });
  CHECK(thrown_by([&] { kept.to_vector<float>(); }).find("for_each_full") != std::string::npos);
}

// Rank 0 holds the whole state on the host; every rank beside its shards one tensor.
TEST_CASE("whole state on rank 0's host takes the memory of one tensor on the device",
          "[distributed][threads]") {
  constexpr std::int64_t kWidth = 256;  // a weight: 256 KiB
  struct Found {
    std::int64_t live, peak, reserved, most_reserved;
  };
  const auto found = on_ranks(2, [&](World& world) {
    Stack model({kWidth, kWidth, kWidth, kWidth, kWidth});
    model.shard({.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {1});
    optim::AdamW optimizer(model.parameters());
    optimizer.prepare();
    Memory& memory = Memory::of(world.device());
    const StateDictOptions options{StateForm::full, StateRanks::rank_0, StateMemory::host};
    Found f{memory.ledger().live_bytes(), 0, memory.reserved_bytes(), 0};
    memory.ledger().reset_peak();
    for_each_full(model.state_dict({.form = StateForm::view}),
                  [&](const std::string&, const Tensor&) {
                    f.most_reserved = std::max(f.most_reserved, memory.reserved_bytes());
                  });
    model.state_dict(options);
    optimizer.state_dict(model, options);
    f.peak = memory.ledger().peak_bytes();
    return f;
  });
  constexpr std::int64_t kWeight = kWidth * kWidth * 4;
  for (const Found& f : found) {
    // Beside numbers of 8 bytes, for which the pool has 512 each: 2 for each of 10 parameters
    // and 2.
    CHECK(f.peak - f.live <= 22 * 512);
    CHECK(f.most_reserved - f.reserved >= kWeight);
    CHECK(f.most_reserved - f.reserved < 2 * kWeight);
  }
}
