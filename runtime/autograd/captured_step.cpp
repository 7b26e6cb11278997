#include "tessera/autograd/captured_step.hpp"

#include <deque>
#include <optional>
#include <utility>

#include "runtime/autograd/step_draws.hpp"
#include "runtime/autograd/step_watcher.hpp"
#include "tessera/autograd/node.hpp"
#include "tessera/detail/device/captured_work.hpp"
#include "tessera/detail/memory/step_memory.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
class CapturedStep::Impl {
 public:
  Impl(const Device& device, Function function) : device_(device), function_(std::move(function)) {
    if (!is_gpu()) return;
    memory_.emplace(device);
    device_.synchronize();  // observers come and go while a device is idle
    device_.context().add_observer(watcher_);
  }
  ~Impl() {
    if (!memory_) return;
    try {
      device_.synchronize();
    } catch (...) {
      device_.context().fail_late();  // told to whoever blocks next
    }
    device_.context().remove_observer(watcher_);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  const std::vector<Tensor>& call(const std::vector<Tensor>& inputs) {
    if (!memory_) {
      why_not_ = "this device can't capture a step";
      outputs_ = function_(inputs);
      return outputs_;
    }
    if ((work_ || is_steady_) && !(decisions_ == decisions())) {
      forget();
      has_decided_ = true;
    }
    if (work_ && !work_->graph->why_dropped().empty()) {
      dropped_ = concat("its graph was dropped, since ", work_->graph->why_dropped());
      forget();
    }
    if (is_steady_ && watcher_.is_hopeless()) throw ContractError(watcher_.obstacle());
    take(inputs);
    if (!device_.context().executor().captures()) {
      rehearse();
      forget();
      why_not_ = "the device's operations are timed, delayed or planned";
    } else if (work_ && !watcher_.is_disturbed() && first_row_ == random_row() &&
               memory_->holds()) {
      why_not_.clear();
      replay();
    } else if (is_steady_ && !work_ && !watcher_.is_disturbed() && watcher_.obstacle().empty()) {
      why_not_.clear();
      capture();
    } else {
      rehearse();
    }
    return outputs_;
  }

  void forget() {
    work_.reset();
    is_steady_ = false;
    last_.reset();
    if (memory_) memory_->forget();
  }

  void begin_anew() {
    forget();
    watcher_.forget_obstacles();
  }

  std::int64_t replays_ = 0;
  std::string why_not_;

 private:
  // A plan's too, which so counts what a step has for itself.
  bool is_gpu() const { return device_.kind() == DeviceKind::cuda && !device_.is_host(); }
  static std::optional<std::int64_t> random_row() { return autograd::random_state().first_row; }

  // Into tensors that stay where they are.
  void take(const std::vector<Tensor>& inputs) {
    const NoGradGuard values_only;
    if (!has_inputs_) {
      const StepMemory::Scope own(*memory_);
      std::vector<Tensor> own_inputs;
      for (const Tensor& t : inputs) {
        TESSERA_EXPECT(
            t.defined() && t.device() == device_,
            "captured step: an input lies on another device than the step; move it there");
        own_inputs.push_back(Tensor::empty(t.shape(), t.dtype(), device_));
      }
      inputs_ = std::move(own_inputs);
      has_inputs_ = true;
    }
    TESSERA_EXPECT(inputs.size() == inputs_.size(), "captured step: the call has ", inputs.size(),
                   " inputs, the first call had ", inputs_.size(),
                   "; give the same number each time");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& to = inputs_[i];
      TESSERA_EXPECT(inputs[i].defined() && inputs[i].shape() == to.shape() &&
                         inputs[i].dtype() == to.dtype() && inputs[i].device() == device_,
                     "captured step: input ", i, " is not ", to.dtype(), " of ", to.shape(),
                     " on the step's device, as in the first call");
      raw::copy_into(to, inputs[i]);
    }
  }

  // The function, and copies of what it returns.
  void run() {
    const StepWatcher::Inside inside(watcher_);
    const StepMemory::Scope own(*memory_);
    const std::vector<Tensor> given = function_(inputs_);
    for (const Tensor& t : given)
      TESSERA_EXPECT(t.defined(), "captured step: the function returns an undefined tensor");
    const NoGradGuard values_only;
    if (outputs_.empty())
      for (const Tensor& t : given)
        outputs_.push_back(Tensor::empty(t.shape(), t.dtype(), t.device()));
    TESSERA_EXPECT(given.size() == outputs_.size(), "captured step: the function returns ",
                   given.size(), " tensors, before it returned ", outputs_.size(),
                   "; return the same number each time");
    for (std::size_t i = 0; i < given.size(); ++i) raw::copy_into(outputs_[i], given[i]);
    decisions_ = decisions();
  }

  void rehearse() {
    const std::optional<std::uint64_t> before = std::exchange(last_, std::nullopt);
    why_not_ = "the step's memory was given to others since the call before";
    is_steady_ = false;
    const std::optional<std::int64_t> row = random_row();
    run();
    last_ = watcher_.fingerprint();
    is_steady_ = before == last_;
    if (!dropped_.empty())
      why_not_ = std::exchange(dropped_, {});
    else if (std::exchange(has_decided_, false))
      why_not_ =
          "the program has changed a setting: what is trained, a rate, how units reduce, or a mode";
    else if (!watcher_.obstacle().empty())
      why_not_ = watcher_.obstacle();
    else if (is_steady_ && !work_)
      why_not_ = "the next call captures the step";
    else if (const std::string other = watcher_.difference(); !work_)
      why_not_ = other.empty()
                     ? "the step has run only once since it began anew"
                     : concat(other, " was another in the call before, or had other addresses");
    if (captured_ != *last_ || first_row_ != row) work_.reset();
  }

  void capture() {
    const autograd::RandomState begin = autograd::random_state();
    DeviceContext& context = device_.context();
    memory_->forget();
    context.begin_capture();
    try {
      const StepMemory::InUse in_use(*memory_);
      const autograd::StepDraws draws(begin);
      run();
      work_ = context.end_capture();
    } catch (...) {
      run_begun();
      forget();
      throw;
    }
    work_->cost = watcher_.cost();
    const bool is_as_before = memory_->settle();
    captured_ = watcher_.fingerprint();
    first_row_ = begin.first_row;
    draws_ = autograd::random_state().draws - begin.draws;
    last_row_ = autograd::random_state().first_row;
    memory_->upload();
    run_again(true);
    if (!is_as_before || captured_ != last_ || !watcher_.obstacle().empty())
      forget();  // right for this step, but not for the next
  }

  // What the step has submitted before it threw runs, as without a capture.
  void run_begun() {
    DeviceContext& context = device_.context();
    if (!context.is_capturing()) return;
    try {
      work_ = context.end_capture();
      memory_->upload();
      run_again(true);
    } catch (...) {
      if (context.is_capturing()) context.drop_capture();
    }
  }

  void replay() {
    if (ends_.size() == 2) {
      device_.block(ends_.front());
      ends_.pop_front();
    }
    {
      const StepMemory::InUse in_use(*memory_);
      memory_->renew();
    }
    autograd::random_state().draws += draws_;
    autograd::random_state().first_row = last_row_;
    memory_->upload();
    run_again(false);
  }

  void run_again(bool is_first) {
    DeviceContext& context = device_.context();
    context.replay(*work_, is_first);
    constexpr StreamId compute = StreamId::compute;
    ends_.push_back(context.event_covering(compute, context.clock(compute)[compute]));
    ++replays_;
  }

  Device device_;
  Function function_;
  StepWatcher watcher_;
  std::optional<StepMemory> memory_;
  bool has_inputs_ = false;
  std::vector<Tensor> inputs_, outputs_;
  std::optional<std::uint64_t> last_;  // fingerprint of the last run
  bool is_steady_ = false;             // the run before had the same
  Decisions decisions_;                // at its end
  bool has_decided_ = false;           // otherwise since
  std::string dropped_;                // why the device has dropped the graph, to be told
  std::optional<CapturedWork> work_;
  std::uint64_t captured_ = 0;                        // its fingerprint
  std::optional<std::int64_t> first_row_, last_row_;  // of the random state, before and after it
  std::uint64_t draws_ = 0;                           // that it takes
  std::deque<Event> ends_;                            // of the last two replays
};

CapturedStep::CapturedStep(const Device& device, Function function)
    : impl_(std::make_unique<Impl>(device, std::move(function))) {}
CapturedStep::~CapturedStep() = default;

const std::vector<Tensor>& CapturedStep::operator()(const std::vector<Tensor>& inputs) {
  return impl_->call(inputs);
}
std::int64_t CapturedStep::replays() const noexcept { return impl_->replays_; }
const std::string& CapturedStep::why_not() const noexcept { return impl_->why_not_; }
void CapturedStep::forget() { impl_->begin_anew(); }

}  // namespace tessera
