// Checkpoints of N ranks that M ranks load, each of 1 to 8, in layouts that are drawn for either
// side: the bits of weights and moments.
#include "tessera/base/philox.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/muon.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr int kMostRanks = 8;

// What both sides have in common.
struct GridModel {
  bool gpt2 = false, tied = false, freezes = false;
  int optimizer = 0;  // AdamW, SGD, Muon, Keeper
};
// What each side has of its own.
struct GridLayout {
  bool fused = false, columns = false, offload = false, ignores = false;
  int replicas = 1;
  std::int64_t slice_bytes = 0, block_rows = 0;
};

// Parameters of odd shapes: none of 1 to 8 ranks but 1 divides the rows of `ragged`, most have none
// of `few`, and any number divides the columns of `wide`.
class OddParts final : public nn::Module {
 public:
  explicit OddParts(const GridModel& of, std::int64_t block_rows) {
    register_parameter("scalar", scalar);
    register_parameter("empty", empty);
    register_parameter("few", few);
    register_parameter("ragged", ragged);
    register_parameter("wide", wide);
    register_parameter("frozen16", frozen16);
    register_parameter("frozen8", frozen8);
    ragged.set_block_rows(block_rows);
    if (!of.freezes) return;
    for (const Parameter& p : {frozen16, frozen8}) p.freeze();
    frozen16.set_dtype(bf16);
    frozen8.set_dtype(e4m3);
  }
  Parameter scalar{{}, Initializer::normal(0.5, 0.1)}, empty{{0, 3}, Initializer::normal(0, 1)},
      few{{3}, Initializer::normal(0, 1)}, ragged{{11, 3}, Initializer::normal(0, 1)},
      wide{{2, 840}, Initializer::normal(0, 1)}, frozen16{{5, 3}, Initializer::normal(0, 1)},
      frozen8{{9, 2}, Initializer::normal(0, 1)};
};

// Keeps state of several shapes, and updates nothing.
class Keeper final : public optim::Optimizer {
 public:
  explicit Keeper(const std::vector<Parameter>& parameters) : Optimizer(parameters, 0, 0, {}) {}

  std::vector<optim::StateShape> states_of(const Parameter& of) const override {
    using Cut = optim::StateShape::Cut;
    const Shape& shape = of.shape();
    std::vector<optim::StateShape> states{{"same", shape}, {"other", {2, 3}, Cut::whole}};
    for (int d = 0; d < shape.ndim() && shape.ndim() > 1; ++d)
      states.push_back(
          {concat("without_", d), shape.with(d, 1), d == of.spec().dim ? Cut::whole : Cut::rows});
    return states;
  }
  // Random values, the same for any layout.
  void draw(std::uint64_t seed) {
    for (const Parameter& p : parameters())
      for (const optim::StateShape& declared : states_of(p)) {
        const Tensor own = state(p, declared.name);
        if (!own.defined()) continue;
        const Tensor whole = Tensor::uniform(
            declared.shape, -1, 1, fnv1a(concat(p.name(), declared.name), seed), f32, own.device());
        ShardSpec spec = p.spec();
        spec.shape = declared.shape;
        raw::copy_into(
            own, declared.cut == optim::StateShape::Cut::whole ? whole : rows_of(whole, spec));
      }
  }

 private:
  void write_scalars(const Tensor&, std::int64_t) const override {}
  void update(const GroupState&, const Tensor&) const override {}
};

class GridRun final : public nn::Module {
 public:
  GridRun(const GridModel& of, const GridLayout& in, const World& world, std::uint64_t seed)
      : odd_(of, in.block_rows) {
    if (of.gpt2)
      net_ = std::make_unique<nn::Gpt2>(
          nn::Gpt2Config{.dim = 6, .n_layers = 1, .n_heads = 3, .vocab_size = 11});
    else
      net_ = std::make_unique<nn::Llama>(nn::LlamaConfig{
          .dim = 8,
          .n_layers = 1,
          .n_heads = 2,
          .n_kv_heads = 1,
          .ffn_dim = 5,
          .vocab_size = 11,
          .tie_embeddings = of.tied,
          .projections = in.fused ? nn::Projections::fused : nn::Projections::separate});
    register_module("net", *net_);
    register_module("odd", odd_);
    ShardOptions options{
        .mesh = in.replicas > 1
                    ? DeviceMesh::hybrid(world, {in.replicas, world.size() / in.replicas})
                    : DeviceMesh::flat(world),
        .slice_bytes = in.slice_bytes,
        .offload = in.offload ? Offload::cpu : Offload::none,
        .shard_placement_fn = [columns = in.columns,
                               ranks = world.size() / in.replicas](const Parameter& p) {
          const bool fits = p.shape().ndim() == 2 && p.shape()[1] % ranks == 0 && p.shape()[0] > 0;
          return Shard{columns && fits && !p.is_streamed() ? 1 : 0};
        }};
    if (in.block_rows > 0) options.shard_placement_fn = nullptr;
    for (nn::Module* const part : net_->parts()) fully_shard(*part, options);
    if (in.ignores) options.ignored = {odd_.few};
    fully_shard(odd_, options);
    fully_shard(*this, options);
    materialize(world.device());
    nn::init(*this, {seed});
    if (of.optimizer == 0) optimizer_ = std::make_unique<optim::AdamW>(parameters());
    if (of.optimizer == 1)
      optimizer_ = std::make_unique<optim::SGD>(parameters(), optim::SGDOptions{.momentum = 0.9});
    if (of.optimizer == 2) {
      const optim::MuonSplit split = optim::split_for_muon(parameters());
      optimizer_ = std::make_unique<optim::Muon>(split.matrices, split.others);
    }
    if (of.optimizer == 3) optimizer_ = std::make_unique<Keeper>(parameters());
    optimizer_->prepare();
    if (auto* const keeper = dynamic_cast<Keeper*>(optimizer_.get())) keeper->draw(seed);
    for (const Parameter& p : parameters())
      for (std::size_t k = 0; k < optimizer_->moments(p).size(); ++k)
        raw::copy_into(optimizer_->moments(p)[k],
                       k == 0 ? raw::neg(p.shard()) : raw::mul(p.shard(), p.shard()));
    optimizer_->set_steps(static_cast<std::int64_t>(seed % 1000));
    optimizer_->set_lr(1e-3 * static_cast<double>(1 + seed % 7));
  }

  // Weights and moments, whole, under the names that files have.
  Values everything() {
    Values all{{"steps", {static_cast<float>(optimizer_->steps())}},
               {"lr", {static_cast<float>(optimizer_->lr())}}};
    const Values full = full_values(*this);
    for (const auto& [name, p] : named_parameters()) {
      add(all, name, "", p, full.at(name));
      const auto own = optimizer_->moments(p);
      for (std::size_t k = 0; k < own.size(); ++k)
        add(all, name, concat('.', k), p,
            (p.mesh() ? optimizer_->distributed_moments(p)[k].full() : own[k]).to_vector<float>());
    }
    if (dynamic_cast<Keeper*>(optimizer_.get()))
      for (const auto& [name, state] : optimizer_->state_dict(*this, {.form = StateForm::full}))
        if (state.values.dtype() == f32) all["state " + name] = state.values.to_vector<float>();
    return all;
  }
  void save(const std::string& folder, const World& world) {
    checkpoint::save(folder, 3,
                     {checkpoint::part(*this, world), checkpoint::part(*optimizer_, *this, world)},
                     {}, world);
  }
  void load(const std::string& folder, const World& world) {
    const checkpoint::Checkpoint from(folder, 3);
    nn::Module::load(*from.part("model"));
    optimizer_->load(*this, *from.part("optimizer"));
    world.barrier();
  }

 private:
  static void add(Values& all, const std::string& name, const std::string& suffix,
                  const Parameter& p, const std::vector<float>& values) {
    const std::int64_t rows = p.shape().ndim() > 0 ? p.shape()[0] : 1;
    auto at = values.begin();
    for (const auto& [part, own] : named_row_parts(name, p)) {
      const auto end = at + (rows == 0 ? 0 : std::ssize(values) / rows * own);
      all[part + suffix] = {at, end};
      at = end;
    }
  }

  std::unique_ptr<nn::LanguageModel> net_;
  OddParts odd_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

GridLayout drawn(Dice& dice, const GridModel& of, int ranks) {
  GridLayout layout{.fused = dice.once_in(2), .columns = dice.once_in(3)};
  // Muon refuses matrices on the host, and stacked ones that are cut along their columns.
  layout.offload = of.optimizer != 2 && dice.once_in(4);
  if (of.optimizer == 2 && layout.columns) layout.fused = false;
  layout.ignores = !layout.offload && dice.once_in(4);
  layout.slice_bytes = dice.once_in(3) ? 64 : 0;
  if (dice.once_in(2)) layout.replicas = 1 + dice.below(ranks);
  while (ranks % layout.replicas != 0) ++layout.replicas;
  if (!layout.columns && dice.once_in(2)) layout.block_rows = 1 + dice.below(5);
  return layout;
}

std::string layout_text(const GridLayout& layout, int ranks) {
  return concat(ranks, " ranks, fused ", layout.fused, ", columns ", layout.columns, ", offload ",
                layout.offload, ", ignores ", layout.ignores, ", replicas ", layout.replicas,
                ", slices of ", layout.slice_bytes, ", blocks of ", layout.block_rows);
}

}  // namespace

TEST_CASE("what N ranks save M ranks load to the bit, of 1 to 8 and in any layout") {
  GridShare share;
  std::uint64_t cell = 0;
  for (int savers = 1; savers <= kMostRanks; ++savers)
    for (int loaders = 1; loaders <= kMostRanks; ++loaders)
      for (int optimizer = 0; optimizer < 4; ++optimizer) {
        ++cell;
        if (!share.takes()) continue;
        const std::uint64_t seed = derived_seed("checkpoint grid", cell);
        Dice dice(seed);
        GridModel of{.gpt2 = dice.once_in(3), .optimizer = optimizer};
        of.tied = dice.once_in(2);
        of.freezes = dice.once_in(2);
        const GridLayout from = drawn(dice, of, savers);
        GridLayout into = drawn(dice, of, loaders);
        // A state that has not the rows of a stack is of the whole stack.
        if (optimizer == 3) into.fused = from.fused;
        INFO("cell " << cell << ", seed " << seed << ", gpt2 " << of.gpt2 << ", tied " << of.tied
                     << ", freezes " << of.freezes << ", optimizer " << optimizer << ": from "
                     << layout_text(from, savers) << "; into " << layout_text(into, loaders));
        const TemporaryFolder folder;
        const std::string at = folder.path().string();
        const Values expected = on_ranks(savers, [&](World& world) {
          GridRun run(of, from, world, seed);
          run.save(at, world);
          return run.everything();
        })[0];
        const auto found = on_ranks(loaders, [&](World& world) {
          GridRun run(of, into, world, seed + 1);
          run.load(at, world);
          return run.everything();
        });
        for (const Values& values : found) CHECK(same_bits(values, expected));
      }
}
