// Handles of tensors over a mesh: parts and wholes, placements, what is refused, and that reading
// and printing one says nothing to peers.
#include "tessera/distributed/distributed_tensor.hpp"

#include <numeric>

#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// [d0, 2]: 0, 1, 2, ...
std::vector<float> counted(std::int64_t rows) {
  std::vector<float> values(static_cast<std::size_t>(2 * rows));
  std::iota(values.begin(), values.end(), 0.f);
  return values;
}

std::uint64_t calls_of(const World& world) { return world.flight_recorder().last_submitted(); }

}  // namespace

TEST_CASE("a tensor is spread over a mesh, cut as parameters are, and put together again",
          "[distributed][threads]") {
  for (const int ranks : {1, 2, 3})
    for (const std::int64_t rows : {0, 1, 5, 6, 20001}) {  // the last is more than is staged
      INFO(ranks << " ranks, " << rows << " rows");
      const auto found = on_ranks(ranks, [&](World& world) {
        const DeviceMesh mesh = DeviceMesh::flat(world);
        std::vector<float> values = counted(rows);
        if (world.rank() > 0) values.assign(values.size(), -1);
        const auto t = distribute(Tensor::from(values, {rows, 2}, world.device()), mesh, {Shard{}});
        const std::vector<float> part = t.local().to_vector<float>();
        const ShardSpec spec{{rows, 2}, ranks, world.rank()};
        const std::vector<float> all = counted(rows);
        const bool fits =
            t.rows() == spec.owned() &&
            part == std::vector<float>(all.begin() + 2 * spec.owned().begin,
                                       all.begin() + 2 * spec.owned().end) &&
            t.shape() == Shape{rows, 2} && t.full().to_vector<float>() == all &&
            t.redistribute({Replicate{}}).redistribute({Shard{}}).local().to_vector<float>() ==
                part;
        return fits;
      });
      for (const bool fits : found) CHECK(fits);
    }
}

TEST_CASE("terms become their sum, or the largest, on every rank or by rows",
          "[distributed][threads]") {
  for (const int ranks : {1, 2, 3})
    for (const std::int64_t count : {5, 20001}) {
      INFO(ranks << " ranks, " << count << " rows");
      const auto found = on_ranks(ranks, [&](World& world) {
        const DeviceMesh mesh = DeviceMesh::flat(world);
        const auto all = [](std::int64_t rows, int value) {
          return std::vector<float>(static_cast<std::size_t>(2 * rows), static_cast<float>(value));
        };
        const Shape shape{count, 2};
        const Tensor term = Tensor::full(shape, 1 << world.rank(), f32, world.device());
        const DistributedTensor sum(term, shape, mesh, {Partial{}}),
            most(term, shape, mesh, {Partial{ReduceOp::max}});
        const auto rows = sum.redistribute({Shard{}});
        return sum.full().to_vector<float>() == all(count, (1 << ranks) - 1) &&
               most.full().to_vector<float>() == all(count, 1 << (ranks - 1)) &&
               rows.local().to_vector<float>() == all(rows.rows().size(), (1 << ranks) - 1) &&
               term.to_vector<float>() == all(count, 1 << world.rank());
      });
      for (const bool fits : found) CHECK(fits);
    }
}

TEST_CASE("handles of parameter, gradient and moments are the shards, and full() all of them",
          "[distributed][threads][fsdp2-009]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const int ranks : {1, 2, 3}) {
    struct Found {
      Values full, gathered, gradients, moments;
      std::map<std::string, float> offset;
      bool is_silent = true;
    };
    const auto found = on_ranks(ranks, [&](World& world) {
      Stack model({4, 7, 5});
      model.shard({.mesh = DeviceMesh::flat(world)});
      model.materialize(world.device());
      nn::init(model, {seed});
      optim::AdamW optimizer(model.parameters());
      mean_square(model(rows_of(seed, 0, 6, 4, world.device()))).backward();
      optimizer.step();
      Found f;
      f.gathered = full_values(model);
      const std::uint64_t calls = calls_of(world);
      for (const auto& [name, p] : model.named_parameters()) {
        const DistributedTensor w = p.distributed();
        f.is_silent = f.is_silent && w.local().data() == p.shard().data() &&
                      w.mesh().size() == ranks && w.placements() == Placements{Shard{}} &&
                      !w.to_string().empty() && p.distributed_grad().defined();
      }
      f.is_silent = f.is_silent && calls_of(world) == calls;
      for (const auto& [name, p] : model.named_parameters()) {
        f.full[name] = p.distributed().full().to_vector<float>();
        f.gradients[name] = p.distributed_grad().full().to_vector<float>();
        f.moments[name] = optimizer.distributed_moments(p)[0].full().to_vector<float>();
      }
      return f;
    });
    INFO(ranks << " ranks");
    for (const Found& f : found) {
      CHECK(f.is_silent);
      CHECK(same_bits(f.full, f.gathered));
      CHECK(same_bits(f.gradients, found[0].gradients));
      // m = (1 - 0.9) g after one step, rounded a few times.
      for (const auto& [name, g] : f.gradients)
        for (std::size_t i = 0; i < g.size(); ++i)
          CHECK(std::abs(f.moments.at(name)[i] - 0.1f * g[i]) <= 4 * 0x1p-24f * std::abs(g[i]));
    }
  }
}

TEST_CASE("a mesh of two dimensions has replicas and rows", "[distributed][threads]") {
  const auto found = on_ranks(4, [](World& world) {
    const DeviceMesh mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2});
    const Tensor values = Tensor::from(counted(3), {3, 2}, world.device());
    const auto t = distribute(values, mesh, {Replicate{}, Shard{}});
    const DistributedTensor terms(t.local(), {3, 2}, mesh, {Partial{}, Shard{}});
    std::vector<float> doubled = counted(3);
    for (float& v : doubled) v *= 2;
    const bool fits =
        t.full().to_vector<float>() == counted(3) && terms.full().to_vector<float>() == doubled &&
        terms.redistribute({Shard{}, Replicate{}}).full().to_vector<float>() == doubled;
    return fits ? t.to_string() : "wrong";
  });
  CHECK(found[0] ==
        "f32 [3, 2], Replicate over dp_replicate 2, Shard(0) over dp_shard 2; rows 0 to 1 here");
  CHECK(found[3] ==
        "f32 [3, 2], Replicate over dp_replicate 2, Shard(0) over dp_shard 2; row 2 here");
}

TEST_CASE("placements that cannot be are refused before anything is sent", "[distributed]") {
  const World world = World::emulated(0, 4);
  const DeviceMesh mesh = DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2});
  const Tensor t = Tensor::ones({3, 2}, f32, world.device());
  const auto said = [&](Placements placements) {
    return thrown_by([&] { distribute(t, mesh, placements); });
  };
  CHECK(said({Shard{}}) ==
        "DistributedTensor: 1 placements (Shard(0)) for a mesh of 2 dimensions; give one for each");
  CHECK(said({Shard{}, Shard{}}) ==
        "DistributedTensor: (Shard(0), Shard(0)) is sharded twice; shard along one dimension of "
        "the mesh");
  CHECK(said({Replicate{}, Shard{2}}) ==
        "DistributedTensor: Shard(2) of a tensor [3, 2]; give one of its dimensions");
  CHECK(said({Partial{}, Replicate{}})
            .starts_with(
                "distribute: a tensor can't become partial as in (Partial(sum), Replicate)"));
  CHECK(thrown_by([&] { DistributedTensor(t, {3, 2}, mesh, {Replicate{}, Shard{}}); }) ==
        "DistributedTensor: the local part is [3, 2], but (Replicate, Shard(0)) of [3, 2] gives "
        "this rank [2, 2]");
  CHECK(thrown_by([&] {
          DistributedTensor(t, {3, 2}, mesh, {Replicate{}, Replicate{}})
              .redistribute({Partial{}, Replicate{}});
        }).find("can't become partial") != std::string::npos);
  CHECK(thrown_by([] { DistributedTensor().full(); }) == "an undefined DistributedTensor was used");
  nn::Linear whole(2, 3);
  whole.materialize(Device::cpu());
  CHECK(thrown_by([&] { whole.weight.distributed(); }).find("belongs to no unit") !=
        std::string::npos);
}
