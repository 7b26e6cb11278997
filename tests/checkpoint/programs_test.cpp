// Random programs that save and go on: state of their own in any layout, a model and its optimizer,
// at once or later, with parts that are kept or made anew, and values that change right after. What
// is there in the end gives each rank of any other number the bits of its step.
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/saver.hpp"
#include "tessera/comm/mesh.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr int kMostProgramRanks = 5;

// A tensor of a program's own.
struct ProgramTensor {
  std::string part, name;
  Shape shape{};
  DType dtype = f32;
  bool is_cut = false;  // over a mesh of so many replicas; else whole on every rank
  int dim = 0, replicas = 1;
  std::int64_t block_rows = 0;

  // All of it after a step: small integers, which each dtype has.
  Tensor values(std::int64_t step, const Device& device) const {
    std::vector<float> all(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = static_cast<float>((static_cast<std::size_t>(step) * 37 + name.size() * 11 +
                                   static_cast<std::size_t>(name.back()) * 5 + i * 7) %
                                  251);
    return raw::cast(Tensor::from(all, shape, device), dtype);
  }
};

struct Program {
  int savers = 1, loaders = 1, saves = 3;
  bool is_later = false, keeps_parts = false, has_model = false;
  std::int64_t keep_latest = 0;
  std::vector<ProgramTensor> tensors{};

  explicit Program(std::uint64_t seed) {
    Dice dice(seed);
    savers = 1 + dice.below(kMostProgramRanks);
    loaders = 1 + dice.below(kMostProgramRanks);
    saves = 1 + dice.below(4);
    is_later = dice.once_in(2);
    keeps_parts = dice.once_in(2);
    has_model = dice.once_in(2);
    keep_latest = dice.below(3);
    for (int i = 0, count = 1 + dice.below(6); i < count; ++i) {
      ProgramTensor t{.part = dice.of({"ema", "other state"}), .name = concat("t.", i)};
      std::vector<std::int64_t> sizes(static_cast<std::size_t>(dice.below(4)));
      for (std::int64_t& size : sizes) size = dice.once_in(8) ? 0 : 1 + dice.below(7);
      t.dtype = dice.of({f32, bf16, f64, i64, i32});
      t.is_cut = !sizes.empty() && dice.once_in(2);
      if (t.is_cut && dice.once_in(2)) t.replicas = 1 + dice.below(savers);
      while (savers % t.replicas != 0) ++t.replicas;
      if (t.is_cut && sizes.size() > 1 && dice.once_in(3)) {
        t.dim = 1;
        sizes[1] = (1 + dice.below(3)) * (savers / t.replicas);  // such a cut is even
      } else if (dice.once_in(3)) {
        t.block_rows = 1 + dice.below(4);
      }
      t.shape = Shape(std::span<const std::int64_t>(sizes));
      tensors.push_back(t);
    }
  }
};

struct ProgramModel : nn::Module {
  ProgramModel() {
    register_parameter("weight", weight);
    register_buffer("calls", calls);
  }
  Parameter weight{{7, 3}, Initializer::constant(0)};
  nn::Buffer calls{Shape{2}, Initializer::constant(0), f32};
};

// What one rank of a program does.
void run_program(const Program& program, std::uint64_t seed, const std::string& folder,
                 const World& world) {
  Dice dice(seed + 1);  // the same on every rank
  StateDict own;
  const auto assign = [&](std::int64_t step) {
    for (const ProgramTensor& t : program.tensors) {
      const StateTensor& entry = own.at(t.part + '/' + t.name);
      const Tensor all = t.values(step, world.device());
      const RowRange rows = t.is_cut ? entry.spec.owned() : RowRange{};
      raw::copy_into(entry.values, t.is_cut ? raw::slice(all, t.dim, rows.begin, rows.end) : all);
    }
  };
  for (const ProgramTensor& t : program.tensors) {
    StateTensor entry(Tensor::zeros(t.shape, t.dtype, world.device()));
    if (t.is_cut) {
      const auto mesh = std::make_shared<const DeviceMesh>(
          DeviceMesh::hybrid(world, {t.replicas, world.size() / t.replicas}));
      const ShardSpec spec{.shape = t.shape,
                           .world = mesh->shard_size(),
                           .rank = mesh->shard_rank(),
                           .block_rows = t.block_rows,
                           .dim = t.dim};
      entry = {Tensor::zeros(spec.local_shape(), t.dtype, world.device()), spec, mesh};
    }
    own.emplace(t.part + '/' + t.name, entry);
  }
  ProgramModel model;
  fully_shard(model, {.mesh = DeviceMesh::flat(world)});
  model.materialize(world.device());
  optim::AdamW optimizer(model.parameters());
  optimizer.prepare();
  const auto train = [&](std::int64_t step) {
    assign(step);
    const auto value = static_cast<double>(step);
    model.weight.edit([&](const Tensor& rows) { raw::fill(rows, value); });
    for (const Tensor& moment : optimizer.moments(model.weight)) raw::fill(moment, value);
    model.calls.assign(Tensor::full({2}, value, f32, world.device()));
    optimizer.set_steps(step);
    optimizer.set_lr(value);
  };
  const auto make = [&] {
    std::map<std::string, StateDict> dicts;
    for (const ProgramTensor& t : program.tensors)
      dicts[t.part].emplace(t.name, own.at(t.part + '/' + t.name));
    std::vector<checkpoint::Part> parts;
    for (const auto& [name, state] : dicts) parts.push_back(checkpoint::part(name, state, world));
    if (!program.has_model) return parts;
    parts.push_back(checkpoint::part(model, world));
    parts.push_back(checkpoint::part(optimizer, model, world));
    return parts;
  };
  const checkpoint::CheckpointOptions options{.keep_latest = program.keep_latest};
  checkpoint::Saver saver(folder, world, options);
  const std::vector<checkpoint::Part> kept = make();
  for (std::int64_t step = 1; step <= program.saves; ++step) {
    train(step);
    const checkpoint::Scalars scalars{{"samples", step}};
    const auto& parts = program.keeps_parts ? kept : make();
    if (program.is_later)
      saver.save(step, parts, scalars);
    else
      checkpoint::save(folder, step, parts, scalars, world, options);
    train(step + 100);  // at once
    for (int polls = dice.below(3); polls > 0; --polls) saver.poll();
  }
  saver.wait();
}

// Why a rank of others does not have what was saved as this step; empty where it does.
std::string complaint(const Program& program, const std::string& folder, std::int64_t step,
                      int rank) {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const checkpoint::Checkpoint from(folder, step);
  if (from.integer("samples") != step) return "the samples";
  const auto differs = [&](const std::string& part, const std::string& name, const Tensor& all) {
    const ShardSpec spec{all.shape(), all.shape().ndim() > 0 ? program.loaders : 1,
                         all.shape().ndim() > 0 ? rank : 0};
    const RowRange rows = spec.owned();
    const Tensor wanted = all.shape().ndim() > 0 ? raw::slice(all, 0, rows.begin, rows.end) : all;
    const Tensor found = from.part(part)->rows(std::vector{name}, spec, false, all.dtype(), device);
    std::vector<std::byte> a(static_cast<std::size_t>(wanted.numel()) * size_bytes(all.dtype())),
        b = a;
    raw::contiguous(wanted).to_bytes(a);
    found.to_bytes(b);
    return a != b;
  };
  for (const ProgramTensor& t : program.tensors)
    if (differs(t.part, t.name, t.values(step, device))) return t.name;
  if (!program.has_model) return "";
  const auto value = static_cast<double>(step);
  const Tensor weight = Tensor::full({7, 3}, value, f32, device);
  if (differs("model", "weight", weight)) return "weight";
  if (differs("model", "calls", Tensor::full({2}, value, f32, device))) return "calls";
  for (const char* const name : {"weight.exp_avg", "weight.exp_avg_sq"})
    if (differs("optimizer", name, weight)) return name;
  const checkpoint::Scalars& scalars = from.scalars("optimizer");
  if (std::get<std::int64_t>(scalars.at("steps")) != step) return "steps";
  return std::get<double>(scalars.at("lr")) == value ? "" : "lr";
}

}  // namespace

TEST_CASE("random programs find what they have saved, on any number of ranks") {
  GridShare share;
  const std::uint64_t base = fresh_seed();
  for (std::uint64_t i = 0; i < 240; ++i) {
    if (!share.takes()) continue;
    const Program program(base + i);
    INFO("seed " << base << ", program " << i << ": " << program.savers << " ranks, then "
                 << program.loaders);
    const TemporaryFolder folder;
    const std::string at = folder.path().string();
    run_local(program.savers, {.threads = 1},
              [&](World& world) { run_program(program, base + i, at, world); });
    const std::vector<std::int64_t> steps = checkpoint::steps_in(at);
    const std::int64_t kept = program.keep_latest == 0
                                  ? program.saves
                                  : std::min<std::int64_t>(program.keep_latest, program.saves);
    CHECK(std::ssize(steps) == kept);
    for (const std::int64_t step : steps)
      for (int rank = 0; rank < program.loaders; ++rank) {
        INFO("step " << step << ", rank " << rank);
        CHECK(complaint(program, at, step, rank) == "");
      }
  }
}
