// Buffers of a model that is cut into units: whole on every rank, as its program leaves them.
#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/buffer.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::int64_t kBufferRows = 6, kWidth = 5;

// A layer whose function subtracts a running mean, which a training step moves.
struct Centred final : nn::Module {
  Centred() {
    register_module("layer", layer);
    register_buffer("mean", mean);
    register_buffer("calls", calls);
    register_buffer("one", one, nn::Persistent::no);
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [this](const Tensor& in) {
          const Tensor h = tanh(layer(in));
          if (is_training()) {
            const Tensor now = raw::reduce(raw::Reduction::mean, h.detach(), {0});
            mean.assign(raw::add(raw::mul(mean.value(), 0.5), raw::mul(now, 0.5)));
            calls.assign(raw::add(calls.value(), one.value()));
          }
          return h - mean.value();
        },
        x);
  }
  nn::Linear layer{kWidth, kWidth};
  nn::Buffer mean{{kWidth}, Initializer::constant(0)}, calls{{}, Initializer::constant(0), i64},
      one{{}, Initializer::constant(1), i64};
};

struct CentredStack final : nn::Module {
  explicit CentredStack(bool is_recomputed) : recomputed(is_recomputed) {
    for (int i = 0; i < 3; ++i) of.emplace_back();
    register_module("of", of);
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [this](Tensor h) {
          for (Centred& each : of) h = recomputed ? recompute(each, h) : each(h);
          return h;
        },
        x);
  }
  nn::ModuleList<Centred> of;
  bool recomputed;
};

// Parameters, buffers and a loss without training, after three steps of two micro-batches of the
// same rows on every rank: the mean of equal gradients is each of them, to the bit.
Values trained(World& world, bool recomputes, const ShardOptions* options) {
  CentredStack model(recomputes);
  if (options) {
    for (Centred& each : model.of) fully_shard(each, *options);
    fully_shard(model, *options);
  }
  nn::init(model, {7}, world.device());
  optim::SGD optimizer(model.parameters(), {.lr = 0.5, .momentum = 0.9});
  const auto rows = [&](int number) {
    return rows_of(11, number * kBufferRows, kBufferRows, kWidth, world.device());
  };
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 2; ++i) mean_square(model(rows(2 * step + i))).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Values values = full_values(model);
  for (std::size_t i = 0; const Centred& each : model.of) {
    const std::string name = std::to_string(i++);
    values["mean" + name] = each.mean.value().to_vector<float>();
    values["calls" + name] = raw::cast(each.calls.value(), f32).to_vector<float>();
  }
  const NoGradGuard values_only;
  model.eval();
  values["loss"] = mean_square(model(rows(9))).to_vector<float>();
  return values;
}

}  // namespace

TEST_CASE("buffers of units are those of one rank, moved twice where a forward is recomputed",
          "[threads]") {
  for (const bool recomputes : {false, true}) {
    const Values expected =
        on_ranks(1, [&](World& world) { return trained(world, recomputes, nullptr); })[0];
    CHECK(expected.at("calls0") == std::vector{recomputes ? 12.f : 6.f});
    for (const Reshard reshard : {Reshard::always, Reshard::never})
      for (const Offload offload : {Offload::none, Offload::cpu})
        for (const int ranks : {1, 2, 4}) {
          INFO("recompute " << recomputes << ", reshard " << reshard << ", offload "
                            << static_cast<int>(offload) << ", ranks " << ranks);
          const auto found = on_ranks(ranks, [&](World& world) {
            const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                       .reshard_after_forward = reshard,
                                       .offload = offload};
            return trained(world, recomputes, &options);
          });
          for (const Values& of_rank : found) CHECK(same_bits(of_rank, expected));
        }
  }
}

TEST_CASE("mixed precision casts no buffer", "[threads]") {
  struct Scaled final : nn::Module {
    Scaled() {
      register_module("layer", layer);
      register_buffer("third", third);
    }
    Tensor operator()(const Tensor& x) {
      return call([this](const Tensor& in) { return layer(in) * cast(third.value(), in.dtype()); },
                  x);
    }
    nn::Linear layer{kWidth, kWidth};
    nn::Buffer third{{kWidth}, Initializer::constant(1.0 / 3)};  // which bf16 rounds
  };
  const auto found = on_ranks(2, [](World& world) {
    Scaled model;
    fully_shard(model, {.mesh = DeviceMesh::flat(world), .precision = {.param = bf16}});
    nn::init(model, {7}, world.device());
    const Tensor y = model(rows_of(11, 0, kBufferRows, kWidth, world.device()));
    mean_square(y).backward();
    return std::pair(y.dtype(), model.third.value().to_vector<float>());
  });
  for (const auto& [computed, third] : found) {
    CHECK(computed == bf16);
    CHECK(third == std::vector<float>(kWidth, 1.f / 3));
  }
}
