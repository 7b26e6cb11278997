// What the ranks of a save give wrongly is one error on all of them, and no checkpoint.
#include <filesystem>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/saver.hpp"
#include "tessera/comm/mesh.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;
using checkpoint::Checkpoint;

namespace {

// A part of two good tensors, of rows and whole, that `change` makes wrong on a rank.
std::vector<checkpoint::Part> parts_with(
    const World& world, const std::function<void(StateDict&, std::vector<checkpoint::Part>&)>& f) {
  const auto mesh = std::make_shared<const DeviceMesh>(DeviceMesh::flat(world));
  const ShardSpec spec{.shape = {7, 2}, .world = world.size(), .rank = world.rank()};
  StateDict state;
  state["rows"] = StateTensor(Tensor::full(spec.local_shape(), 1, f32, world.device()), spec, mesh);
  state["whole"] = Tensor::full({5}, 2, f32, world.device());
  std::vector<checkpoint::Part> none;
  f(state, none);
  std::vector<checkpoint::Part> parts{checkpoint::part("own", state, world),
                                      checkpoint::part("more", state, world)};
  f(state, parts);
  return parts;
}

}  // namespace

TEST_CASE("boxes that do not make up their tensors are refused before anything is removed",
          "[checkpoint]") {
  using Change = std::function<void(const World&, StateDict&, std::vector<checkpoint::Part>&)>;
  const auto on_rank_1 = [](const std::function<void(const Device&, StateDict&)>& f) -> Change {
    return [f](const World& world, StateDict& state, std::vector<checkpoint::Part>& parts) {
      if (parts.empty() && world.rank() == 1) f(world.device(), state);
    };
  };
  const auto by_hand = [](const std::function<void(int, checkpoint::PartTensor&)>& f) -> Change {
    return [f](const World& world, StateDict&, std::vector<checkpoint::Part>& parts) {
      for (checkpoint::Part& part : parts)
        for (checkpoint::PartTensor& tensor : part.tensors) f(world.rank(), tensor);
    };
  };
  const std::tuple<const char*, Change> ways[] = {
      {"lacks rows", on_rank_1([](const Device& device, StateDict& state) {
         state["one"] = Tensor::zeros({6, 2}, f32, device);
       })},
      {"lacks rows", on_rank_1([](const Device&, StateDict& state) {
         auto entry = state.extract("whole");
         entry.key() = "other";
         state.insert(std::move(entry));
       })},
      {"another dtype", on_rank_1([](const Device& device, StateDict& state) {
         state["whole"] = Tensor::full({5}, 2, f64, device);
       })},
      {"shape", on_rank_1([](const Device& device, StateDict& state) {
         state["whole"] = Tensor::full({6}, 2, f32, device);
       })},
      {"stored 2 times", by_hand([](int, checkpoint::PartTensor& tensor) {
         if (tensor.names[0].name == "whole") tensor.copies = 1, tensor.copy = 0;
       })},
      {"stored 2 times", by_hand([](int, checkpoint::PartTensor& tensor) {
         if (tensor.names[0].name == "whole") tensor.copy = 0;
       })},
      {"lacks rows", by_hand([](int, checkpoint::PartTensor& tensor) {
         if (tensor.names[0].name == "rows") tensor.copies = 2;
       })},
      {"'whole' of part 'own' is [5], but its spec says [0]",
       by_hand([](int rank, checkpoint::PartTensor& tensor) {
         if (tensor.names[0].name == "whole" && rank == 1) tensor.state.spec.shape = {0};
       })},
      {"'__metadata__'",
       [](const World& world, StateDict& state, std::vector<checkpoint::Part>&) {
         state["__metadata__"] = Tensor::zeros({2}, f32, world.device());
       }},
      {"rank 1 gives other parts",
       [](const World& world, StateDict&, std::vector<checkpoint::Part>& parts) {
         if (!parts.empty() && world.rank() == 1) std::swap(parts[0], parts[1]);
       }},
      {"rank 1 gives other parts",
       [](const World& world, StateDict&, std::vector<checkpoint::Part>& parts) {
         if (!parts.empty() && world.rank() == 1) parts.pop_back();
       }},
      {"rank 1 gives other scalars",
       [](const World& world, StateDict&, std::vector<checkpoint::Part>& parts) {
         if (!parts.empty()) parts[0].scalars["x"] = std::int64_t{world.rank()};
       }},
      {"'manifest.json'",
       [](const World&, StateDict&, std::vector<checkpoint::Part>& parts) {
         if (!parts.empty()) parts[0].name = "manifest.json";
       }},
  };
  const TemporaryFolder folder;
  for (const bool is_now : {true, false})
    for (std::size_t i = 0; i < std::size(ways); ++i) {
      const auto& [expected, change] = ways[i];
      INFO("way " << i << ", " << expected);
      const std::string at = folder / concat("a", i, is_now ? "" : "b");
      const auto heard = on_ranks(2, [&, change = change](World& world) {
        const auto parts = [&](bool is_wrong) {
          return parts_with(world, [&](StateDict& state, std::vector<checkpoint::Part>& made) {
            if (is_wrong) change(world, state, made);
          });
        };
        checkpoint::save(at, 1, parts(false), {}, world, {.keep_latest = 1});
        return thrown_by<ContractError>([&] {
          if (is_now) return checkpoint::save(at, 2, parts(true), {}, world, {.keep_latest = 1});
          checkpoint::Saver saver(at, world, {.keep_latest = 1});
          saver.save(2, parts(true), {});
          saver.wait();
        });
      });
      CHECK(heard[0] == heard[1]);
      CHECK(has(heard[0], expected));
      CHECK_FALSE(has(heard[0], ".unfinished"));
      CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{1});
      CHECK(std::distance(std::filesystem::directory_iterator(at), {}) == 1);
    }
}

TEST_CASE("rows without their mesh, and numbers below 0 to keep, are refused", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(2, [&](World& world) {
    const ShardSpec spec{.shape = {6, 2}, .world = 2, .rank = world.rank()};
    StateDict state;
    state["t"] = StateTensor(Tensor::zeros({3, 2}, f32, world.device()), spec);
    const checkpoint::CheckpointOptions negative{.keep_latest = -1};
    return thrown_by<ContractError>([&] { checkpoint::part("own", state, world); }) + '\n' +
           thrown_by<ContractError>([&] { checkpoint::save(at, 1, {}, {}, world, negative); }) +
           '\n' + thrown_by<ContractError>([&] { checkpoint::Saver(at, world, negative); });
  });
  for (const std::string& said : heard) {
    CHECK(has(said, "'t' of part 'own' is rank "));
    CHECK(has(said, "; give the StateTensor its mesh"));
    CHECK(said.find("keep_latest is -1") != said.rfind("keep_latest is -1"));
  }
  CHECK(checkpoint::steps_in(at).empty());
}

TEST_CASE("ranks that give other steps, scalars or options hear one error", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(3, [&](World& world) {
    const std::int64_t other = world.rank() == 2 ? 5 : 4;
    return thrown_by<ContractError>([&] { checkpoint::save(at, other, {}, {}, world); }) + '\n' +
           thrown_by<ContractError>(
               [&] { checkpoint::save(at, 1, {}, {{"samples", other}}, world); }) +
           '\n' + thrown_by<ContractError>([&] {
             checkpoint::save(at, 1, {}, {}, world, {.keep_latest = other});
           });
  });
  for (const std::string& said : heard) {
    CHECK(said == heard[0]);
    CHECK(has(said, "rank 2 gives other steps than rank 0: 5;"));
    CHECK(has(said, "rank 2 gives other scalars than rank 0: {\"samples\": 5};"));
    CHECK(has(said, "rank 2 gives other options than rank 0: keep_latest 5;"));
  }
  CHECK_FALSE(std::filesystem::exists(at + "/step-1"));
}

TEST_CASE("ranks that have other tensors, as stages of a pipeline, save together", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto loads = [&](bool is_named) {
    return on_ranks(4, [&](World& world) {
      const auto meshes = DeviceMesh::grid(world, {{"stage", 2}, {"rows", 2}});
      const auto mesh = std::make_shared<const DeviceMesh>(meshes["rows"]);
      const int stage = world.rank() / 2;
      const ShardSpec spec{.shape = {5, 2}, .world = 2, .rank = world.rank() % 2};
      StateDict state;
      state[is_named ? concat("stage", stage) : "stage"] =
          StateTensor(Tensor::full(spec.local_shape(), stage, f32, world.device()), spec, mesh);
      return thrown_by<ContractError>(
          [&] { checkpoint::save(at, 1, {checkpoint::part("own", state, world)}, {}, world); });
    });
  };
  for (const std::string& said : loads(false)) CHECK(has(said, "stored 2 times"));
  CHECK(checkpoint::steps_in(at).empty());
  for (const std::string& said : loads(true)) CHECK(said == "");
  CHECK(Checkpoint(at, 1).part("own")->names() == std::vector<std::string>{"stage0", "stage1"});
}

TEST_CASE("what every rank has whole but with other values is named with part and rank",
          "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(3, [&](World& world) {
    StateDict state;
    state["a"] = Tensor::full({4}, 1, f32, world.device());
    state["t"] = Tensor::full({4}, world.rank() == 2 ? 7 : 6, f32, world.device());
    try {
      checkpoint::save(at, 1, {checkpoint::part("own", state, world)}, {}, world);
    } catch (const ContractError& error) {
      return concat(error.rank(), ' ', error.what());
    }
    return std::string();
  });
  for (const std::string& said : heard) {
    CHECK(has(said, "2 checkpoint::save: 't' of part 'own' is whole on every rank"));
    CHECK(has(said, "other values on rank 2 than on rank 0; make the values alike, or give"));
  }
  CHECK(std::filesystem::is_empty(at));
}
