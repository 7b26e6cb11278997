// Random programs on several ranks against the same program on one, without units, under the race
// checker: trees of modules, units at random, some of them lists, hooks, calls whose results some
// ranks do not use, calls without gradients, recomputed calls, tables that several modules use
// slice by slice, several forwards, and backwards in any order that some ranks leave out, as a
// whole or one output of several, and that may retain their graphs, parameters that are frozen and
// thawed between steps, backwards that leave reductions to later ones, parameters that travel in
// another form, are stored in fewer bits or left alone by units, hooks of reductions, units told
// otherwise between forwards, and meshes with and without replicas. Ranks and streams run in an
// order that the seed chooses, or as threads, or each rank in program order, some with freed memory
// poisoned.
//
//   programs --count 10000 [--first N]     seeds N.., in two processes
//   programs --seed 7                      one of them, and what it is: what a failure prints
//
// `tools/programs` calls it for CI and for the soak. Exit code 0: every program ran to its end on
// every rank, without a race, and left the bits of the parameters that one rank has.
//
// Bits can be asked for because sums of gradients are exact, in whatever order and parts the ranks
// make them: see Note [Exact sums] in exact_sums.hpp.
#include <algorithm>
#include <bit>
#include <functional>
#include <iostream>
#include <map>
#include <random>

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/promises/exact_sums.hpp"
#include "tests/promises/gathered_values.hpp"
#include "tests/promises/random_program.hpp"
#include "tests/promises/seeds.hpp"
#include "tests/support/double_on_stream.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr double kRate = 0.25;

// --- what runs it ---

class Part final : public nn::Module {
 public:
  // `parts`: all of the tree so far.
  Part(const PartPlan& plan, Part* outer, std::vector<Part*>& parts)
      : plan_(plan),
        outer_(outer),
        parts_(parts),
        w_({kWidth}, Initializer::normal(0, 0.5)),
        table_(plan.table.is_outer ? outer->table_
                                   : std::make_shared<Table>(Table{{{plan.table.rows, kWidth},
                                                                    Initializer::normal(0, 0.5)}})),
        transform_(transform_of(plan.gathered)) {
    register_parameter("w" + std::to_string(parts.size()), w_);
    register_parameter("table" + std::to_string(parts.size()), table_->parameter);
    if (plan.table.is_frozen && !plan.table.is_outer) table_->parameter.freeze();
    if (!plan.table.is_outer) table_->parameter.set_dtype(plan.table.stored);
    if (plan.table.is_streamed) stream_parameter(table_->parameter);
    if (transform_) w_.set_gather_transform(transform_);
    if (!plan.table.is_outer) {
      table_->transform = transform_of(plan.table.gathered);
      if (table_->transform) table_->parameter.set_gather_transform(table_->transform);
    }
    if (plan.has_hook)
      register_forward_hook([this](Module&, const nn::CallTensors&, const nn::CallTensors& out) {
        if (has(plan_.hooked, rank_)) out[0] = weighed(out[0]);
      });
    parts.push_back(this);
    for (std::size_t i = 0; i < plan.children.size(); ++i) {
      children_.push_back(std::make_unique<Part>(plan.children[i], this, parts));
      register_module(std::to_string(i), *children_.back());
    }
  }

  Tensor operator()(const Tensor& x, int rank) {
    rank_ = rank;
    return call([&] {
      Tensor h = x;
      for (const Statement& s : plan_.body) h = run(s, h, x, rank);
      for (const int i : plan_.read_later)
        if (Part& child = *children_[static_cast<std::size_t>(i)];
            autograd::grad_enabled() && has(plan_.reads_later, rank))
          h = added(h, child.weight(), child.rows_);
      return h;
    });
  }

  void shard(const DeviceMesh& mesh, Offload offload) {
    keep_.products = 1;
    std::vector<nn::Module*> listed;
    const Part* first = nullptr;
    for (const auto& child : children_) {
      child->shard(mesh, offload);
      if (!child->plan_.is_listed) continue;
      if (!first) first = child.get();
      listed.push_back(child.get());
    }
    if (first) fully_shard(listed, first->options(mesh, offload));
    if (plan_.is_unit && !plan_.is_listed) fully_shard(*this, options(mesh, offload));
  }

  bool reads_parameters_in_backward() const override { return !plan_.is_added; }

  void decide(const Decision& d, const DeviceMesh& mesh) {
    const auto part = [this](int i) { return parts_[static_cast<std::size_t>(i)]; };
    Part& unit = *part(d.part);
    std::vector<nn::Module*> list;
    for (const int i : d.list) list.push_back(part(i));
    switch (d.kind) {
      case Decision::unshard:
        return tessera::unshard(unit);
      case Decision::reshard:
        return tessera::reshard(unit);
      case Decision::reshard_after_forward:
        return set_reshard_after_forward(unit, reshard_on(mesh, d.way), false);
      case Decision::reshard_after_backward:
        return set_reshard_after_backward(unit, d.value != 0, false);
      case Decision::unshard_in_backward:
        return set_unshard_in_backward(unit, d.value != 0);
      case Decision::forward_prefetch:
        return set_modules_to_forward_prefetch(unit, list);
      case Decision::backward_prefetch:
        return set_modules_to_backward_prefetch(unit, list);
      case Decision::reductions_in_flight:
        return set_reductions_in_flight(unit, d.value, false);
    }
  }

  // Of a tree with memory, on several ranks.
  void double_gradients(const DeviceMesh& mesh) {
    for (Part* const part : parts_) {
      if (!part->plan_.is_unit || !part->plan_.is_doubled) continue;
      set_gradient_divide_factor(*part, 2.0 * mesh.world().size());
      set_all_reduce_hook(*part, double_on_stream,
                          mesh.replicas() == 1 ? part->plan_.doubled_on : std::nullopt);
    }
  }

  // Which units of the tree the next backward reduces, and sums over replicas.
  void set_reductions(const Step::Backward& b) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (!parts_[i]->plan_.is_unit) continue;
      set_requires_gradient_sync(*parts_[i], (b.unreduced >> i % 32 & 1U) == 0, false);
      if ((b.in_replicas >> i % 32 & 1U) != 0) set_requires_all_reduce(*parts_[i], false, false);
    }
  }

  // What units leave alone, of all parts.
  std::vector<Parameter> ignored() const {
    std::vector<Parameter> some;
    for (const Part* const part : parts_) {
      if (part->plan_.is_ignored) some.push_back(part->w_);
      if (part->plan_.table.is_ignored) some.push_back(part->table_->parameter);
    }
    return some;
  }

  // The most rows that have given a parameter a gradient since they were forgotten.
  std::int64_t most_rows() const {
    std::int64_t most = std::max(rows_, table_->uses);
    for (const auto& child : children_) most = std::max(most, child->most_rows());
    return most;
  }
  void forget_rows() {
    rows_ = table_->uses = 0;
    for (const auto& child : children_) child->forget_rows();
  }

 private:
  struct Table {
    Parameter parameter;
    std::int64_t uses = 0;
    std::shared_ptr<const GatherTransform> transform{};
  };
  static std::shared_ptr<const GatherTransform> transform_of(Gathered how) {
    if (how == Gathered::plainly) return nullptr;
    return how == Gathered::in_two ? std::make_shared<InTwo>() : gather_in_e4m3();
  }
  Tensor weight() const { return as_gathered(w_, w_.value(), transform_.get()); }
  Tensor weighed(const Tensor& h) {
    return plan_.is_added ? added(h, weight(), rows_) : used(h, weight(), rows_);
  }
  ShardOptions options(const DeviceMesh& mesh, Offload offload) const {
    return {.mesh = mesh,
            .reshard_after_forward = reshard_on(mesh, plan_.reshard),
            .prefetch_depth = plan_.prefetch,
            .slice_bytes = plan_.slice_bytes,
            .piece_bytes = plan_.piece_bytes,
            .offload = offload,
            .ignored = ignored()};
  }
  Tensor run(const Statement& s, const Tensor& h, const Tensor& x, int rank) {
    if (s.kind == Statement::own) return weighed(h);
    if (s.kind == Statement::outer) return outer_->weighed(h);
    const auto with = [&](const Tensor& y) { return has(s.used, rank) ? joined(h, y) : bent(h); };
    if (s.kind == Statement::streamed) return with(of_table(h));
    const auto callee = static_cast<std::size_t>(s.callee);
    Part& child = s.kind == Statement::call ? *children_[callee] : *parts_[callee];
    Tensor y;
    if (s.without_gradient) {
      const NoGradGuard no_gradient;
      y = child(h.detach(), rank);
    } else if (s.recomputed) {
      const auto body = [&child, rank, between = s.selectively](std::span<const Tensor> in) {
        const Tensor input = in.size() > 1 ? in[0] + in[1] * 0.5 : in[0];
        return between ? turned(child(turned(input), rank)) : child(input, rank);
      };
      y = recompute(body, s.gets_input ? std::vector{h, x} : std::vector{h},
                    s.selectively ? keep_ : Keep());
    } else {
      y = child(h, rank);
    }
    return with(y);
  }

  Tensor of_table(const Tensor& h) {
    Tensor y;
    table_->parameter.for_each_slice([&](const Tensor& slice, const SliceRows&) {
      const Tensor rows = as_gathered(table_->parameter, slice, table_->transform.get());
      const Tensor term = streamed(h, cast(rows, f32), table_->uses);
      y = y.defined() ? y + term : term;
    });
    return y;
  }

  const PartPlan& plan_;
  Keep keep_{};  // on one rank nothing, which has the same bits
  Part* const outer_;
  const std::vector<Part*>& parts_;
  Parameter w_;
  std::shared_ptr<Table> table_;
  std::shared_ptr<const GatherTransform> transform_;  // of w_
  std::int64_t rows_ = 0;
  int rank_ = 0;  // whose part of the program runs
  std::vector<std::unique_ptr<Part>> children_;
};

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
  const Tensor term = sum(y * y);
  loss = loss.defined() ? loss + term : term;
}

// A backward of which this rank has all outputs, those that are not in its loss too: their forwards
// are skipped in the turn in which peers go back along them, the last first.
void run_parts(const Step& step, const Step::Backward& b, std::vector<Tensor>& outputs, int rank,
               bool has_peers) {
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
      loss.backward({}, b.retains);
    else if (has_peers)
      skip_backward(loss, b.retains);
  }
  for (const int i : forwards)
    if (!b.retains) outputs[static_cast<std::size_t>(i)] = {};
}

// One rank's part of a step. Where peers may run what it leaves out, it says so. `mesh`, here and
// below: null for one rank that does every rank's part.
void run_step(const Program& program, std::size_t k, Part& model, int rank, const Device& device,
              const DeviceMesh* mesh) {
  const Step& step = program.steps[k];
  std::vector<Tensor> outputs(step.forwards.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Step::Forward& f = step.forwards[i];
    const Tensor x = input_of(program, k, i, rank, device);
    if (mesh)
      for (const Decision& d : f.before) model.decide(d, *mesh);
    if (f.is_evaluation) {
      const NoGradGuard no_gradient;
      model(x, rank);
    } else if (f.is_dropped) {
      model(x, rank);
    } else {
      outputs[i] = model(x, rank);
    }
  }
  for (const Step::Backward& b : step.backwards) {
    if (mesh) model.set_reductions(b);
    const bool runs = has(b.runs, rank);
    if (has(b.says, rank) && (runs || !b.skips_model)) {
      run_parts(step, b, outputs, rank, mesh != nullptr);
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
      loss.backward({}, b.retains);
    else if (mesh && b.skips_model)
      skip_backward(model);
    else if (mesh)
      skip_backward(loss, b.retains);
  }
}

using Values = std::map<std::string, std::vector<float>>;

// Gradients of what units leave alone become their mean over the ranks; who has none has zeros.
void average_ignored(Part& model, const DeviceMesh* mesh) {
  std::vector<Parameter> some = model.ignored();
  std::erase_if(some, [](const Parameter& p) { return !p.trainable(); });
  for (const Parameter& p : some) (sum(p.value()) * 0.0).backward();
  if (!mesh) return;
  for (const Parameter& p : some)
    raw::copy_into(p.grad(),
                   raw::mul(dist::all_reduce(p.grad(), mesh->world()), 1.0 / mesh->world().size()));
}

// The update, and what is frozen or thawed around it.
void end_step(const Step& step, Part& model, optim::Optimizer& optimizer, const DeviceMesh* mesh) {
  average_ignored(model, mesh);
  const auto turn = [&] {
    const std::vector<Parameter> all = model.parameters();
    for (const int i : step.turned) {
      const Parameter& p =
          all[1 + static_cast<std::size_t>(i) % (all.size() - 1)];  // not the root's
      if (p.dtype() == f32) p.set_trainable(!p.trainable());
    }
  };
  if (!step.is_turned_late) turn();
  optimizer.step();
  if (step.is_turned_late) turn();
  if (!step.keeps_gradients) optimizer.zero_grad();
}

// The parameters after all steps: of one rank that does every rank's part itself, and so has the
// sum of what the ranks have the mean of. A program ends before the step whose sums would be too
// long to be exact: about one in 50,000 keeps that many gradients.
Values reference(Program& program) {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined, .threads = 1});
  std::vector<Part*> parts;
  Part model(program.root, nullptr, parts);
  model.materialize(device);
  nn::init(model, {program.seed});
  optim::Sgd optimizer(model.parameters(), {.lr = kRate / program.ranks, .momentum = 0.5});
  for (std::size_t k = 0; k < program.steps.size(); ++k) {
    for (int rank = 0; rank < program.ranks; ++rank)
      run_step(program, k, model, rank, device, nullptr);
    autograd::forget_forwards();
    if (model.most_rows() > kMostRows) {
      program.steps.resize(k);
      break;
    }
    if (!program.steps[k].keeps_gradients) model.forget_rows();
    end_step(program.steps[k], model, optimizer, nullptr);
  }
  Values values;
  for (const auto& [name, p] : model.named_parameters())
    values[name] = raw::cast(p.shard(), f32).to_vector<float>();
  return values;
}

Values on_ranks(const Program& program, const std::shared_ptr<RaceChecker>& checker) {
  Values values;
  const WorldOptions options{.executor = program.executor,
                             .schedule_seed = program.seed,
                             .threads = 1,
                             .race_checker = checker};
  run_local(program.ranks, options, [&](World& world) {
    if (program.is_poisoned) Memory::of(world.device()).poison_freed();
    std::vector<Part*> parts;
    Part model(program.root, nullptr, parts);
    const DeviceMesh mesh = mesh_of(world, program.replicas);
    model.shard(mesh, program.offload);
    model.materialize(world.device());
    nn::init(model, {program.seed});
    optim::Sgd optimizer(model.parameters(), {.lr = kRate, .momentum = 0.5});
    for (std::size_t k = 0; k < program.steps.size(); ++k) {
      if (k == program.doubled_from && program.ranks > 1) model.double_gradients(mesh);
      run_step(program, k, model, world.rank(), world.device(), &mesh);
      end_step(program.steps[k], model, optimizer, &mesh);
    }
    for_each_full_parameter(model, [&](const std::string& name, const Tensor& full) {
      const std::vector<float> whole = raw::cast(full, f32).to_vector<float>();
      if (world.rank() == 0) values[name] = whole;
    });
  });
  return values;
}

// Empty where all is well.
std::string complaint(Program program) {
  const auto checker = RaceChecker::make();
  Values expected, found;
  try {
    expected = reference(program);
    found = on_ranks(program, checker);
  } catch (const std::exception& error) {
    return error.what();
  }
  if (checker->race_count() > 0) return checker->races()[0].to_string();
  for (const auto& [name, values] : expected)
    for (std::size_t i = 0; i < values.size(); ++i)
      if (std::bit_cast<std::uint32_t>(found[name][i]) != std::bit_cast<std::uint32_t>(values[i]))
        return concat("parameter '", name, "' [", i, "] is ", found[name][i], ", not ", values[i]);
  return "";
}

}  // namespace

int main(int count, char** arguments) {
  return tessera::testing::try_asked(
      "programs", {arguments, arguments + count},
      [](std::uint64_t seed) { print(std::cout, make_program(seed)); },
      [](std::uint64_t seed) { return complaint(make_program(seed)); });
}
