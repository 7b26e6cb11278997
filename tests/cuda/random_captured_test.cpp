// Random training programs on the emulated GPU, each once with a captured step and once without:
// all that they read has the same bits. A model, a way to shard it, its optimizers and a step are
// drawn, and between the calls acts that replays go on through and acts that they must notice; what
// a captured step can't notice is followed by `forget`, or isn't drawn.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>

#include "tessera/autograd/losses.hpp"
#include "tessera/nn/buffer.hpp"
#include "tessera/nn/dropout.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/nn/norm.hpp"
#include "tessera/optim/sgd.hpp"
#include "tests/cuda/captured_job.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/mesh.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr int kCalls = 20, kVocabulary = 24, kTokens = 4, kFeatures = 12;

// Layers whose running mean a step writes.
struct Dense final : nn::Module {
  Dense(double dropout, bool is_recomputed) : drop(dropout), recomputed(is_recomputed) {
    register_modules("up", up, "norm", norm, "drop", drop, "down", down);
    register_buffer("mean", mean);
  }
  Tensor operator()(const Tensor& x) {
    return call(
        [this](const Tensor& in) {
          const auto hidden = [this](const Tensor& h) { return drop(norm(gelu(up(h)))); };
          const Tensor h = recomputed ? recompute(hidden, in) : hidden(in);
          const Tensor now = raw::reduce(raw::Reduction::mean, h.detach(), {0});
          if (is_training()) mean.assign(raw::add(raw::mul(mean.value(), 0.9), raw::mul(now, 0.1)));
          return down(h - mean.value());
        },
        x);
  }
  nn::Linear up{kFeatures, 20};
  nn::LayerNorm norm{20};
  nn::Dropout drop;
  nn::Linear down{20, kFeatures};
  nn::Buffer mean{{20}, Initializer::constant(0)};
  bool recomputed;
};

struct DrawnModel {
  std::unique_ptr<nn::Module> module;
  std::vector<nn::Module*> parts;
  std::function<Tensor(const Tensor&, const Tensor&)> loss;
  bool reads_tokens = true;
};

DrawnModel make_model(Dice& dice) {
  const double dropout = dice.of({0.0, 0.2});
  const bool recomputes = dice.once_in(2), ties = dice.once_in(2);
  const nn::Recompute recompute = recomputes ? nn::Recompute::blocks : nn::Recompute::none;
  const nn::LossOrder order = dice.once_in(2) ? nn::LossOrder{} : nn::LossOrder{.gradient = 1.0};
  const auto trained = [&](auto model) {
    auto* const m = model.get();
    const auto loss = [m, order](const Tensor& x, const Tensor& y) { return m->loss(x, y, order); };
    return DrawnModel{std::move(model), m->parts(), loss};
  };
  switch (dice.below(3)) {
    case 0: {
      auto model = std::make_unique<Dense>(dropout, recomputes);
      Dense* const m = model.get();
      const auto loss = [m](const Tensor& x, const Tensor& y) { return mse_loss((*m)(x), y); };
      return {std::move(model), {&m->up, &m->down}, loss, false};
    }
    case 1:
      return trained(std::make_unique<nn::Gpt2>(nn::Gpt2Config{.dim = 16,
                                                               .n_layers = 2,
                                                               .n_heads = 2,
                                                               .vocab_size = kVocabulary,
                                                               .max_seq_len = kTokens,
                                                               .dropout = dropout,
                                                               .tie_embeddings = ties,
                                                               .recompute = recompute}));
    default:
      return trained(std::make_unique<nn::Llama>(nn::LlamaConfig{
          .dim = 16,
          .n_layers = 2,
          .n_heads = 2,
          .n_kv_heads = 1,
          .vocab_size = kVocabulary,
          .max_seq_len = kTokens,
          .tie_embeddings = ties,
          .projections = dice.of({nn::Projections::fused, nn::Projections::separate}),
          .recompute = recompute}));
  }
}

// Ranks that are threads can't capture: several are an emulated world.
World make_world(Dice& dice) {
  const WorldOptions options = on_gpu(dice.of({CudaMemory::pieces, CudaMemory::mapped}));
  const int ranks = 1 + dice.below(4);
  return ranks == 1 ? World::single(options) : World::emulated(dice.below(ranks), ranks, options);
}

class Training {
 public:
  Training(std::uint64_t seed, bool captures)
      : seed_(seed),
        captures_(captures),
        dice_(seed),
        world_(make_world(dice_)),
        device_(world_.device()),
        model_(make_model(dice_)) {
    autograd::random_state() = {.seed = seed};
    if (dice_.once_in(3)) Memory::of(device_).poison_freed();
    shard();
    model().materialize(device_);
    nn::init(model(), {seed});
    parameters_ = model().parameters();
    const bool are_two = dice_.once_in(3);
    std::vector<Parameter> of[2];
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      of[are_two ? i % 2 : 0].push_back(parameters_[i]);
    for (const auto& some : of)
      if (!some.empty()) optimizers_.push_back(make_optimizer(some));
    micro_batches_ = dice_.of({1, 2});
    reduces_last_ = is_sharded_ && dice_.once_in(2);
    skips_ = is_sharded_ && dice_.once_in(3);
    clips_ = dice_.once_in(2);
    norm_ = dice_.of({optim::NormType::l1, optim::NormType::l2, optim::NormType::inf});
    clip_ = dice_.of({optim::Clip::in_optimizer, optim::Clip::in_place});
    keeps_gradients_ = dice_.once_in(3);
    begin_captures();
  }

  // All that the program has read.
  std::vector<float> run() {
    for (int k = 0; k < kCalls; ++k) {
      while (dice_.once_in(4)) act(k);
      call(step_, [this](const auto& in) { return step(in); }, batch(k, 4));
      has_gradients_ = keeps_gradients_;
    }
    replays_ += step_->replays();
    for (const Parameter& p : parameters_) read(p.shard());
    for (const auto& optimizer : optimizers_)
      for (const auto& [name, entry] : optimizer->state_dict(model())) read(entry.values);
    all_.push_back(static_cast<float>(autograd::random_state().draws));
    return all_;
  }
  std::int64_t replays() const { return replays_; }

 private:
  using Captured = std::unique_ptr<CapturedStep>;

  nn::Module& model() const { return *model_.module; }

  void shard() {
    is_sharded_ = !dice_.once_in(4);
    const DType param = model_.reads_tokens ? dice_.of({f32, bf16, f16}) : f32;
    const int replicas = world_.size() == 4 ? 1 + dice_.below(2) : 1;
    const ShardOptions options{
        .mesh = mesh_of(world_, replicas),
        .precision = {.param = param, .reduce = param == f16 ? f16 : f32},
        .reshard_after_forward = dice_.of({Reshard::automatic, Reshard::always, Reshard::never}),
        .prefetch_depth = 1 + dice_.below(2),
        .reductions_in_flight = 1 + dice_.below(2)};
    const bool has_units = dice_.once_in(2);
    if (!is_sharded_) return;
    for (nn::Module* const part : model_.parts)
      if (has_units) fully_shard(*part, options);
    fully_shard(model(), options);
  }

  std::unique_ptr<optim::Optimizer> make_optimizer(const std::vector<Parameter>& some) {
    const auto [matrices, others] = optim::split_for_muon(some);
    const bool option = dice_.once_in(2);
    const int rule = dice_.below(3);
    if (rule == 0)
      return std::make_unique<optim::SGD>(
          some, optim::SGDOptions{.lr = 0.05, .momentum = option ? 0.9 : 0, .weight_decay = 0.01});
    if (rule == 1 || matrices.empty()) return std::make_unique<optim::AdamW>(some);
    return std::make_unique<optim::Muon>(matrices, others,
                                         optim::MuonOptions{.lr = 0.02, .nesterov = option});
  }

  void begin_captures() {
    if (step_) replays_ += step_->replays();
    step_ = std::make_unique<CapturedStep>(device_, [this](const auto& in) { return step(in); });
    other_ = std::make_unique<CapturedStep>(device_, [this](const auto& in) { return step(in); });
    backward_ =
        std::make_unique<CapturedStep>(device_, [this](const auto& in) { return backward(in); });
  }

  std::vector<Tensor> batch(int number, std::int64_t rows) const {
    std::mt19937_64 draw(seed_ * 31 + static_cast<std::uint64_t>(number));
    const auto drawn = [&]() -> Tensor {
      if (!model_.reads_tokens) {
        std::vector<float> x(static_cast<std::size_t>(rows * kFeatures));
        for (float& v : x) v = static_cast<float>(draw() % 2001) / 1000 - 1;
        return Tensor::from(x, {rows, kFeatures}, device_);
      }
      std::vector<std::int32_t> x(static_cast<std::size_t>(rows * kTokens));
      for (auto& id : x) id = static_cast<std::int32_t>(draw() % kVocabulary);
      return Tensor::from(x, {rows, kTokens}, device_);
    };
    const Tensor first = drawn();
    return {first, drawn()};
  }

  std::vector<Tensor> step(const std::vector<Tensor>& batch) {
    if (keeps_gradients_) zero_gradients();
    Tensor total;
    const std::int64_t rows = batch[0].size(0) / micro_batches_;
    for (int i = 0; i < micro_batches_; ++i) {
      if (reduces_last_) set_requires_gradient_sync(model(), i + 1 == micro_batches_);
      const auto part = [&](const Tensor& x) { return raw::slice(x, 0, i * rows, (i + 1) * rows); };
      const Tensor loss = model_.loss(part(batch[0]), part(batch[1]));
      const bool skips = skips_ && i + 1 < micro_batches_;
      skips ? skip_backward(loss) : loss.backward();
      total = total.defined() ? raw::add(total, loss.detach()) : loss.detach();
      if (throws_) throw std::runtime_error("of the program's own");
    }
    std::vector out{total};
    if (clips_) out.push_back(optim::clip_grad_norm(parameters_, 0.5, norm_, clip_));
    for (const auto& optimizer : optimizers_) optimizer->step();
    if (!keeps_gradients_) zero_gradients();
    return out;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& batch) {
    const Tensor loss = model_.loss(batch[0], batch[1]);
    loss.backward();
    return {loss.detach()};
  }
  void zero_gradients() {
    for (const auto& optimizer : optimizers_) optimizer->zero_grad();
  }

  void call(const Captured& captured, const CapturedStep::Function& function,
            const std::vector<Tensor>& in) {
    const auto outputs = captures_ ? (*captured)(in) : function(in);
    if (dice_.once_in(4)) return;  // the host runs ahead
    for (const Tensor& out : outputs) read(out);
  }
  void read(const Tensor& t) {
    for (const float x : raw::cast(t, f32).to_vector<float>()) all_.push_back(x);
  }

  // What a program may do between two calls. Only without gradients does it load or freeze.
  void act(int k);
  void fail(int k);

  std::uint64_t seed_;
  bool captures_;
  Dice dice_;
  World world_;
  Device device_;
  DrawnModel model_;
  std::vector<Parameter> parameters_;
  std::vector<std::unique_ptr<optim::Optimizer>> optimizers_;
  Captured step_, other_, backward_;
  int micro_batches_ = 1;
  optim::Clip clip_ = optim::Clip::in_place;
  optim::NormType norm_ = optim::NormType::l2;
  bool is_sharded_ = true, reduces_last_ = false, skips_ = false, clips_ = false;
  bool keeps_gradients_ = false;
  bool has_gradients_ = false, throws_ = false;
  Parameter frozen_;
  StateDict saved_;
  std::vector<Tensor> held_;
  std::vector<float> all_;
  std::int64_t replays_ = 0;
};

void Training::act(int k) {
  optim::Optimizer& optimizer = *dice_.of(optimizers_);
  Parameter some = dice_.of(parameters_);
  const int number = dice_.below(1000);
  switch (dice_.below(20)) {
    case 0:
      return optimizer.set_lr(1e-5 * number);
    case 1:
      return optimizer.set_weight_decay({optimizer.parameters()[0]}, 1e-4 * number);
    case 2:
      return optimizer.set_lr_factor({optimizer.parameters().back()}, 1e-3 * number);
    case 3:
      if (has_gradients_) return;
      if (frozen_.defined()) return std::exchange(frozen_, {}).set_trainable(true);
      frozen_ = some;
      return some.set_trainable(false);
    case 4: {
      const NoGradGuard values_only;
      model().eval();
      const auto in = batch(900 + k, 2);
      read(model_.loss(in[0], in[1]));
      model().train();
      return;
    }
    case 5:
      saved_ = model().state_dict();
      return;
    case 6:
      if (!has_gradients_ && !saved_.empty()) model().load(saved_);
      return;
    case 7:
      has_gradients_ = false;
      return zero_gradients();
    case 8:
      read(step(batch(300 + k, 4))[0]);
      has_gradients_ = keeps_gradients_;
      return;
    case 9:
      return held_.push_back(Tensor::full({1 + 7 * number}, k, f32, device_));
    case 10:
      return held_.clear();
    case 11:
      return some.edit([](const Tensor& rows) { raw::axpby(rows, rows, 0, 0.97); });
    case 12:
      if (is_sharded_) unshard(model()), reshard(model());
      return;
    case 13:
      return optimizer.set_steps(optimizer.steps() + 3);
    case 14: {
      autograd::RandomState& state = autograd::random_state();
      (number % 2 ? state.draws : state.seed) += 5;
      return;
    }
    case 15:  // of other shapes
      call(other_, [this](const auto& in) { return step(in); }, batch(500 + k, 2));
      has_gradients_ = keeps_gradients_;
      return;
    case 16:
      call(backward_, [this](const auto& in) { return backward(in); }, batch(600 + k, 2));
      has_gradients_ = true;
      return;
    case 17:
      return fail(k);
    case 18:
      return number % 2 ? begin_captures() : step_->forget();
    default:
      if (is_sharded_ && !has_gradients_)
        set_reshard_after_forward(model(), number % 2 ? Reshard::always : Reshard::never);
  }
}

// An exception in the step, which only `forget` lets a captured one come to.
void Training::fail(int k) {
  const auto before = autograd::random_state();
  step_->forget();
  throws_ = true;
  try {
    call(step_, [this](const auto& in) { return step(in); }, batch(k, 4));
  } catch (const std::runtime_error&) {
    all_.push_back(-1);
  }
  throws_ = false;
  if (is_sharded_) {
    reset(model());
    set_requires_gradient_sync(model(), true);
  }
  zero_gradients();
  has_gradients_ = false;
  autograd::random_state() = before;
}

}  // namespace

TEST_CASE("random captured programs have the bits of the same programs without a capture",
          "[threads][captured_programs]") {
  const std::uint64_t programs = std::max<std::uint64_t>(1, 2000 / stride()), first = fresh_seed();
  std::int64_t replays = 0;
  for (std::uint64_t seed = first; seed < first + programs; ++seed) {
    INFO("seed " << seed);
    const auto expected = Training(seed, false).run();
    Training captured(seed, true);
    CHECK(same_bits(captured.run(), expected));
    replays += captured.replays();
  }
  CHECK(replays > static_cast<std::int64_t>(programs));
}
