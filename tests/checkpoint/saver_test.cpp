// Saves that training does not wait for: all that is saved is of one step, whatever comes after.
#include "tessera/checkpoint/saver.hpp"

#include <filesystem>
#include <mutex>
#include <thread>

#include "runtime/checkpoint/saving.hpp"
#include "tessera/base/log.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;
using checkpoint::Checkpoint;
using checkpoint::Saver;

namespace {

// A model of two matrices that files hold transposed, with its AdamW. All that they are tells a
// number.
class Counted {
 public:
  explicit Counted(const World& world) : world_(world) {
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    for (nn::Module* part : model_.parts()) fully_shard(*part, options);
    fully_shard(model_, options);
    model_.materialize(world.device());
    optimizer_.emplace(model_.parameters());
    optimizer_->prepare();
  }
  void set(std::int64_t number) {
    const auto value = static_cast<double>(number);
    for (Parameter p : model_.parameters()) {
      p.edit([&](const Tensor& rows) { raw::fill(rows, value); });
      raw::fill(optimizer_->moments(p)[0], -value);
      raw::fill(optimizer_->moments(p)[1], value + 0.5);
    }
    optimizer_->set_steps(number);
  }
  std::vector<checkpoint::Part> parts() {
    return {checkpoint::part(model_, world_), checkpoint::part(*optimizer_, model_, world_)};
  }
  nn::Module& model() { return model_; }

 private:
  const World& world_;
  nn::Gpt2 model_{{.dim = 6, .n_layers = 1, .n_heads = 3, .vocab_size = 7, .max_seq_len = 3}};
  std::optional<optim::AdamW> optimizer_;
};

// What of a step is not of its number; empty where all is.
std::string strange(const std::string& folder, std::int64_t step) {
  static const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Checkpoint from(folder, step);
  if (from.integer("samples") != step) return "the samples";
  if (std::get<std::int64_t>(from.scalars("optimizer").at("steps")) != step) return "the steps";
  for (const std::string& part : from.parts()) {
    const auto source = from.part(part);
    for (const std::string& name : source->names()) {
      const StateSource::Entry entry = source->entry(name);
      if (entry.dtype != f32) continue;
      const double value = name.ends_with("exp_avg")      ? -static_cast<double>(step)
                           : name.ends_with("exp_avg_sq") ? static_cast<double>(step) + 0.5
                                                          : static_cast<double>(step);
      const Shape shape(std::span<const std::int64_t>(entry.shape));
      for (const float v :
           source->rows(std::vector{name}, ShardSpec{shape, 1, 0}, false, f32, device)
               .to_vector<float>())
        if (v != static_cast<float>(value))
          return concat(part, " '", name, "' has ", v, " in step ", step);
    }
  }
  return "";
}

// Saves 1 to `count` while the next steps change everything; returns how many are not exact.
std::vector<std::string> strange_saves(const std::string& folder, int ranks,
                                       const WorldOptions& options, std::int64_t count) {
  std::vector<std::string> found;
  const RaceCheck check;
  run_local(ranks, check(options), [&](World& world) {
    Counted training(world);
    Saver saver(folder, world, {.keep_latest = 1});
    saver.prepare(training.parts());
    std::int64_t looked = 0;
    const auto look = [&] {
      if (!saver.saved() || *saver.saved() == looked) return;
      looked = *saver.saved();
      if (world.rank() > 0) return;
      if (const std::string what = strange(folder, looked); !what.empty()) found.push_back(what);
    };
    for (std::int64_t step = 1; step <= count; ++step) {
      training.set(step);
      saver.save(step, training.parts(), {{"samples", step}});
      training.set(step + count);  // at once
      look();                      // what the save has waited for
      for (int later = 0; later < step % 4; ++later) {
        saver.poll();
        look();
        training.set(step + count + later);
      }
    }
    saver.wait();
    look();
    if (world.rank() == 0 && looked != count) found.push_back("the last one is missing");
  });
  return found;
}

std::vector<std::string> logged_while(const std::function<void()>& f) {
  std::mutex mutex;
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, const std::string& line) {
    const std::lock_guard lock(mutex);
    lines.push_back(line);
  });
  f();
  set_log_sink({});
  return lines;
}

}  // namespace

TEST_CASE("saves are of one step while all values change at once", "[checkpoint][threads]") {
  const TemporaryFolder folder;
  const int saves = GridShare::stride() > 1 ? 100 : 1000;
  for (const std::string& what :
       strange_saves(folder.path().string(), 2, {.threads = 1}, saves * 7 / 10))
    FAIL_CHECK(what);
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const std::string& what :
       strange_saves(folder / "shuffled", 3, {.executor = shuffled(seed), .threads = 1},
                     saves - saves * 7 / 10))
    FAIL_CHECK(what);
}

TEST_CASE("a save of values that were not copied would be of another step", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  run_local(2, {.threads = 1}, [&](World& world) {
    Counted training(world);
    training.set(1);
    checkpoint::Saving saving(at, 1, training.parts(), {{"samples", std::int64_t{1}}}, world, {});
    training.set(2);
    checkpoint::WriteProgress progress;
    std::vector<std::byte> piece;
    saving.write(
        [&](const checkpoint::OwnBox& box, std::int64_t, std::int64_t size) {
          piece.resize(static_cast<std::size_t>(size));
          box.values().to_bytes(piece);
          return std::span<const std::byte>(piece);
        },
        progress);
    saving.exchange();
    saving.commit(progress);
  });
  CHECK(has(strange(at, 1), "has 2 in step 1"));
}

TEST_CASE("a Saver writes the bytes that save writes", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string now = folder / "now", later = folder / "later";
  const auto steps = on_ranks(3, [&](World& world) {
    Counted training(world);
    training.set(4);
    nn::init(training.model(), {.value = 3});
    checkpoint::save(now, 4, training.parts(), {{"samples", std::int64_t{4}}}, world);
    Saver saver(later, world);
    saver.save(4, training.parts(), {{"samples", std::int64_t{4}}});
    const auto begun = saver.in_flight();
    training.set(5);
    saver.wait();
    return std::vector{begun, saver.saved(), saver.in_flight()};
  });
  for (const auto& seen : steps)
    CHECK(seen == std::vector<std::optional<std::int64_t>>{4, 4, std::nullopt});
  int files = 0;
  const std::string now_id = Checkpoint(now, 4).id(), later_id = Checkpoint(later, 4).id();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(now)) {
    if (!entry.is_regular_file() || entry.path().filename() == "manifest.json") continue;
    const std::string name = std::filesystem::relative(entry.path(), folder.path() / "now");
    std::string expected = folder.read("now/" + name), found = folder.read("later/" + name);
    expected.replace(expected.find(now_id), now_id.size(), later_id);
    CHECK(expected == found);
    ++files;
  }
  CHECK(files == 6);
}

TEST_CASE("one save is in flight, and the next says what it waits for", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto lines = logged_while([&] {
    const auto saved = on_ranks(2, [&](World& world) {
      Counted training(world);
      Saver saver(at, world, {.keep_latest = 2});
      for (const std::int64_t step : {1, 2, 3}) {
        training.set(step);
        saver.save(step, training.parts(), {{"samples", step}});
      }
      const auto before = saver.saved();
      saver.wait();
      return before;
    });
    CHECK(saved == std::vector<std::optional<std::int64_t>>{2, 2});
  });
  CHECK(lines == std::vector<std::string>{"checkpoint: step 2 waits until step 1 is saved",
                                          "checkpoint: step 3 waits until step 2 is saved"});
  CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{2, 3});
}

TEST_CASE("what a Saver cannot save is one error on all ranks, and the next is saved",
          "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(3, [&](World& world) {
    Counted training(world);
    Saver saver(at, world, {.must_be_finite = true});
    training.set(1);
    training.model().parameters()[0].edit([&](const Tensor& rows) {
      if (world.rank() == 2) raw::fill(rows, std::nan(""));
    });
    saver.save(1, training.parts(), {{"samples", std::int64_t{1}}});
    const std::string not_finite = thrown_by<checkpoint::NotFinite>([&] { saver.wait(); });
    world.barrier();
    const bool is_left =
        saver.in_flight() || saver.saved() || (world.rank() == 0 && !std::filesystem::is_empty(at));
    world.barrier();
    training.set(2);
    saver.save(2, training.parts(), {{"samples", std::int64_t{2}}});
    saver.wait();
    return std::vector{not_finite,
                       thrown_by<DataError>([&] { saver.save(2, training.parts(), {}); }),
                       std::string(is_left ? "something is left" : "")};
  });
  for (const auto& said : heard) {
    CHECK(has(said[0], "is not finite, and nothing is saved"));
    CHECK(has(said[1], "step-2' exists already"));
    CHECK(said[2] == "");
  }
  CHECK(strange(at, 2) == "");
}

TEST_CASE("a Saver that ends gives up what is in flight", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto lines = logged_while([&] {
    run_local(1, {.threads = 1}, [&](World& world) {
      Counted training(world);
      training.set(1);
      Saver saver(at, world);
      saver.save(1, training.parts(), {{"samples", std::int64_t{1}}});
      saver.poll();
    });
  });
  CHECK(lines == std::vector<std::string>{"checkpoint: step 1 was being saved, and is given up"});
  CHECK(std::filesystem::is_empty(at));
}

TEST_CASE("a program's own sum is a Saver's poll", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto saved = on_ranks(3, [&](World& world) {
    Counted training(world);
    Saver saver(at, world);
    const double before = world.sum(saver.term());
    training.set(1);
    saver.save(1, training.parts(), {{"samples", std::int64_t{1}}});
    saver.poll(before);  // says nothing of this save
    const bool is_begun = saver.in_flight() == 1;
    while (saver.in_flight()) saver.poll(world.sum(saver.term()));
    return is_begun ? saver.saved() : std::nullopt;
  });
  CHECK(saved == std::vector<std::optional<std::int64_t>>(3, 1));
  CHECK(strange(at, 1) == "");
}

TEST_CASE("the memory of a Saver is booked, and planned as it is used", "[checkpoint]") {
  struct Held {
    std::int64_t live, reserved;
    bool operator==(const Held&) const = default;
  };
  const auto held_on = [](World& world) {
    Counted training(world);
    Saver saver("unused", world);
    saver.prepare(training.parts());
    Memory& host = Memory::of(world.device()).host();
    return Held{host.ledger().live_bytes("checkpoint staging"), host.reserved_bytes()};
  };
  const auto used = on_ranks(2, held_on);
  for (const int rank : {0, 1}) {
    World plan = World::emulated(rank, 2, {.executor = ExecutorKind::virtual_, .threads = 1});
    CHECK(held_on(plan) == used[static_cast<std::size_t>(rank)]);
    CHECK(used[static_cast<std::size_t>(rank)].live > 0);
  }
}

TEST_CASE("parts that were made once are saved as they are at each save", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(2, [&](World& world) {
    struct Counting : nn::Module {
      Counting() {
        register_parameter("weight", weight);
        register_buffer("calls", calls);
      }
      Parameter weight{{6, 2}, Initializer::constant(1)};
      nn::Buffer calls{Shape{}, Initializer::constant(0), i64};
    } model;
    fully_shard(model, {.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    optim::AdamW optimizer(model.parameters());
    optimizer.prepare();
    const std::vector<checkpoint::Part> parts{checkpoint::part(model, world),
                                              checkpoint::part(optimizer, model, world)};
    Saver saver(at, world);
    for (std::int64_t step = 1; step <= 4; ++step) {
      model.calls.assign(Tensor::full({}, static_cast<double>(step), i64, world.device()));
      model.weight.edit([&](const Tensor& rows) { raw::fill(rows, static_cast<double>(step)); });
      optimizer.set_steps(10 * step);
      optimizer.set_lr(static_cast<double>(step));
      if (step % 2 == 0)
        checkpoint::save(at, step, parts, {}, world);
      else
        saver.save(step, parts, {});
      saver.wait();
    }
    model.weight.freeze();
    optimizer.prepare();
    return thrown_by<ContractError>([&] { saver.save(5, parts, {}); });
  });
  for (const std::string& said : heard)
    CHECK(has(said, "part 'optimizer' was made before other tensors came into it"));
  REQUIRE(checkpoint::steps_in(at) == std::vector<std::int64_t>{1, 2, 3, 4});
  for (std::int64_t step = 1; step <= 4; ++step) {
    const Checkpoint from(at, step);
    const Device device = Device::cpu({.executor = ExecutorKind::inlined});
    const auto first = [&](const char* part, const char* name, const Shape& shape) {
      return from.part(part)
          ->rows(std::vector<std::string>{name}, ShardSpec{shape, 1, 0}, false, f32, device)
          .to_vector<float>()[0];
    };
    CHECK(first("model", "weight", {6, 2}) == static_cast<float>(step));
    CHECK(std::get<std::int64_t>(from.scalars("optimizer").at("steps")) == 10 * step);
    CHECK(std::get<double>(from.scalars("optimizer").at("lr")) == static_cast<double>(step));
    const checkpoint::WeightFiles whole(checkpoint::step_folder(at, step));
    const Tensor calls = Tensor::zeros({}, i64, device);
    whole.read(calls, std::vector<std::string>{"calls"}, ShardSpec{{}, 1, 0}, false);
    CHECK(calls.item() == static_cast<double>(step));
  }
}

TEST_CASE("a step that is in flight already is refused at once", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto lines = logged_while([&] {
    const auto heard = on_ranks(2, [&](World& world) {
      Counted training(world);
      Saver saver(at, world);
      saver.save(1, training.parts(), {});
      const std::string said =
          thrown_by<ContractError>([&] { saver.save(1, training.parts(), {}); });
      saver.wait();
      return said;
    });
    for (const std::string& said : heard) CHECK(has(said, "step 1 is being saved already"));
  });
  CHECK(lines.empty());
  CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{1});
}

TEST_CASE("a step that keep_latest removes at once is told", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto lines = logged_while([&] {
    run_local(2, {.threads = 1}, [&](World& world) {
      for (const std::int64_t step : {5, 7, 3})
        checkpoint::save(at, step, {}, {}, world, {.keep_latest = 2});
    });
  });
  CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{5, 7});
  REQUIRE(lines.size() == 1);
  CHECK(has(lines[0], "checkpoint: step 3 was saved, and removed again, since keep_latest 2"));
}

TEST_CASE("programs that keep the same folder small at once log nothing", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  constexpr std::int64_t kSteps = 60;
  run_local(1, {.threads = 1}, [&](World& world) {
    StateDict state;
    for (const char* const name : {"a", "b"})
      state[name] = Tensor::full({3}, 1, f32, world.device());
    std::vector<checkpoint::Part> parts;
    for (const char* const name : {"x", "y", "z"})
      parts.push_back(checkpoint::part(name, state, world));
    for (std::int64_t step = 1; step <= kSteps; ++step)
      checkpoint::save(at, step, parts, {}, world);
  });
  const auto lines = logged_while([&] {
    std::vector<std::jthread> programs;
    for (int i = 0; i < 4; ++i)
      programs.emplace_back([&] {
        if (const std::string said = thrown_by<Error>([&] { checkpoint::keep_newest(at, 1); });
            !said.empty())
          log(LogLevel::error, said);
      });
  });
  CHECK(lines.empty());
  CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{kSteps});
}
