#include "tessera/optim/grad_scaler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/optim/gradients.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

using raw::Binary;

constexpr std::int64_t kMostInterval = 1 << 24;                    // which an f32 counts exactly
constexpr double kLeastScale = std::numeric_limits<float>::min();  // has a finite inverse

// Throws: ContractError for what is out of range.
void expect_valid(const GradScalerOptions& o) {
  const double scale = static_cast<float>(o.init_scale);
  TESSERA_EXPECT(scale >= kLeastScale && std::isfinite(scale), "GradScaler: the scale is ",
                 o.init_scale, ", expected a finite f32 of 2^-126 or more");
  TESSERA_EXPECT(o.growth_factor > 1 && std::isfinite(o.growth_factor),
                 "GradScaler: growth_factor is ", o.growth_factor,
                 ", expected a finite number above 1");
  TESSERA_EXPECT(o.backoff_factor > 0 && o.backoff_factor < 1, "GradScaler: backoff_factor is ",
                 o.backoff_factor, ", expected one between 0 and 1");
  TESSERA_EXPECT(o.growth_interval >= 1 && o.growth_interval <= kMostInterval,
                 "GradScaler: growth_interval is ", o.growth_interval, ", expected 1 to 2^24");
}

// Of what is agreed on: whether the step is skipped, boolean [].
Tensor is_bad(const Tensor& agreed) {
  return raw::binary(Binary::ne, raw::reduce_all(raw::Reduction::sum, agreed), 0);
}
Tensor at(const Tensor& of, std::int64_t i) { return of.view({1}, {1}, i); }

}  // namespace

GradScaler::GradScaler(const Device& device, const GradScalerOptions& options) : options_(options) {
  expect_valid(options);
  TESSERA_EXPECT(!device.is_meta(), "GradScaler: meta has no memory; give the ranks' device");
  const OwnerGuard owner(device, "scalars");
  state_ = Tensor::empty({2}, f32, device);
  set(options.init_scale, 0);
}

void GradScaler::set(double scale, double tracker) {
  raw::fill(at(state_, 0), scale);
  raw::fill(at(state_, 1), tracker);
}

Tensor GradScaler::current_scale() const { return raw::mul(state_.view({}, {}, 0), 1); }

Tensor GradScaler::scale(const Tensor& loss) const {
  const OwnerGuard owner(state_.device(), "scalars");
  const Tensor wide = size_bytes(loss.dtype()) == 2 ? cast(loss, f32) : loss;
  return wide * raw::cast(current_scale(), wide.dtype());
}

// --- a step ---

bool GradScaler::was_reset() const { return recoveries_ != state_.device().context().recoveries(); }

GradScaler::Seen* GradScaler::find(const Optimizer& optimizer) {
  if (was_reset()) seen_.clear();
  recoveries_ = state_.device().context().recoveries();
  const auto found = std::ranges::find(seen_, &optimizer, &Seen::optimizer);
  return found == seen_.end() ? nullptr : &*found;
}

void GradScaler::unscale(Optimizer& optimizer) {
  const Seen* const seen = find(optimizer);
  TESSERA_EXPECT(!seen, "GradScaler::unscale: this optimizer's ",
                 seen && seen->has_stepped ? "step was taken" : "gradients were unscaled",
                 " since the last update(); call update() between");
  const std::vector<GroupPart> parts = parts_of(optimizer.parameters());
  for (const GroupPart& part : parts) part.expect_reduced("GradScaler::unscale");
  const Device& device = parts[0].group->device;
  TESSERA_EXPECT(device.is_beside(state_.device()),
                 "GradScaler::unscale: the optimizer is on another device; use one scaler each");
  const OwnerGuard owner(device, "scalars");
  // In f64 no sum of squares of finite f32 is infinite.
  const Tensor squares = Tensor::zeros({1}, f64, device), scale = raw::moved(at(state_, 0), device);
  for_each_gradient(parts, [&](const Tensor& gradient) {
    raw::sumsq_into(squares.view({}, {}, 0), gradient, raw::Accumulate::yes);
  });
  const Tensor wide = raw::cast(scale, f64);
  const Tensor of_ranks[] = {raw::mul(squares, 0), wide, raw::neg(wide)};
  const Tensor agreed = raw::cat(of_ranks, 0);
  for (const auto of : {&FlatGroup::sums, &FlatGroup::replicas})
    for (Communicator* const comm : communicators_of(parts, of))
      all_reduce("found_inf", agreed, comm, ReduceOp::max);
  const Tensor inverse = raw::binary(Binary::div, 1, scale);
  for_each_gradient(parts, [&](const Tensor& gradient) {
    detail::multiply("unscale_gradient", gradient, inverse);
  });
  seen_.push_back({&optimizer, agreed});
}

Tensor GradScaler::found_inf(const Optimizer& optimizer) const {
  const auto seen = std::ranges::find(seen_, &optimizer, &Seen::optimizer);
  TESSERA_EXPECT(!was_reset() && seen != seen_.end(),
                 "GradScaler::found_inf: this optimizer's gradients were not unscaled since the "
                 "last update()");
  return is_bad(seen->agreed);
}

void GradScaler::step(Optimizer& optimizer) {
  if (!find(optimizer)) unscale(optimizer);
  Seen& seen = *find(optimizer);
  TESSERA_EXPECT(!seen.has_stepped,
                 "GradScaler::step: this optimizer's step was taken since the last update(); call "
                 "update() between");
  const OwnerGuard owner(seen.agreed.device(), "scalars");
  optimizer.step_if(raw::logical_not(is_bad(seen.agreed)));
  seen.has_stepped = true;
}

void GradScaler::update() {
  TESSERA_EXPECT(
      !was_reset() && !seen_.empty(),
      "GradScaler::update: no optimizer was unscaled since the last update(); call step() before");
  const OwnerGuard owner(state_.device(), "scalars");
  const auto agreed_of = [&](const Seen& seen) { return raw::moved(seen.agreed, state_.device()); };
  Tensor agreed = agreed_of(seen_[0]);
  for (const Seen& seen : seen_) agreed = raw::binary(Binary::max, agreed, agreed_of(seen));
  const Tensor bad = is_bad(agreed), scale = raw::cast(raw::neg(at(agreed, 2)), f32);
  const Tensor since = raw::binary(Binary::add, at(state_, 1), 1);
  const Tensor is_due =
      raw::binary(Binary::ge, since, static_cast<double>(options_.growth_interval));
  const Tensor grown = raw::mul(scale, options_.growth_factor);
  const Tensor good =
      raw::where(raw::binary(Binary::logical_and, is_due, raw::isfinite(grown)), grown, scale);
  const Tensor lowered =
      raw::binary(Binary::max, raw::mul(scale, options_.backoff_factor), kLeastScale);
  const Tensor next[] = {
      raw::where(bad, lowered, good),
      raw::where(raw::binary(Binary::logical_or, bad, is_due), raw::mul(scale, 0), since)};
  raw::copy_into(state_, raw::cat(next, 0));  // one write: a step that fails has it or has it not
  seen_.clear();
}

// --- its state ---

StateDict GradScaler::state_dict(const StateDictOptions& options) const {
  const OwnerGuard owner(state_.device(), "scalars");
  StateDict views;
  const auto keep = [&](const char* name, auto value) {
    views.emplace(name, Tensor::from(std::vector{value}, {}, state_.device()));
  };
  keep("growth_factor", options_.growth_factor);
  keep("backoff_factor", options_.backoff_factor);
  keep("growth_interval", options_.growth_interval);
  views.emplace("scale", current_scale());
  views.emplace("growth_tracker", raw::cast(state_.view({}, {}, 1), i64));
  return make_state_dict(views, options);
}

LoadReport GradScaler::load(const StateDict& state, const LoadOptions& options) {
  return load_from([&] { return std::make_shared<DictSource>(state); }, options);
}
LoadReport GradScaler::load(const StateSource& source, const LoadOptions& options) {
  std::shared_ptr<const StateSource> here(std::shared_ptr<void>(), &source);  // not owned
  return load_from([&] { return here; }, options);
}

LoadReport GradScaler::load_from(const std::function<std::shared_ptr<const StateSource>()>& source,
                                 const LoadOptions& options) {
  GradScalerOptions to = options_;
  to.init_scale = current_scale().item(to.init_scale);
  double tracker = state_.view({}, {}, 1).item(0);
  std::vector<StateTarget> targets;
  const auto number = [&](const char* name, DType dtype, auto& now) {
    targets.push_back(number_target({name}, dtype, state_, [&](const Tensor& value) {
      now =
          static_cast<std::remove_reference_t<decltype(now)>>(value.item(static_cast<double>(now)));
      expect_valid(to);
      TESSERA_EXPECT(tracker >= 0 && tracker <= kMostInterval, "GradScaler: growth_tracker is ",
                     tracker, ", expected 0 to 2^24");
    }));
  };
  number("scale", f32, to.init_scale);
  number("growth_factor", f64, to.growth_factor);
  number("backoff_factor", f64, to.backoff_factor);
  number("growth_interval", i64, to.growth_interval);
  number("growth_tracker", i64, tracker);
  const LoadReport report =
      load_state(targets, source, {.what = "GradScaler", .article = "a"}, options);
  options_ = to;
  set(to.init_scale, tracker);
  return report;
}

}  // namespace tessera::optim
