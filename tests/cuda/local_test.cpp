// The `local` communicator on one emulated GPU: what collectives compute, in place and out of
// place, staged and direct, and that worlds of the wrong kind are refused.
#include <random>
#include <stdexcept>

#include "tessera/comm/world.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/cuda/support.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// The rank's tensor of whole numbers, so that sums are exact.
std::vector<float> values(int rank, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed + static_cast<std::uint64_t>(rank));
  std::vector<float> out;
  for (std::int64_t i = 0; i < count; ++i)
    out.push_back(static_cast<float>(static_cast<std::int64_t>(engine() % 2001) - 1000));
  return out;
}

// An all_gather in place and a reduce_scatter out of place over symmetric memory, in one world.
struct Exchanged {
  std::vector<float> gathered, reduced;
};
Exchanged exchange(World& world, std::int64_t count, std::uint64_t seed) {
  const Device& device = world.device();
  const std::int64_t all = count * world.size();
  const auto arena = world.allocate_symmetric(all * 4);
  LastUse use;
  const auto whole = Storage::borrowed(device, arena->data(), all * 4, use);
  const Tensor table = Tensor::wrap(whole, {all}, f32);
  const Tensor mine = table.view({count}, {1}, world.rank() * count);
  raw::copy_into(mine, Tensor::from(values(world.rank(), count, seed), {count}, device));
  const Stream compute = device.compute(), gather = device.gather(), reduce = device.reduce();
  gather.wait(compute.record());
  const Access in_place[] = {table.access(AccessMode::write)};
  world.gather().submit({.send = mine.data(),
                         .recv = table.data(),
                         .count = count,
                         .kind = CollectiveKind::all_gather,
                         .dtype = f32},
                        "gather_values", in_place);
  compute.wait(gather.record());
  Exchanged out;
  out.gathered = table.to_vector<float>();
  const Tensor sum = Tensor::empty({count}, f32, device);
  reduce.wait(compute.record());
  const Access apart[] = {table.access(AccessMode::read), sum.access(AccessMode::write)};
  world.reduce().submit({.send = table.data(),
                         .recv = sum.data(),
                         .count = count,
                         .kind = CollectiveKind::reduce_scatter,
                         .dtype = f32},
                        "reduce_values", apart);
  compute.wait(reduce.record());
  out.reduced = sum.to_vector<float>();
  device.synchronize();
  return out;
}

}  // namespace

TEST_CASE("gathers and sums over ranks on one GPU, whatever the delays", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  for (const int ranks : {1, 2, 4})
    for (const std::int64_t count : {1, 7, 5000}) {
      INFO(ranks << " ranks, " << count << " elements, seed " << seed);
      const Delays delays(seed, 200);
      std::vector<Exchanged> results(static_cast<std::size_t>(ranks));
      run_checked(ranks, on_gpu(), [&](World& world) {
        results[static_cast<std::size_t>(world.rank())] = exchange(world, count, seed);
      });
      std::vector<float> expected;
      for (int r = 0; r < ranks; ++r)
        for (const float v : values(r, count, seed)) expected.push_back(v);
      for (int r = 0; r < ranks; ++r) {
        const Exchanged& result = results[static_cast<std::size_t>(r)];
        CHECK(result.gathered == expected);
        // Every rank sends the same table: the sum is `ranks` times this rank's chunk.
        std::vector<float> sum = values(r, count, seed);
        for (float& v : sum) v *= static_cast<float>(ranks);
        CHECK(result.reduced == sum);
      }
    }
}

// Each rank's values go to the next one, a send and a receive at a time, and then to all, a chunk
// to each.
TEST_CASE("ranks on one GPU send, receive and exchange chunks", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  constexpr std::int64_t kCount = 300;
  for (const int ranks : {2, 3}) {
    INFO(ranks << " ranks, seed " << seed);
    const Delays delays(seed, 200);
    run_checked(ranks, on_gpu(), [&](World& world) {
      const Device& device = world.device();
      const int rank = world.rank(), before = (rank + ranks - 1) % ranks;
      const std::int64_t all = kCount * ranks;
      const Tensor own = Tensor::from(values(rank, all, seed), {all}, device),
                   passed = Tensor::empty({all}, f32, device),
                   chunks = Tensor::empty({all}, f32, device);
      const Stream compute = device.compute(), gather = device.gather();
      gather.wait(compute.record());
      const Access accesses[] = {own.access(AccessMode::read), passed.access(AccessMode::write),
                                 chunks.access(AccessMode::write)};
      for (int r = 0; r < ranks; ++r)
        world.gather().submit({.send = own.data(),
                               .recv = passed.data(),
                               .count = all,
                               .kind = CollectiveKind::send_recv,
                               .dtype = f32,
                               .root = r,
                               .target = (r + 1) % ranks},
                              "pass_on", accesses);
      world.gather().submit({.send = own.data(),
                             .recv = chunks.data(),
                             .count = kCount,
                             .kind = CollectiveKind::all_to_all,
                             .dtype = f32},
                            "exchange", accesses);
      compute.wait(gather.record());
      std::vector<float> expected;
      for (int r = 0; r < ranks; ++r) {
        const std::vector<float> theirs = values(r, all, seed);
        expected.insert(expected.end(), theirs.begin() + rank * kCount,
                        theirs.begin() + (rank + 1) * kCount);
      }
      if (passed.to_vector<float>() != values(before, all, seed))
        throw std::runtime_error("what was sent is not what has come");
      if (chunks.to_vector<float>() != expected)
        throw std::runtime_error("the chunks that have come are not those of this rank");
      device.synchronize();
    });
  }
}

TEST_CASE("a world on a GPU sums, finds the largest, and meets", "[threads]") {
  const Delays delays(fresh_seed(), 200);
  for (const int ranks : {1, 3}) {
    std::vector<double> sums(static_cast<std::size_t>(ranks)), most = sums;
    run_checked(ranks, on_gpu(), [&](World& world) {
      for (int round = 0; round < 3; ++round) {
        world.barrier();
        sums[static_cast<std::size_t>(world.rank())] = world.sum(world.rank() + round + 0.5);
        most[static_cast<std::size_t>(world.rank())] = world.max(10 * world.rank());
      }
    });
    for (int r = 0; r < ranks; ++r) {
      CHECK(sums[static_cast<std::size_t>(r)] == ranks * (ranks - 1) / 2. + 2.5 * ranks);
      CHECK(most[static_cast<std::size_t>(r)] == 10 * (ranks - 1));
    }
  }
}

TEST_CASE("ranks on a GPU that disagree are told on all of them, and recover", "[threads]") {
  std::vector<std::string> heard(2);
  run_local(2, on_gpu(), [&](World& world) {
    try {
      if (world.rank() == 0)
        world.sum(1);
      else
        world.barrier();
    } catch (const CommError& error) {
      heard[static_cast<std::size_t>(world.rank())] = error.what();
      world.recover();
    }
    if (world.sum(1) != 2) throw std::runtime_error("the sum is wrong");
  });
  for (const std::string& what : heard) CHECK_THAT(what, Catch::Contains("barrier"));
}

TEST_CASE("worlds refuse executors of the CPU, and meta, on a GPU") {
  WorldOptions options = on_gpu();
  options.executor = testing::shuffled(0);
  CHECK_THROWS_WITH(World::single(options), Catch::Contains("runs on the CPU"));
  CHECK_THROWS_AS(World::single({.device = {.kind = DeviceKind::meta}}), ContractError);
  CHECK_THROWS_AS(World::mpi(on_gpu()), Error);  // also where there is no MPI
}
