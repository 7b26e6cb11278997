#include "tessera/autograd/recompute.hpp"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "runtime/autograd/joint_results.hpp"
#include "runtime/autograd/kept_results.hpp"
#include "runtime/autograd/recomputed_scope.hpp"
#include "runtime/tensor/expect_operand.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/detail/device/hold_guard.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::GradModeGuard;
using autograd::RandomStateGuard;
using autograd::Saved;

namespace {

// One pass back from these results, with the gradients that have come.
void run_backward(std::span<const Tensor> results, std::vector<Tensor> gradients) {
  if (results.size() == 1) return results[0].backward(gradients[0]);
  const GradModeGuard history(true);
  const Tensor all =
      autograd::record("recompute", results, Tensor::empty({0}, f32, results[0].device()),
                       [gradients = std::move(gradients)](const Tensor&, Gradients& out) {
                         for (std::size_t i = 0; i < gradients.size(); ++i)
                           if (gradients[i].defined()) out.set(static_cast<int>(i), gradients[i]);
                       });
  all.backward(Tensor::empty({0}, f32, results[0].device()));
}

}  // namespace

std::vector<Tensor> recompute(std::function<std::vector<Tensor>(std::span<const Tensor>)> f,
                              std::vector<Tensor> inputs, Keep keep) {
  TESSERA_EXPECT(keep.products >= 0, "recompute: keep.products is ", keep.products,
                 "; 0 keeps no product, 1 each, 2 every second");
  const bool is_recorded = autograd::grad_enabled(), keeps = keep.products > 0 || keep.attention;
  const auto results =
      is_recorded && keeps ? std::make_shared<autograd::KeptResults>(keep) : nullptr;
  // What a function around it keeps has to come as far as these inputs.
  if (auto* const around = autograd::KeptResults::current()) around->note_saved();
  // Also in the first run of a function around it, whose second run meets another scope here.
  const autograd::KeptScope first_run(results.get());
  if (!is_recorded) return f(inputs);
  const autograd::RandomState random = autograd::random_state();
  const autograd::RecomputedScope scope;
  std::vector<Saved> kept, captured;
  std::vector<std::shared_ptr<autograd::Leaf>> uses;
  std::vector<std::uint64_t> versions;  // of these
  std::vector<Tensor> all = inputs;     // and what f has captured
  std::vector<Tensor> ys;
  {
    autograd::FirstRunGuard no_history_yet;
    std::vector<Tensor> detached;
    for (const Tensor& x : inputs) {
      if (x.defined()) detail::expect_values("recompute", x);
      detached.push_back(x.defined() ? x.detach() : x);
      kept.emplace_back(x);
    }
    ys = f(detached);
    TESSERA_EXPECT(!ys.empty(), "recompute: the function gives no result; return one or more");
    autograd::note_captured(ys);
    for (Tensor& y : ys) y = y.detach();  // of its own, also where f hands on what it was given
    if (results) results->end_first_run();
    uses = no_history_yet.take_uses();
    for (const Tensor& x : no_history_yet.take_captured()) {
      all.push_back(x);
      captured.emplace_back(x);
    }
    for (const auto& leaf : uses) versions.push_back(leaf->version());
  }
  const auto joint = ys.size() > 1 ? std::make_shared<autograd::JointResults>() : nullptr;
  const Tensor token = autograd::record_always(
      "recompute", all, joint ? Tensor::empty({0}, f32, ys[0].device()) : ys[0],
      [f = std::move(f), kept = std::move(kept), captured = std::move(captured), results, random,
       uses, versions = std::move(versions), joint,
       count = ys.size()](const Tensor& g, Gradients& out) {
        std::vector<Tensor> gradients = joint ? joint->take() : std::vector<Tensor>{g};
        for (std::size_t i = 0; i < uses.size(); ++i) uses[i]->expect_version(versions[i]);
        for (const Saved& x : captured) static_cast<void>(x.get());  // written since?
        std::vector<Tensor> again;
        for (std::size_t i = 0; i < kept.size(); ++i) {
          const Tensor& x = kept[i].get();
          again.push_back(x.defined() ? x.detach() : x);
          if (out.wants(static_cast<int>(i))) again.back().require_grad();
        }
        std::vector<Tensor> ys;
        {
          const GradModeGuard history(true);
          const RandomStateGuard same_draws(random);
          HoldGuard only_what_is_saved(g.device());
          const autograd::KeptScope second_run(results.get());
          if (results) results->begin_second_run(out.graph_is_retained());
          ys = f(again);
          if (results) results->expect_all_taken();
          const bool is_one = ys.size() == 1 && ys[0].handles() == 1;
          only_what_is_saved.end(is_one ? ys[0].storage().get() : nullptr);
        }
        TESSERA_EXPECT(ys.size() == count, "recompute: the function gives ", ys.size(),
                       " results in backward, and gave ", count,
                       " in forward; give the same ones each time");
        if (std::ranges::none_of(ys, &Tensor::requires_grad)) return;  // nothing in f is trainable
        run_backward(ys, std::move(gradients));
        for (std::size_t i = 0; i < again.size(); ++i)
          if (const Tensor dx = again[i].defined() ? again[i].grad() : Tensor(); dx.defined())
            out.set(static_cast<int>(i), dx);
      });
  token.history().node->uses = std::move(uses);
  if (joint)
    autograd::JointResults::record(joint, "recompute", token, ys);
  else
    ys[0] = token;
  return ys;
}

Tensor recompute(std::function<Tensor(std::span<const Tensor>)> f, std::vector<Tensor> inputs,
                 Keep keep) {
  const auto one = [f = std::move(f)](std::span<const Tensor> in) {
    return std::vector<Tensor>{f(in)};
  };
  return recompute(one, std::move(inputs), keep)[0];
}

Tensor recompute(std::function<Tensor(const Tensor&)> f, const Tensor& x, Keep keep) {
  return recompute([f = std::move(f)](std::span<const Tensor> in) { return f(in[0]); },
                   std::vector<Tensor>{x}, keep);
}

}  // namespace tessera
