// A model, its optimizer and a step over them, which may be captured; and what a program may do
// between two calls of that step.
#pragma once

#include <functional>
#include <random>

#include "tessera/autograd/captured_step.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/state.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/reset.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/cuda/support.hpp"
#include "tests/shard/support.hpp"

namespace tessera::testing {

enum class Rule { adamw, muon };

struct Setting {
  Rule rule = Rule::adamw;
  bool recomputes = false;
  int micro_batches = 1;
  Reshard reshard = Reshard::automatic;
  DType param = f32;
  int ranks = 1;  // of an emulated world; this is rank 0
};

// A model, its optimizer and a step over them, captured or not.
struct Job {
  Job(World& world, const Setting& setting, std::uint64_t seed)
      : device(world.device()),
        setting(setting),
        model({.dim = 16,
               .n_layers = 2,
               .n_heads = 2,
               .vocab_size = 24,
               .max_seq_len = 8,
               .dropout = 0.2,
               .recompute = setting.recomputes ? nn::Recompute::blocks : nn::Recompute::none},
              Device::meta()) {
    const ShardOptions options{.mesh = DeviceMesh::flat(world),
                               .precision = {.param = setting.param, .reduce = f32},
                               .reshard_after_forward = setting.reshard};
    for (nn::Module* const part : model.parts()) fully_shard(*part, options);
    fully_shard(model, options);
    model.materialize(device);
    nn::init(model, nn::Seed{seed});
    const auto parameters = model.parameters();
    if (setting.rule == Rule::adamw)
      optimizer = std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.lr = 1e-2});
    else {
      const auto [matrices, others] = optim::split_for_muon(parameters);
      optimizer = std::make_unique<optim::Muon>(matrices, others, optim::MuonOptions{});
    }
    autograd::random_state() = {.seed = seed};
  }

  std::vector<Tensor> step(const std::vector<Tensor>& batch) {
    Tensor total;
    for (int micro = 0; micro < setting.micro_batches; ++micro) {
      autograd::random_state().first_row = 2 * micro;
      const Tensor loss =
          model.loss(batch[0], batch[1]) / static_cast<double>(setting.micro_batches);
      const NoGradGuard values_only;
      total = total.defined() ? raw::add(total, loss.detach()) : loss.detach();
      loss.backward();
    }
    autograd::random_state().first_row.reset();
    const Tensor norm = optim::clip_grad_norm(model.parameters(), 1.0, optim::NormType::l2,
                                              optim::Clip::in_optimizer);
    optimizer->step();
    optimizer->zero_grad();
    return {total, norm};
  }

  std::vector<Tensor> batch(std::uint64_t number) const {
    std::mt19937_64 draw(number);
    const auto tokens = [&] {
      std::vector<std::int32_t> ids(16);
      for (auto& id : ids) id = static_cast<std::int32_t>(draw() % 24);
      return Tensor::from(ids, {2, 8}, device);
    };
    return {tokens(), tokens()};
  }

  float evaluate(std::uint64_t number) {
    const NoGradGuard values_only;
    model.eval();
    const auto tokens = batch(number);
    const auto loss = model.loss(tokens[0], tokens[1]).to_vector<float>();
    model.train();
    return loss[0];
  }

  // This rank's shards.
  std::vector<float> values() {
    std::vector<float> all;
    for (const Parameter& p : model.parameters())
      for (const float x : p.shard().to_vector<float>()) all.push_back(x);
    return all;
  }

  Device device;
  Setting setting;
  nn::Gpt2 model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

// What a program may do between two calls of its step.
inline const std::function<void(Job&)> kActs[] = {
    [](Job& job) { job.optimizer->set_weight_decay({job.model.parameters()[1]}, 0.3); },
    [](Job& job) { job.optimizer->set_lr_factor({job.model.parameters()[1]}, 0.1); },
    [](Job& job) { job.model.parameters()[1].set_trainable(false); },
    [](Job& job) { job.model.eval(); },
    [](Job& job) { set_gradient_divide_factor(job.model, 4); },
    [](Job& job) {  // added to by the step
      const auto other = job.batch(1);
      job.model.loss(other[0], other[1]).backward();
    },
    [](Job& job) { job.optimizer->zero_grad(); },
    [](Job& job) { job.evaluate(1); },
    [](Job& job) { job.model.train(); },
    [](Job& job) { job.model.parameters()[1].set_trainable(true); },
    [](Job& job) { job.step(job.batch(2)); },
    [](Job& job) {
      optim::clip_grad_norm(job.model.parameters(), 0.5, optim::NormType::l2,
                            optim::Clip::in_optimizer);
    },
    [](Job& job) { unshard(job.model), reshard(job.model); },
    [](Job& job) { reset(job.model); },
    [](Job& job) { job.optimizer->load(job.model, job.optimizer->state_dict(job.model)); },
    [](Job& job) {
      Parameter p = job.model.parameters()[0];
      p.edit([](const Tensor& rows) { raw::fill(rows, 0.25); });
    },
};

}  // namespace tessera::testing
