// What all optimizers share: state over flat groups, one fused launch per group and step, no host
// sync.
//
//   optim::AdamW optimizer(model.parameters(), {.lr = 3e-4});   before or after sharding
//   optimizer.prepare();                                        state exists before the first step
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// A group whose gradient is undefined is skipped, and so is, on the device, a parameter whose
// arrival count is 0: no rank had a gradient. Works on the f32 shards of this rank only. State is
// there for the optimizer's own trainable parameters alone, and follows them: through fully_shard,
// and as they are frozen and thawed (Parameter::set_trainable).
//
// An optimizer of your own derives from Optimizer and says two things: the scalars of a step, and
// one launch that updates one group. Lesson tests/tour/095_your_own_optimizer.cpp writes one. One
// that updates some parameters in another way than the rest has several kinds of them.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/kernels/updates.hpp"
#include "tessera/param/load_state.hpp"
#include "tessera/param/parameter.hpp"

namespace tessera {
struct FlatGroup;
struct GroupPart;
class StepMemory;
struct UpdateLog;
}  // namespace tessera

namespace tessera::optim {

using kernels::FlatSegment;

// A stretch of one parameter's shard, and its rates.
struct FlatRange {
  float* values;
  const float* gradient;
  float* moments[kernels::kMostMoments];
  std::int64_t numel;
  float lr_factor, weight_decay;

  // Element by element by a formula over V, as kernels/update_formulas.hpp has them:
  //   r.apply<kernels::Element>(kernels::Update<kernels::UpdateOp::adamw, kernels::Element>(s, r));
  template <class V, class Formula>
  void apply(const Formula& formula) const {
    for (std::int64_t i = 0; i < numel; ++i) {
      V kept[kernels::kMostMoments];
      for (int k = 0; k < kernels::kMostMoments; ++k)
        if (moments[k]) kept[k] = V(moments[k][i]);
      values[i] = formula(V(values[i]), V(gradient[i]), moments[0] ? kept : nullptr).v;
      for (int k = 0; k < kernels::kMostMoments; ++k)
        if (moments[k]) moments[k][i] = kept[k].v;
    }
  }
};

// The arrays of one group's update, for a body to hold: 72 of its 128 bytes. A body for a GPU reads
// the segments itself: kernels::FlatSegment says where each lies in the arrays. Those of offloaded
// units lie on the host, beside a GPU too, and so their body runs there: Exec::driver is null.
struct FlatUpdate {
  float* values;
  const float* gradient;
  float* moments[kernels::kMostMoments];
  const FlatSegment* segments;
  const float* counts;  // arrival counts, see kernels::FlatSegment
  const void* scalars;  // as put_scalars has written them
  std::int32_t segment_count;

  // On the CPU: f(FlatRange) over all elements to update, on the threads of `exec`.
  template <class F>
  void for_ranges(Exec& exec, F f) const {
    const auto range = [&](const FlatSegment& s, std::int64_t begin, std::int64_t end) {
      FlatRange r{values + begin, gradient + begin + s.gradient_shift, {}, end - begin, s.lr_factor,
                  s.weight_decay};
      for (int k = 0; k < kernels::kMostMoments; ++k)
        if (moments[k]) r.moments[k] = moments[k] + begin + s.moment_shift;
      f(r);
    };
    kernels::for_segments(exec, segments, segment_count, counts, range);
  }
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Makes the state: zero moments, tables, scalars; or, where parameters were sharded, frozen or
  // thawed since, makes it follow them: moments of what was frozen go. Done by a step or a load if
  // not before; who only looks at the state, as state_dict does, leaves them.
  // Throws: ContractError for a parameter without memory, and for groups on several devices.
  void prepare();
  // One update from the gradients as they are. Every call counts as one step for all parameters.
  // All ranks make, set and load the same steps: the next gather or reduction of what has another
  // number on one is a CommError on every rank.
  // Throws: as prepare; ContractError for parameters that nobody initialised, loaded or edited.
  void step();
  // The same where `condition`, boolean [], holds when the device comes to it; else values, moments
  // and the count of steps stay as they are, and its gradients count as none. The host does not
  // wait for the condition: it blocks for it with the next step, which needs the count, or where
  // steps() or a state dict asks before. Every rank has the same condition.
  // Throws: as step; ContractError for a condition of another kind or device.
  void step_if(const Tensor& condition);
  // Drops the gradients of its parameters: none is there until the next backward. Where a group has
  // others too, they are kept, and zeros with an arrival count of 0 lie where these were.
  void zero_grad();

  // Another weight decay for some of its parameters, as 0 for norms and biases (nn::select finds
  // them by name), and a factor on their learning rate, 1 if never set; from the next step on. A
  // group is updated in one launch all the same.  Throws: ContractError for a parameter that is not
  // its own, and for what is negative or not finite.
  void set_weight_decay(const std::vector<Parameter>& of, double weight_decay);
  void set_lr_factor(const std::vector<Parameter>& of, double factor);

  // Takes more parameters, with the weight decay and the factor that the optimizer was made with
  // (1 unless it says so); their moments begin as 0 at the count of steps so far. One that it has
  // already stays as it is (PyTorch: add_param_group).  Throws: ContractError for an undefined one;
  // nothing is taken then.
  void add_parameters(const std::vector<Parameter>& parameters);

  double lr() const noexcept { return lr_; }
  void set_lr(double lr);  // throws: ContractError for what is negative or not finite

  std::vector<Parameter> parameters() const;  // its own, in the order in which they were given

  // For keeping and restoring: steps taken so far (a reset takes back those that never began; the
  // host blocks where the last was a step_if), this rank's rows of the moments of a parameter, to
  // be read and written (none before prepare(), and where it is frozen), and the state of each
  // group, in order of first mention; one for each kind of parameters that it has of the group.
  std::int64_t steps() const;
  void set_steps(std::int64_t steps);  // on every rank alike; ContractError outside [0, 2^53]
  std::vector<Tensor> moments(const Parameter& of) const;
  // The same with the global shape and the mesh; see distributed/distributed_tensor.hpp.
  std::vector<DistributedTensor> distributed_moments(const Parameter& of) const;
  struct GroupState {
    std::shared_ptr<FlatGroup> group;  // not for programs to change
    // f32, of the parameters that are the optimizer's; what they are says the optimizer
    std::vector<Tensor> moments{};
    Tensor segments{};  // table of FlatSegment
    std::int32_t segment_count = 0;
    std::uint64_t layouts = 0;  // of the group, as this is
    std::size_t kind = 0;       // of these parameters
  };
  const std::vector<GroupState>& states() const noexcept { return states_; }

  // All that it keeps, by the names that `model`, a module around all of its parameters, gives
  // them (PyTorch: get_optimizer_state_dict, flattened). Makes the state where it is not there yet.
  //
  //   steps  i64 []   lr  f64 []                    of all
  //   blocks.0.up.weight.exp_avg  f32 [rows, ...]   of AdamW, with exp_avg_sq; of SGD with momentum
  //                                                 and Muon's matrices momentum_buffer; none of
  //                                                 what is frozen
  //   blocks.0.up.weight.lr_factor  f64 []          likewise weight_decay
  //
  // Collective with StateForm::full.  Throws: ContractError for a parameter of the optimizer that
  // the model does not have; as prepare and make_state_dict (distributed/state.hpp).
  template <class Model>
  StateDict state_dict(const Model& model, const StateDictOptions& options = {}) {
    return state_dict(model.named_parameters(), options);
  }
  StateDict state_dict(const NamedParameters& names, const StateDictOptions& options = {});
  // Takes it back: this rank's rows on a mesh of the same size, or whole tensors on any number of
  // ranks. Looks at everything first, and changes nothing when it refuses.
  // Throws: ContractError naming what is missing, unexpected, of another shape, or out of range;
  // as state_dict.
  template <class Model>
  LoadReport load(const Model& model, const StateDict& state, const LoadOptions& options = {}) {
    return load(model.named_parameters(), state, options);
  }
  LoadReport load(const NamedParameters& names, const StateDict& state,
                  const LoadOptions& options = {});
  // The same from files: load(model, checkpoint::WeightFiles("adamw.safetensors")). Moments may
  // stand there as the parameters do: in row parts, or transposed.
  template <class Model>
  LoadReport load(const Model& model, const StateSource& source, const LoadOptions& options = {}) {
    return load(model.named_parameters(), source, options,
                [&model](std::string_view name) { return model.saves_transposed(name); });
  }
  LoadReport load(const NamedParameters& names, const StateSource& source,
                  const LoadOptions& options = {},
                  const std::function<bool(std::string_view)>& is_transposed = {});

 protected:
  // What an update keeps and is told: arrays of f32 state a group, and bytes of scalars.
  struct Needs {
    int moments = 0;
    std::size_t scalar_bytes = sizeof(kernels::UpdateScalars);
    // What state dicts call them, behind the name of a parameter and a dot.
    std::array<const char*, kernels::kMostMoments> names{"moment_0", "moment_1", "moment_2"};
  };
  Optimizer(const std::vector<Parameter>& parameters, double lr, double weight_decay,
            const Needs& needs);

  // Parameters that are updated in one way: what that keeps of each, and the rates that they begin
  // with.
  struct Kind {
    Needs needs{};  // scalar_bytes are the same for all kinds
    double weight_decay = 0, lr_factor = 1;
  };
  // Of several kinds, without parameters yet. What add_parameters takes is of the first.
  Optimizer(double lr, const std::vector<Kind>& kinds);
  // As add_parameters.
  void add(const std::vector<Parameter>& parameters, std::size_t kind);

  // Writes this step's scalars, by put_scalars; `step` counts from 1.
  virtual void write_scalars(const Tensor& scalars, std::int64_t step) const = 0;
  // Updates the parameters of one kind in one group, by one launch or launch_update.
  virtual void update(const GroupState& state, const Tensor& scalars) const = 0;
  // What a step does over all groups together, behind update() of each. Collective where it talks
  // to other ranks: it is called on every rank that takes the step, whatever its shards are.
  virtual void update_together(const Tensor& /*scalars*/) {}
  // The states were laid out: tables that follow them are to be made anew. Not collective.
  virtual void has_laid_out() {}

  // Writes a plain struct of at most 88 bytes where the device reads it. The values travel with the
  // launch, without staging.
  template <class Scalars>
  static void put_scalars(const Tensor& to, const Scalars& scalars) {
    static_assert(std::is_trivially_copyable_v<Scalars> && sizeof(Scalars) % 4 == 0 &&
                  sizeof(Scalars) <= kernels::kMostScalarBytes);
    put(to, &scalars, sizeof(Scalars));
  }
  static FlatUpdate pointers(const GroupState& state, const Tensor& scalars);
  // Submits `body`, which updates one group, to the compute stream: as reading gradient, segments
  // and scalars, and changing values and moments.
  template <class F>
  static void launch(const char* name, const GroupState& state, const Tensor& scalars,
                     const F& body) {
    submit(name, state, scalars, Body(body));
  }
  // The same of an update that the library has, with a body for every device.
  static void launch_update(kernels::UpdateOp op, const GroupState& state, const Tensor& scalars);

  // One of its parameters, and where its moments lie.
  struct Own {
    Parameter parameter;
    std::size_t kind = 0;
    double weight_decay = 0, lr_factor = 1;
    std::size_t state = 0;     // of states()
    std::int64_t offset = -1;  // in the moments there; -1: has none
    ShardSpec spec{};
  };
  const std::vector<Own>& own() const noexcept { return own_; }

 private:
  // The source is made where it is asked for: on rank 0 alone, where that sends.
  LoadReport load_from(const NamedParameters& names,
                       const std::function<std::shared_ptr<const StateSource>()>& source,
                       const LoadOptions& options,
                       const std::function<bool(std::string_view)>& is_transposed);
  void update_all(const Tensor& given);  // undefined: always
  void count_step();
  void count_replays(StepMemory& step);
  static void put(const Tensor& to, const void* scalars, std::size_t bytes);
  static void submit(const char* name, const GroupState& state, const Tensor& scalars,
                     const Body& body);
  // own.*rate = value, for those given.
  void set(const char* what, double Own::* rate, const std::vector<Parameter>& of, double value);
  bool is_current() const;
  // Those, or where parameters are not as the tables are, looked up one by one.
  std::shared_ptr<const std::vector<GroupPart>> parts() const;
  // What was there before the state is made anew.
  struct Before {
    std::vector<Own> own;
    std::vector<GroupState> states;
  };
  // Whether moments of what was frozen are left.
  enum class Frozen : std::uint8_t { stays, goes };
  void follow(Frozen moments);
  void make_states(const Before& before, Frozen moments);
  static std::int64_t lay_out(GroupState& state, const std::vector<Own*>& own, Frozen moments);
  bool take_moments(GroupState& state, const std::vector<Own*>& own, std::int64_t numel,
                    const Before& before) const;
  static void keep_moments(const Own& from, const GroupState& held, const Own& to,
                           const GroupState& state);
  std::vector<std::pair<std::string, const Own*>> named(const char* function,
                                                        const NamedParameters& names) const;
  // Throw: ContractError for what is out of range.
  static void expect_rate(const char* what, double value);
  static void expect_steps(const char* what, std::int64_t steps);

  std::vector<Own> own_;
  std::map<const void*, std::size_t> own_of_;  // a parameter's index there, by its id
  double lr_;
  bool rates_changed_ = false, holds_frozen_ = false;
  bool are_set_ = false;  // all that it trains, not the zeros of their memory
  std::vector<Kind> kinds_;
  std::shared_ptr<UpdateLog> log_;
  std::vector<GroupState> states_;
  // Their gradients, as the tables are.
  std::shared_ptr<const std::vector<GroupPart>> parts_;
  Tensor scalars_;  // Needs::scalar_bytes, on the device
};

}  // namespace tessera::optim
