#include "tests/promises/run_program.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>

#include "tessera/autograd/ops.hpp"
#include "tessera/base/error.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/reset.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/promises/average.hpp"
#include "tests/promises/random_model.hpp"
#include "tests/support/mesh.hpp"

namespace tessera::testing {
namespace {

constexpr double kRate = 0.25;

Tensor input_of(const Program& program, std::size_t step, std::size_t forward, int rank,
                const Device& device) {
  std::mt19937_64 engine(program.seed * 131 + step * 17 + forward * 5 +
                         static_cast<std::uint64_t>(rank));
  std::vector<float> values(2 * kWidth);
  for (float& v : values) v = static_cast<float>(engine() % 2001) / 1000.f - 1.f;
  return Tensor::from(values, {2, kWidth}, device);
}

bool is_in_loss(const Step& step, const Step::Backward& b, int forward, int rank) {
  return forward == b.forwards[0] ||
         has(step.forwards[static_cast<std::size_t>(forward)].in_loss, rank);
}

void add_to(Tensor& loss, const Tensor& y) {
  const Tensor z = cast(y, f32), term = sum(z * z);
  loss = loss.defined() ? loss + term : term;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Program& program, const Part& model) {
  const std::vector<Parameter> all = model.parameters();
  if (program.rule == Rule::sgd)
    return std::make_unique<optim::SGD>(all, optim::SGDOptions{.lr = kRate, .momentum = 0.5});
  if (program.rule == Rule::adamw)
    return std::make_unique<optim::AdamW>(all, optim::AdamWOptions{.lr = kRate});
  optim::MuonSplit split;
  int tables = 0;
  for (const Parameter& p : all)
    (p.shape().ndim() == 2 && (program.matrices >> tables++ % 32 & 1U) != 0 ? split.matrices
                                                                            : split.others)
        .push_back(p);
  return std::make_unique<optim::Muon>(
      split.matrices, split.others,
      optim::MuonOptions{.lr = kRate,
                         .nesterov = program.is_nesterov,
                         .ns_dtype = program.is_in_bf16 ? bf16 : f32,
                         .turn_bytes = program.turn_bytes});
}

DeviceMesh mesh_of(const World& world, const Program& program) {
  if (program.mesh_ranks.empty()) return testing::mesh_of(world, program.replicas);
  const int replicas = program.replicas;
  return DeviceMesh::grid(world,
                          {{"dp_replicate", replicas}, {"dp_shard", program.ranks / replicas}},
                          program.mesh_ranks);
}

// By powers of two, which change no bit of an exact sum.
std::unique_ptr<optim::GradScaler> make_scaler(const Program& program, const Device& device) {
  if (!program.scales_loss) return nullptr;
  return std::make_unique<optim::GradScaler>(
      device, optim::GradScalerOptions{.init_scale = 2, .growth_interval = 2});
}
Tensor scaled(const optim::GradScaler* scaler, const Tensor& loss) {
  return scaler ? scaler->scale(loss) : loss;
}

// A backward of which this rank has all outputs, those that are not in its loss too: their forwards
// are skipped in the turn in which peers go back along them, the last first.
void run_parts(const Step& step, const Step::Backward& b, std::vector<Tensor>& outputs, int rank,
               bool has_peers, const optim::GradScaler* scaler) {
  std::vector<int> forwards = b.forwards;
  std::sort(forwards.begin(), forwards.end(), std::greater<>());
  const auto runs = [&](int i) { return has(b.runs, rank) && is_in_loss(step, b, i, rank); };
  for (auto first = forwards.begin(); first != forwards.end();) {
    const bool part_runs = runs(*first);
    const auto last =
        std::find_if(first, forwards.end(), [&](int i) { return runs(i) != part_runs; });
    Tensor loss;
    for (; first != last; ++first) add_to(loss, outputs[static_cast<std::size_t>(*first)]);
    if (part_runs)
      scaled(scaler, loss).backward({}, b.retains);
    else if (has_peers)
      skip_backward(loss, b.retains);
  }
  for (const int i : forwards)
    if (!b.retains) outputs[static_cast<std::size_t>(i)] = {};
}

// What a first attempt of a step ends with.
struct Failed : std::runtime_error {
  Failed() : std::runtime_error("this attempt fails") {}
};

// Before forward `i` of the first attempt, or behind the backwards, on a rank of a step that fails.
void fail_at(const Step::Failure& failure, std::size_t i, int rank, const Device& device) {
  if (i != failure.forward || !has(failure.ranks, rank)) return;
  if (!failure.on_device) throw Failed();
  device.compute().launch({.name = "unlucky"}, [](Exec&) { throw Failed(); });
}

// What a program exchanges beside its training.
void exchange(const World& world) {
  const Tensor all = dist::all_reduce(
      Tensor::full({3}, 1.f + static_cast<float>(world.rank()), f32, world.device()), world);
  if (all.to_vector<float>()[2] != static_cast<float>(world.size() * (world.size() + 1) / 2))
    throw DeviceError("a program's own exchange is wrong");
}

// One rank's part of a step. Where peers may run what it leaves out, it says so. `mesh`, here and
// below: null for one rank that does every rank's part. `scaler`: null for none. `failure`: of this
// attempt.
void run_step(const Program& program, std::size_t k, Part& model, int rank, const Device& device,
              const DeviceMesh* mesh, const optim::GradScaler* scaler,
              const Step::Failure* failure = nullptr) {
  const Step& step = program.steps[k];
  std::vector<Tensor> outputs(step.forwards.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Step::Forward& f = step.forwards[i];
    if (failure) fail_at(*failure, i, rank, device);
    const Tensor x = input_of(program, k, i, rank, device);
    if (mesh)
      for (const Decision& d : f.before) model.decide(d, *mesh);
    model.skip(f.skipped);
    if (f.is_evaluation) {
      const NoGradGuard no_gradient;
      model(x, rank);
    } else if (f.is_dropped) {
      model(x, rank);
    } else {
      outputs[i] = model(x, rank);
    }
  }
  if (step.exchanges && mesh && device.runs_bodies()) exchange(mesh->world());
  for (const Step::Backward& b : step.backwards) {
    if (mesh) model.set_reductions(b);
    const bool runs = has(b.runs, rank);
    if (has(b.says, rank) && (runs || !b.skips_model)) {
      run_parts(step, b, outputs, rank, mesh != nullptr, scaler);
      continue;
    }
    Tensor loss;
    for (const int i : b.forwards) {
      Tensor& output = outputs[static_cast<std::size_t>(i)];
      const Tensor y = b.retains ? output : std::exchange(output, {});
      // A rank that keeps a forward that it leaves out would have to say so.
      if (loss.defined() && !b.retains && !is_in_loss(step, b, i, rank)) continue;
      add_to(loss, y);
    }
    if (runs)
      scaled(scaler, loss).backward({}, b.retains);
    else if (mesh && b.skips_model)
      skip_backward(model);
    else if (mesh)
      skip_backward(loss, b.retains);
  }
  model.skip(0);
  if (failure) fail_at(*failure, outputs.size(), rank, device);
  if (step.ends_dropped) model(input_of(program, k, outputs.size(), rank, device), rank);
}

// Gradients of what units leave alone become their mean over the ranks; who has none has zeros.
void average_ignored(Part& model, const DeviceMesh* mesh) {
  std::vector<Parameter> some = model.ignored();
  std::erase_if(some, [](const Parameter& p) { return !p.trainable(); });
  for (const Parameter& p : some) (sum(p.value()) * 0.0).backward();
  if (mesh) average(some, mesh->world());
}

// The update, and what is frozen or thawed around it.
void end_step(const Program& program, std::size_t k, Part& model, optim::Optimizer& optimizer,
              const DeviceMesh* mesh, optim::GradScaler* scaler) {
  const Step& step = program.steps[k];
  average_ignored(model, mesh);
  const auto turn = [&] {
    const std::vector<Parameter> all = model.parameters();
    for (const int i : step.turned) {
      const Parameter& p =
          all[1 + static_cast<std::size_t>(i) % (all.size() - 1)];  // not the root's
      if (p.dtype() == f32) p.set_trainable(!p.trainable());
    }
  };
  if (program.max_norm > 0)
    optim::clip_grad_norm(
        model.parameters(), program.max_norm,
        program.clips_by_sum ? optim::NormType::l1 : optim::NormType::inf,
        program.clips_in_optimizer ? optim::Clip::in_optimizer : optim::Clip::in_place);
  if (!step.is_turned_late) turn();
  scaler ? scaler->step(optimizer) : optimizer.step();
  if (scaler) scaler->update();
  if (step.is_turned_late) turn();
  if (!step.keeps_gradients) optimizer.zero_grad();
  for (int i = 0; i < step.steps_more; ++i) optimizer.step();
}

void scale_gradients(const Part& model, double factor) {
  for (const Parameter& p : model.parameters())
    if (const Tensor g = p.grad(); g.defined()) raw::copy_into(g, raw::mul(g, factor));
}

// Whether sums of step k are not exact any more, as clipping's of all magnitudes, which are
// multiples of 2^-14: see Note [Exact sums].
bool is_inexact(const Program& program, const Part& model) {
  if (model.most_rows() > kMostRows) return true;
  double sum = 0;
  if (program.max_norm > 0 && program.clips_by_sum)
    for (const Parameter& p : model.parameters())
      if (const Tensor g = p.grad(); g.defined())
        for (const float each : g.to_vector<float>()) sum += std::abs(each) / program.ranks;
  return sum >= 1 << 10;
}

void keep_buffers(const Part& model, Values& values) {
  int i = 0;
  for (const nn::Buffer& buffer : model.buffers_of(0))
    values[concat("buffer ", i++)] = buffer.value().to_vector<float>();
}

// The first step, run without bodies before it is run.
void plan_first_step(const Program& program, Part& model) {
  struct Tree {
    Tree(const PartPlan& plan) : root(plan, nullptr, parts) {}
    std::vector<Part*> parts;
    Part root;
  };
  shard_plan(model, [&](World& counted) {
    const auto tree = std::make_shared<Tree>(program.root);
    const DeviceMesh mesh = mesh_of(counted, program);
    tree->root.shard(mesh, program.offload);
    tree->root.materialize(counted.device());
    if (program.doubled_from == 0 && program.ranks > 1) tree->root.double_gradients(mesh);
    run_step(program, 0, tree->root, counted.rank(), counted.device(), &mesh, nullptr);
    return std::shared_ptr<nn::Module>(tree, &tree->root);
  });
}

// An attempt at step k in which some ranks fail, if they come so far. Returns whether none did, so
// that the step is done; else all is as it was before.
bool is_done_at_once(const Program& program, std::size_t k, Part& model, World& world,
                     const DeviceMesh& mesh, const optim::GradScaler* scaler) {
  const int rank = world.rank();
  std::vector<Tensor> buffers;
  for (const nn::Buffer& buffer : model.buffers_of(rank))
    buffers.push_back(raw::mul(buffer.value(), 1.0));
  world.device().synchronize();  // a failure would cut what is queued
  world.barrier();
  std::string heard;
  try {
    model.throw_at(has(program.fails->ranks, rank) ? program.fails->at : 0);
    run_step(program, k, model, rank, world.device(), &mesh, scaler);
    world.device().synchronize();
    world.barrier();
    model.throw_at(0);
    return true;
  } catch (const std::exception& error) {
    heard = error.what();
  }
  const ShardReset done = reset(model, heard);
  if (!done.parameters_are_consistent || done.cause.find(Part::kThrown) == std::string::npos)
    throw DeviceError(
        concat("a step that was to fail in a second run has failed of: ", done.cause));
  model.throw_at(0);
  model.set_reductions({});
  for (std::size_t i = 0; i < buffers.size(); ++i) model.buffers_of(rank)[i].assign(buffers[i]);
  return false;
}

// The first attempt at a step that fails, and what it leaves: that the next one is the first.
void fail_step(const Program& program, std::size_t k, Part& model, optim::Optimizer& optimizer,
               const DeviceMesh& mesh) {
  const World& world = mesh.world();
  const Step::Failure& failure = *program.steps[k].failure;
  const StateDict parameters = model.state_dict(), state = optimizer.state_dict(model);
  // Over messages a failure cuts what is queued, these copies too.
  if (world.kind() == WorldKind::mpi) world.device().synchronize();
  std::vector<bool> trainable;
  for (const Parameter& p : model.parameters()) trainable.push_back(p.trainable());
  const std::int64_t steps = optimizer.steps();
  world.barrier();  // or a rank hears of it while it still is in the step before
  bool has_failed = false;
  try {
    run_step(program, k, model, world.rank(), world.device(), &mesh, nullptr, &failure);
    end_step(program, k, model, optimizer, &mesh, nullptr);
    world.barrier();
    world.barrier();  // of a rank that could not throw in the first one
  } catch (const Error&) {
    has_failed = true;
  } catch (const Failed&) {
    has_failed = true;
  }
  if (!has_failed) throw DeviceError("a step that fails on some ranks has not failed here");
  const bool is_whole = reset(model).parameters_are_consistent;
  for (int i = 0; i < failure.exchanges; ++i) exchange(world);
  const std::vector<Parameter> all = model.parameters();
  for (std::size_t i = 0; i < all.size(); ++i) all[i].set_trainable(trainable[i]);
  model.set_reductions({});
  // What is offloaded may have been updated beside a compute that failed, on all ranks; and what
  // was frozen in the attempt has lost its moments.
  if (is_whole && optimizer.steps() == steps && program.steps[k].turned.empty()) return;
  model.load(parameters);
  optimizer.load(model, state);
}

// What a plan promises for: the root is called once, of units that are closed.
bool is_one_forward(const Step& step) {
  return step.forwards.size() == 1 && step.forwards[0].before.empty() && !step.ends_dropped;
}

}  // namespace

Values on_one_rank(Program& program) {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined, .threads = 1});
  std::vector<Part*> parts;
  Part model(program.root, nullptr, parts);
  model.materialize(device);
  nn::init(model, {program.seed});
  const auto optimizer = make_optimizer(program, model);
  const auto scaler = make_scaler(program, device);
  Values values;
  keep_buffers(model, values);
  for (std::size_t k = 0; k < program.steps.size(); ++k) {
    if (program.steps[k].steps_before) optimizer->step();
    for (int rank = 0; rank < program.ranks; ++rank)
      run_step(program, k, model, rank, device, nullptr, scaler.get());
    autograd::forget_forwards();
    if (is_inexact(program, model)) {
      program.steps.resize(k);
      break;
    }
    if (!program.steps[k].keeps_gradients) model.forget_rows();
    scale_gradients(model, 1.0 / program.ranks);
    end_step(program, k, model, *optimizer, nullptr, scaler.get());
    scale_gradients(model, program.ranks);
    keep_buffers(model, values);
  }
  for (const auto& [name, p] : model.named_parameters())
    values[name] = raw::cast(p.shard(), f32).to_vector<float>();
  return values;
}

Values on_rank(const Program& program, World& world) {
  Values values;
  if (program.is_poisoned) Memory::of(world.device()).poison_freed();
  std::vector<Part*> parts;
  Part model(program.root, nullptr, parts);
  const DeviceMesh mesh = mesh_of(world, program);
  model.shard(mesh, program.offload);
  model.materialize(world.device());
  nn::init(model, {program.seed});
  const auto optimizer = make_optimizer(program, model);
  const auto scaler = make_scaler(program, world.device());
  if (program.is_planned && !program.steps.empty()) plan_first_step(program, model);
  for (std::size_t k = 0; k < program.steps.size(); ++k) {
    if (k == program.doubled_from && program.ranks > 1) model.double_gradients(mesh);
    if (program.steps[k].steps_before) optimizer->step();
    if (program.steps[k].failure) fail_step(program, k, model, *optimizer, mesh);
    if (!program.fails || program.fails->step != k ||
        !is_done_at_once(program, k, model, world, mesh, scaler.get()))
      run_step(program, k, model, world.rank(), world.device(), &mesh, scaler.get());
    if (k == 0 && program.is_planned && is_one_forward(program.steps[0]))
      if (const std::uint64_t slots = shard_counters(model).unplanned_slots; slots > 0)
        throw DeviceError(concat("the planned step took ", slots, " slots where no plan had them"));
    end_step(program, k, model, *optimizer, &mesh, scaler.get());
  }
  for_each_full_parameter(model, [&](const std::string& name, const Tensor& full) {
    const std::vector<float> whole = raw::cast(full, f32).to_vector<float>();
    if (world.rank() == 0) values[name] = whole;
  });
  if (world.rank() == 0) keep_buffers(model, values);
  return values;
}

std::string difference(const Values& expected, const Values& found) {
  for (const auto& [name, values] : expected)
    for (std::size_t i = 0; i < values.size(); ++i)
      if (const float at = found.at(name).at(i);
          std::bit_cast<std::uint32_t>(at) != std::bit_cast<std::uint32_t>(values[i]))
        return concat("'", name, "' [", i, "] is ", at, ", not ", values[i]);
  return "";
}

}  // namespace tessera::testing
