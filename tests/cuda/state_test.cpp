// State of sharded models and optimizers on an emulated GPU: gathered in every form it has the
// CPU's bytes, and what ranks on a GPU have saved is loaded by any number of ranks, which train on
// as the CPU's do.
#include "tessera/distributed/state.hpp"

#include "tests/cuda/support.hpp"
#include "tests/promises/load_memory.hpp"
#include "tests/promises/support.hpp"
#include "tests/support/share.hpp"
#include "tests/support/state_bytes.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

StateDict state_of(Trainee& trainee, const StateDictOptions& options) {
  StateDict all = trainee.model().state_dict(options);
  all.merge(trainee.optimizer().state_dict(trainee.model(), options));
  return all;
}

// What two steps leave, in every form; equal on all ranks but for the rows.
struct Saved {
  StateDict model, optimizer;  // of rank 0, on the host
  std::vector<Bytes> rows{};   // of each rank
  Bytes full{}, streamed{};
};
Saved save(int ranks, const WorldOptions& options, const Cell& cell, std::uint64_t seed) {
  const auto each = testing::on_ranks(ranks, options, [&](World& world) {
    Trainee trainee(world, cell, seed);
    train(world, trainee, 2);
    const StateDictOptions host{StateForm::full, StateRanks::rank_0, StateMemory::host};
    Saved saved{.model = trainee.model().state_dict(host),
                .optimizer = trainee.optimizer().state_dict(trainee.model(), host)};
    saved.rows = {bytes_of(state_of(trainee, {}))};
    saved.full = bytes_of(state_of(trainee, {.form = StateForm::full}));
    for_each_full(state_of(trainee, {.form = StateForm::view}),
                  [&](const std::string& name, const Tensor& whole) {
                    saved.streamed.merge(bytes_of({{name, whole}}));
                  });
    return saved;
  });
  Saved all = each[0];
  for (std::size_t rank = 1; rank < each.size(); ++rank) {
    CHECK(each[rank].full == all.full);
    all.rows.push_back(each[rank].rows[0]);
  }
  return all;
}

// The state of a new model that has loaded it, and the parameters after a step more.
std::pair<Bytes, Values> go_on(int ranks, const WorldOptions& options, const Cell& cell,
                               const Saved& saved, bool sends) {
  return testing::on_ranks(ranks, options, [&](World& world) {
    Trainee trainee(world, cell, 1);
    const StateDict none;
    const bool has = world.rank() == 0 || !sends;
    const LoadOptions load{.from_rank_0 = sends ? &world : nullptr};
    trainee.model().load(has ? saved.model : none, load);
    trainee.optimizer().load(trainee.model(), has ? saved.optimizer : none, load);
    const Bytes loaded = bytes_of(state_of(trainee, {.form = StateForm::full}));
    train(world, trainee, 1);
    return std::pair(loaded, full_values(trainee.model()));
  })[0];
}

}  // namespace

TEST_CASE("state of ranks on a GPU has the CPU's bytes in every form, and goes on on others",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  GridShare share, loads;
  for (const Cell& cell :
       {Cell{}, Cell{.recomputes = true, .tied = true, .param = bf16},
        Cell{.reshard = Reshard::always, .freezes = true, .ragged = true},
        Cell{.by_hand = true, .stored = e4m3, .ignores = true}, Cell{.layers = 4, .lists = true},
        Cell{.replicas = 2, .orthogonalises = true}, Cell{.param = bf16, .offload = Offload::cpu}})
    for (const int ranks : worlds_of(cell)) {
      if (!share.takes()) continue;
      INFO(cell << ", " << ranks << " ranks, seed " << seed);
      const Saved cpu = save(ranks, {.threads = 1}, cell, seed);
      const Delays delays(seed, 60);
      const Saved gpu = save(ranks, on_gpu(), cell, seed);
      CHECK(gpu.rows == cpu.rows);
      CHECK(gpu.full == cpu.full);
      CHECK(gpu.streamed == cpu.full);
      CHECK(bytes_of(gpu.model) == bytes_of(cpu.model));
      CHECK(bytes_of(gpu.optimizer) == bytes_of(cpu.optimizer));
      for (const int others : worlds_of(cell))
        for (const bool sends : {false, true}) {
          if (!loads.takes()) continue;
          INFO("on " << others << " ranks, sent from rank 0: " << sends);
          const auto [loaded, values] = go_on(others, on_gpu(), cell, gpu, sends);
          CHECK(loaded == gpu.full);
          CHECK(same_bits(values, go_on(others, {.threads = 1}, cell, cpu, sends).second));
        }
    }
}

TEST_CASE("files are loaded onto a GPU by two pieces, with the values that were saved",
          "[threads]") {
  const Delays delays(fresh_seed(), 60);
  check_load_memory(on_gpu());
}
