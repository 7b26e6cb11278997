// FSDP2's tests of gathers and reductions: which values arrive, of how many bytes, on which
// streams, and that options that only schedule change no bit.
#include <set>
#include <string>

#include "tessera/autograd/recompute.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/optim/clip.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Of 1-d and 2-d parameters whose rows no number of ranks divides, one unit.
struct Shapes final : nn::Module {
  explicit Shapes(const std::vector<Shape>& shapes) {
    const auto counted = [](std::int64_t i) { return static_cast<double>(i % 1021); };
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      all.emplace_back(shapes[i], Initializer::by_index(counted));
      register_parameter("p" + std::to_string(i), all.back());
    }
  }
  std::vector<Parameter> all;
};

// The bytes on the wire of each reduction, the streams in use, and what compute does.
class Wire final : public Observer {
 public:
  explicit Wire(const Device& device) : device_(device) { device_.context().add_observer(*this); }
  ~Wire() override { device_.context().remove_observer(*this); }
  void launched(StreamId stream, Tick, const Op& op) override {
    streams.insert(stream);
    if (stream == StreamId::compute) computed.emplace_back(op.name);
    if (std::string_view(op.name).starts_with("reduce_scatter "))
      reduced.push_back(op.cost.wire_bytes);
    if (std::string_view(op.name).starts_with("all_reduce ")) summed.push_back(op.cost.wire_bytes);
  }
  std::set<StreamId> streams;
  std::vector<double> reduced, summed;
  std::vector<std::string> computed;

 private:
  Device device_;
};

}  // namespace

TEST_CASE("gathers give each rank the whole, and reductions its rows of the mean, on 128 ranks",
          "[fsdp2-077][fsdp2-078]") {
  const std::vector<Shape> shapes = {{17, 257}, {17},      {64, 312}, {64},
                                     {64, 64},  {512, 64}, {256},     {64, 297}};
  // Element i of a gradient is factor(i) times rank + 1; the mean of 1 to N is (N + 1) / 2. All
  // sums are exact: below 2^24 in f32, where the gradient has the parameter's own value, read in
  // backward, and steps of 1 / 16 below 2^7 in f16.
  const auto factor = [](DType dtype, std::size_t i) {
    return static_cast<float>(dtype == f32 ? i % 1021 : 1 + i % 13);
  };
  for (const auto& [dtype, reshard] :
       {std::pair(f32, Reshard::automatic), {f32, Reshard::to(8)}, {f16, Reshard::automatic}}) {
    INFO(dtype << ", reshard " << reshard);
    const int ranks = dtype == f32 ? 128 : 16;
    const WorldOptions inlined{.executor = ExecutorKind::inlined, .threads = 1};
    const auto fit = on_ranks(ranks, inlined, [&, dtype = dtype, reshard = reshard](World& world) {
      Shapes model(shapes);
      fully_shard(model, {.mesh = DeviceMesh::flat(world),
                          .precision = {.param = dtype, .reduce = dtype},
                          .reshard_after_forward = reshard});
      nn::init(model, {1}, world.device());
      bool fits = true;
      const Tensor loss = model.call([&] {
        Tensor total;
        for (const Parameter& p : model.all) {
          const Tensor whole = p.value();
          const std::vector<float> values = raw::cast(whole.detach(), f32).to_vector<float>();
          for (std::size_t i = 0; i < values.size(); ++i)  // below 2^11: exact in f16, too
            fits = fits && values[i] == static_cast<float>(i % 1021);
          std::vector<float> factors(values.size());
          for (std::size_t i = 0; i < factors.size(); ++i) factors[i] = factor(dtype, i);
          const Tensor weights =
              dtype == f32 ? whole / 2
                           : raw::cast(Tensor::from(factors, p.shape(), world.device()), dtype);
          const Tensor sum_of_p = sum(whole * weights * (world.rank() + 1));
          total = total.defined() ? total + sum_of_p : sum_of_p;
        }
        return total;
      });
      loss.backward();
      for (const Parameter& p : model.all) {
        auto i = static_cast<std::size_t>(p.spec().owned().begin * p.spec().row_numel());
        for (const float g : p.grad().to_vector<float>())
          fits = fits && g == factor(dtype, i++) * static_cast<float>(ranks + 1) / 2;
      }
      return fits;
    });
    CHECK(fit == std::vector<bool>(static_cast<std::size_t>(ranks), true));
  }
}

// Sums, of which each rank takes part in 3 / 4 of the elements twice, as sender and as receiver:
// the chunks of what is trainable, in the reduced dtype, with an arrival count for each.
TEST_CASE("a reduction sums as many elements as a rank has, in its dtype, of what is trainable",
          "[fsdp2-075][fsdp2-084][fsdp2-085][fsdp2-096]") {
  // `peers`: of the ranks that shard.
  const auto bytes = [](std::int64_t elements, DType dtype, int peers = 3) {
    return static_cast<double>(2 * peers * elements) * static_cast<double>(size_bytes(dtype));
  };
  for (const auto& [param, reduce] :
       {std::pair(f32, f32), {bf16, f32}, {f16, f32}, {bf16, bf16}, {f16, f16}})
    for (const bool freezes : {false, true})
      for (const bool freezes_first : {false, true}) {
        INFO(param << '/' << reduce << ", freezes " << freezes);
        const RaceCheck check;
        const World world = World::emulated(1, 4, check({.executor = ExecutorKind::virtual_}));
        Stack model({64, 64, 64});
        const auto freeze = [&] {
          if (freezes)
            for (nn::Linear& layer : model.layers) layer.weight.freeze();
        };
        if (freezes_first) freeze();
        model.shard(
            {.mesh = DeviceMesh::flat(world), .precision = {.param = param, .reduce = reduce}});
        nn::init(model, {1}, world.device());
        if (!freezes_first) freeze();
        Wire wire(world.device());
        mean_square(model(rows_of(1, 0, 4, 64, world.device(), param))).backward();
        const std::int64_t weight = freezes ? 0 : 64 * 64 / 4 + 1, bias = 64 / 4 + 1,
                           root = 64 / 4 + 1 + 1 + 1;
        CHECK(wire.reduced == std::vector<double>{bytes(weight + bias, reduce),
                                                  bytes(weight + bias, reduce),
                                                  bytes(root, reduce)});
        CHECK(wire.streams ==
              std::set<StreamId>{StreamId::compute, StreamId::gather, StreamId::reduce});
        CHECK(wire.summed.empty());
      }
  // Over two replicas of two ranks: one peer for the rows of a half; the sum over replicas carries
  // the flat gradient, where each parameter begins at a multiple of 64 elements.
  for (const auto& [param, reduce] : {std::pair(f32, f32), {bf16, f32}, {bf16, bf16}}) {
    INFO(param << '/' << reduce << " over replicas");
    const RaceCheck check;
    const World world = World::emulated(1, 4, check({.executor = ExecutorKind::virtual_}));
    Stack model({64, 64, 64});
    model.shard({.mesh = mesh_of(world, 2), .precision = {.param = param, .reduce = reduce}});
    nn::init(model, {1}, world.device());
    Wire wire(world.device());
    mean_square(model(rows_of(1, 0, 4, 64, world.device(), param))).backward();
    const auto layer = bytes(64 * 64 / 2 + 64 / 2 + 2, reduce, 1),
               flat = bytes(64 * 64 / 2 + 64 + 2, reduce, 1);
    CHECK(wire.reduced == std::vector<double>{layer, layer, bytes(64 / 2 + 1 + 2, reduce, 1)});
    CHECK(wire.summed == std::vector<double>{flat, flat, bytes(64 + 64 + 2, reduce, 1)});
    CHECK(wire.streams == std::set<StreamId>{StreamId::compute, StreamId::gather, StreamId::reduce,
                                             StreamId::replicate});
  }
}

TEST_CASE("weights that are loaded in 16 bits, into shards that are f32, change no reduced dtype",
          "[fsdp2-094]") {
  const RaceCheck check;
  const World world = World::emulated(1, 4, check({.executor = ExecutorKind::virtual_}));
  Stack model({64, 64});
  model.shard({.mesh = DeviceMesh::flat(world), .precision = {.param = bf16, .reduce = bf16}});
  nn::init(model, {1}, world.device());
  const auto reduced = [&] {
    Wire wire(world.device());
    mean_square(model(rows_of(1, 0, 4, 64, world.device(), bf16))).backward();
    return wire.reduced;
  };
  const std::vector<double> before = reduced();
  StateDict narrow;
  for (const auto& [name, p] : model.named_parameters())
    narrow[name] = Tensor::ones(p.shape(), bf16, world.device());
  model.load(narrow);
  for (const Parameter& p : model.parameters()) CHECK(p.shard().dtype() == f32);
  CHECK(reduced() == before);
  CHECK(before[0] == 2 * 3 * (64 * 64 / 4 + 64 / 4 + 2) * 2);
}

// FSDP2 concatenates chunks and casts them on the way, in two kernels.
TEST_CASE("no kernel is between a gradient and its reduction, which rounds as a cast",
          "[threads][fsdp2-079]") {
  const std::vector<Shape> shapes = {{5, 3}, {7}, {2049, 2, 2}};
  const auto loss_of = [](Shapes& model, const World& world, DType dtype, std::uint64_t seed) {
    return model.call([&] {
      Tensor total;
      for (const Parameter& p : model.all) {
        const Tensor factor =
            cast(Tensor::normal(p.shape(), 0, 1, seed++, f32, world.device()), dtype);
        const Tensor part = cast(sum(p.value() * factor), f32);
        total = total.defined() ? total + part : part;
      }
      return total;
    });
  };
  for (const auto& [param, reduce] : {std::pair(f32, f32), {bf16, f32}, {bf16, bf16}}) {
    INFO(param << '/' << reduce);
    const auto computed = [&, param = param, reduce = reduce](int ranks) {
      const RaceCheck check;
      const World world = World::emulated(0, ranks, check({.executor = ExecutorKind::virtual_}));
      Shapes model(shapes);
      fully_shard(model, {.mesh = DeviceMesh::flat(world),
                          .precision = {.param = param, .reduce = reduce}});
      nn::init(model, {1}, world.device());
      const Tensor loss = loss_of(model, world, param, 1);
      Wire wire(world.device());
      loss.backward();
      std::erase_if(wire.computed, [](const std::string& name) {
        // Zeros of padding, and of what has no gradient.
        return name.starts_with("complete_gradient") || name == "clear_gaps";
      });
      return wire.computed;
    };
    CHECK(computed(4) == computed(1));

    const auto fit = on_ranks(2, [&, param = param, reduce = reduce](World& world) {
      Shapes model(shapes);
      fully_shard(model, {.mesh = DeviceMesh::flat(world),
                          .precision = {.param = param, .reduce = reduce}});
      nn::init(model, {1}, world.device());
      loss_of(model, world, param, world.rank() == 0 ? 10 : 20).backward();
      bool fits = true;
      std::uint64_t i = 0;
      for (const Parameter& p : model.all) {
        const auto half = [&](std::uint64_t seed) {
          const Tensor factor = Tensor::normal(p.shape(), 0, 1, seed + i, f32, world.device());
          return raw::mul(raw::cast(raw::cast(factor, param), f32), 0.5);
        };
        const Tensor mean = raw::cast(raw::cast(raw::add(half(10), half(20)), reduce), f32);
        const RowRange rows = p.spec().owned();
        fits = fits && same_bits(p.grad().to_vector<float>(),
                                 raw::slice(mean, 0, rows.begin, rows.end).to_vector<float>());
        ++i;
      }
      return fits;
    });
    CHECK(fit == std::vector<bool>(2, true));
  }
}

TEST_CASE("three roots of one world use one stream for gathers and one for reductions",
          "[fsdp2-051]") {
  const RaceCheck check;
  const World world = World::emulated(1, 4, check({.executor = ExecutorKind::virtual_}));
  Stack a({4, 4}), b({4, 4}), c({4, 4});
  for (Stack* const root : {&a, &b, &c}) {
    root->shard({.mesh = DeviceMesh::flat(world)});
    nn::init(*root, {1}, world.device());
  }
  Wire wire(world.device());
  mean_square(c(b(a(rows_of(1, 0, 4, 4, world.device()))))).backward();
  CHECK(wire.reduced.size() == 6);
  CHECK(wire.streams == std::set<StreamId>{StreamId::compute, StreamId::gather, StreamId::reduce});
}

TEST_CASE("biases alone are trained as on one rank, in blocks that run again or not",
          "[threads][fsdp2-096]") {
  struct Biases : Stack {
    Biases() : Stack({5, 7, 6, 3}) {
      make_positive(*this);
      for (nn::Linear& layer : layers) layer.weight.freeze();
    }
  };
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto train = [&](int ranks, Reshard reshard, bool recomputes) {
    return assemble(on_ranks(ranks, [&](World& world) {
      Biases model;
      model.recomputes = recomputes;
      start(model, world, seed, reshard);
      mean_square(model(own_rows(world, seed, 12 / ranks))).backward();
      Values gradients = shard_gradients(model);
      gradients.erase("offset");  // its one element is on every rank
      return gradients;
    }));
  };
  const Values one = train(1, Reshard::automatic, false);
  CHECK(one.size() == 4);
  for (const Reshard reshard : kReshards)
    for (const bool recomputes : {false, true})
      CHECK(distance(one, train(3, reshard, recomputes)) < kRounding);
}

TEST_CASE("how many reductions are in flight, and how far gathers run ahead, changes no bit",
          "[threads][fsdp2-036][fsdp2-081]") {
  struct Way {
    int ranks, replicas;
    DType param;
    Reshard reshard;
  };
  const auto train = [](const Way& way, int depth, int in_flight) {
    const auto& [ranks, replicas, param, reshard] = way;
    return on_ranks(ranks, [&, replicas = replicas, param = param,
                            reshard = reshard](World& world) {
      Stack model({5, 7, 6, 5, 7, 3});
      model.shard({.mesh = mesh_of(world, replicas),
                   .precision = {.param = param},
                   .reshard_after_forward = reshard,
                   .prefetch_depth = depth,
                   .reductions_in_flight = in_flight,
                   .piece_bytes = 64});
      nn::init(model, {2}, world.device());
      optim::AdamW optimizer(model.parameters(), {.lr = 0.05});
      Values gradients;
      for (int step = 0; step < 3; ++step) {
        mean_square(model(rows_of(3, world.rank() * 4, 4, 5, world.device(), param))).backward();
        gradients = shard_gradients(model);
        optimizer.step();
        optimizer.zero_grad();
      }
      return std::pair(gradients, full_values(model));
    });
  };
  std::vector<Way> ways;
  for (const DType param : {f32, bf16}) {
    for (const Reshard reshard : kReshards) {
      ways.push_back({3, 1, param, reshard});
      ways.push_back({4, 2, param, reshard});
    }
    ways.push_back({4, 1, param, Reshard::to(2)});
  }
  for (const Way& way : ways) {
    INFO(way.ranks << " ranks, " << way.replicas << " replicas, " << way.param << ", reshard "
                   << way.reshard);
    const auto reference = train(way, 1, 1);
    for (const auto& [depth, in_flight] : {std::pair(1, 2), {2, 1}, {3, 3}}) {
      const auto other = train(way, depth, in_flight);
      for (std::size_t rank = 0; rank < other.size(); ++rank) {
        CHECK(same_bits(other[rank].first, reference[rank].first));
        CHECK(same_bits(other[rank].second, reference[rank].second));
      }
    }
  }
}

TEST_CASE("clipping a sharded model has the norm of the whole, with one sum over the ranks",
          "[threads][fsdp2-101]") {
  struct Found {
    double norm, after;
    std::uint64_t sums;
    bool has_changed;
    bool operator==(const Found&) const = default;
  };
  for (const optim::NormType type :
       {optim::NormType::l1, optim::NormType::l2, optim::NormType::inf}) {
    const auto clip = [&](int ranks, int replicas) {
      return on_ranks(ranks, [&](World& world) {
        Stack model({5, 7, 6, 3});
        const DeviceMesh mesh = mesh_of(world, replicas);
        const FlightRecorder& shards = mesh.shard_group().flight_recorder();
        model.shard({.mesh = mesh});
        nn::init(model, {2}, world.device());
        mean_square(model(rows_of(3, 0, 4, 5, world.device()))).backward();
        const Values before = shard_gradients(model);
        const double norm = optim::clip_grad_norm(model.parameters(), 0, type).item();
        const std::uint64_t calls = shards.last_submitted();
        optim::clip_grad_norm(model.parameters(), norm / 4, type);
        const std::uint64_t sums = shards.last_submitted() - calls;
        const bool has_changed = !same_bits(before, shard_gradients(model));
        return Found{norm, optim::clip_grad_norm(model.parameters(), 0, type).item(), sums,
                     has_changed};
      });
    };
    const Found one = clip(1, 1)[0];
    CHECK(one.sums == 0);
    std::vector<Found> four = clip(4, 1);
    for (const Found& f : four) CHECK(f.norm == four[0].norm);
    const std::vector<Found> hybrid = clip(4, 2);
    for (const Found& f : hybrid) CHECK(f.norm == hybrid[0].norm);
    four.insert(four.end(), hybrid.begin(), hybrid.end());
    for (const Found& f : four) {
      // Every rank has all rows, so gradients are those of one rank, each divided by 4 and summed
      // without rounding; a norm of 109 elements rounds fewer than 128 times.
      CHECK(f.norm == Approx(one.norm).epsilon(128 * 0x1p-24));
      CHECK(f.after == Approx(one.norm / 4).epsilon(128 * 0x1p-24));
      CHECK(f.sums == 1);
      CHECK(f.has_changed);
    }
  }
}
