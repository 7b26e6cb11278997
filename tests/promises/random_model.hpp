// The model of a random program: a tree of parts, which do what their plans say, on one rank
// without units or on several with them.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/promises/exact_sums.hpp"
#include "tests/promises/gathered_values.hpp"
#include "tests/promises/random_program.hpp"
#include "tests/support/double_on_stream.hpp"
#include "tests/support/mesh.hpp"

namespace tessera::testing {

class Part final : public nn::Module {
 public:
  // `parts`: all of the tree so far.
  Part(const PartPlan& plan, Part* outer, std::vector<Part*>& parts)
      : plan_(plan),
        outer_(outer),
        parts_(parts),
        w_({kWidth}, Initializer::normal(0, 0.5)),
        table_(plan.table.is_outer ? outer->table_ : made(plan.table)),
        transform_(transform_of(plan.gathered)) {
    register_parameter("w" + std::to_string(parts.size()), w_);
    register_parameter("table" + std::to_string(parts.size()), table_->parameter);
    w_.set_gather_transform(transform_);
    w_.set_block_rows(plan.block_rows);
    if (plan.table.is_streamed) stream_parameter(table_->parameter);
    if (plan.has_buffer)
      for (std::size_t rank = 0; rank < kMostRanks; ++rank) {
        buffers_.emplace_back(Shape{kWidth}, Initializer::normal(0, 0.5));
        register_buffer(concat("of", rank), buffers_.back());
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
    const Inputs more = plan_.gets_more ? Inputs{{cast(x, f16)}, cast(x, bf16)} : Inputs{};
    const auto body = [&](const Tensor& given, const Inputs& others) {
      const Tensor in = with_all(given, others);
      Tensor h = in;
      if (plan_.has_buffer) {
        const nn::Buffer& buffer = buffers_[static_cast<std::size_t>(rank)];
        buffer.assign(moved(buffer, h.detach()));
        h = shifted(h, buffer);
      }
      for (const Statement& s : plan_.body) h = run(s, h, in, rank);
      for (const int i : plan_.read_later)
        if (Part& child = *children_[static_cast<std::size_t>(i)];
            autograd::grad_enabled() && has(plan_.reads_later, rank))
          h = added(h, child.weight(), child.rows_);
      if (autograd::in_backward()) parts_[0]->count_second_run();
      return h;
    };
    const Tensor y = call(body, cast(x, plan_.input), more);
    return is_sharded_ ? y : cast(y, plan_.output);
  }

  void shard(const DeviceMesh& mesh, Offload offload) {
    is_sharded_ = true;
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
        return set_reshard_after_forward(unit, reshard_on(mesh, d.way), d.recurses);
      case Decision::reshard_after_backward:
        return set_reshard_after_backward(unit, d.value != 0, d.recurses);
      case Decision::unshard_in_backward:
        try {
          return set_unshard_in_backward(unit, d.value != 0);
        } catch (const ContractError& refused) {  // all that it has is streamed: its modules say it
          if (std::string(refused.what()).find("; leave the call out") == std::string::npos) throw;
          return;
        }
      case Decision::forward_prefetch:
        return set_modules_to_forward_prefetch(unit, list);
      case Decision::backward_prefetch:
        return set_modules_to_backward_prefetch(unit, list);
      case Decision::reductions_in_flight:
        return set_reductions_in_flight(unit, d.value, d.recurses);
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
    if (const bool none = b.unreduced == ~0U; none || b.unreduced == 0) {
      set_requires_gradient_sync(*this, !none);
      if (b.in_replicas == ~0U) set_requires_all_reduce(*this, false);
      if (b.in_replicas == ~0U || b.in_replicas == 0) return;
    }
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

  // Of all parts, as one rank has them.
  std::vector<nn::Buffer> buffers_of(int rank) const {
    std::vector<nn::Buffer> all;
    for (const Part* const part : parts_)
      if (part->plan_.has_buffer) all.push_back(part->buffers_[static_cast<std::size_t>(rank)]);
    return all;
  }

  // Of the root: which children its next calls leave out; at which of the parts' calls in second
  // runs one throws, 0 for none.
  void skip(unsigned children) { skipped_ = children; }
  void throw_at(int second_run) { throws_at_ = second_run; }
  static constexpr const char* kThrown = "a part's call in a second run";

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
  using Inputs = std::pair<std::vector<Tensor>, std::optional<Tensor>>;
  // What a call was given, as f32. A unit that casts has done so.
  Tensor with_all(const Tensor& given, const Inputs& others) const {
    std::vector<Tensor> all = others.first;
    if (others.second) all.push_back(*others.second);
    Tensor sum = cast(given, f32);
    const bool are_cast = is_sharded_ && plan_.is_unit && plan_.casts_inputs;
    if (given.dtype() != (are_cast ? f32 : plan_.input)) throw DeviceError("an input is not cast");
    for (const Tensor& t : all) {
      if ((t.dtype() == f32) != are_cast) throw DeviceError("an input among others is not cast");
      sum = joined(sum, cast(t, f32));
    }
    return sum;
  }
  static std::shared_ptr<const GatherTransform> transform_of(Gathered how) {
    if (how == Gathered::plainly) return nullptr;
    return how == Gathered::in_two ? std::make_shared<InTwo>() : gather_in_e4m3();
  }
  static std::shared_ptr<Table> made(const PartPlan::Table& plan) {
    const auto table =
        std::make_shared<Table>(Table{{{plan.rows, kWidth}, Initializer::normal(0, 0.5)}});
    if (plan.is_frozen) table->parameter.freeze();
    table->parameter.set_dtype(plan.stored);
    table->transform = transform_of(plan.gathered);
    table->parameter.set_gather_transform(table->transform);
    table->parameter.set_block_rows(plan.block_rows);
    return table;
  }
  Tensor weight() const { return as_gathered(w_, w_.value(), transform_.get()); }
  Tensor weighed(const Tensor& h) {
    return plan_.is_added ? added(h, weight(), rows_) : used(h, weight(), rows_);
  }
  ShardOptions options(const DeviceMesh& mesh, Offload offload) const {
    return {
        .mesh = mesh,
        .precision = {.param = f32,
                      .output = plan_.output == f32 ? std::nullopt : std::optional(plan_.output),
                      .cast_forward_inputs = plan_.casts_inputs},
        .reshard_after_forward = reshard_on(mesh, plan_.reshard),
        .prefetch_depth = plan_.prefetch,
        .reductions_in_flight = plan_.in_flight,
        .forwards_ahead = plan_.ahead,
        .slice_bytes = plan_.slice_bytes,
        .slices_wait = plan_.slices_wait,
        .piece_bytes = plan_.piece_bytes,
        .packed_bytes = plan_.packed_bytes(),
        .offload = offload,
        .shard_placement_fn =
            [this, ranks = mesh.shard_size()](const Parameter& p) {
              const auto of = std::ranges::find_if(parts_, [&](const Part* part) {
                return part->plan_.table.by_columns && part->table_->parameter == p;
              });
              return Shard{of != parts_.end() && kWidth % ranks == 0 ? 1 : 0};
            },
        .ignored = ignored()};
  }
  Tensor run(const Statement& s, const Tensor& h, const Tensor& x, int rank) {
    if (s.kind == Statement::own) return weighed(h);
    if (s.kind == Statement::outer) return outer_->weighed(h);
    if (s.kind == Statement::backward) return turned_back(s, h);
    if (s.kind == Statement::call && (skipped_ >> s.callee & 1U) != 0) return bent(h);
    const auto with = [&](const Tensor& y) { return has(s.used, rank) ? joined(h, y) : bent(h); };
    if (s.kind == Statement::streamed) return with(of_table(h));
    const auto callee = static_cast<std::size_t>(s.callee);
    Part& child = s.kind != Statement::call_elsewhere ? *children_[callee] : *parts_[callee];
    const auto called = [&child, rank](const Tensor& in) { return cast(child(in, rank), f32); };
    if (s.kind == Statement::backward_apart) return turned_back_apart(s, h, called);
    Tensor y;
    if (s.without_gradient) {
      const NoGradGuard no_gradient;
      y = called(h.detach());
    } else if (s.recomputed) {
      const auto body = [called, between = s.selectively,
                         captured = s.captures ? x : Tensor()](std::span<const Tensor> in) {
        const Tensor& second = in.size() > 1 ? in[1] : captured;
        const Tensor input = second.defined() ? in[0] + second * 0.5 : in[0];
        return between ? turned(called(turned(input))) : called(input);
      };
      y = recompute(body, s.gets_input && !s.captures ? std::vector{h, x} : std::vector{h},
                    s.selectively ? keep_ : Keep());
    } else {
      y = called(h);
    }
    return with(y);
  }

  static Tensor turned_back(const Statement& s, const Tensor& h) {
    if (!autograd::grad_enabled()) return h;
    const Tensor loss = sum(h * h);
    if (s.retains) loss.backward({}, true);
    loss.backward();
    return h.detach();
  }

  // Its own history goes on behind the loss's.
  template <class F>
  static Tensor turned_back_apart(const Statement& s, const Tensor& h, const F& called) {
    if (!autograd::grad_enabled()) return bent(h);
    Tensor leaf = h.detach();
    leaf.require_grad();
    const Tensor y = called(leaf);
    sum(y * y).backward({}, s.retains);
    return joined(h, leaf.grad());
  }

  void count_second_run() {
    if (throws_at_ > 0 && --throws_at_ == 0) throw std::runtime_error(kThrown);
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
  std::vector<nn::Buffer> buffers_;                   // one a rank
  std::int64_t rows_ = 0;
  bool is_sharded_ = false;  // units then give their outputs in another dtype, else the part does
  int rank_ = 0;             // whose part of the program runs
  unsigned skipped_ = 0;
  int throws_at_ = 0;
  std::vector<std::unique_ptr<Part>> children_;
};

}  // namespace tessera::testing
