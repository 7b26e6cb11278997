// What all optimizers share: state over flat groups, one fused launch per group and step, and no
// host sync.
//
//   optim::AdamW optimizer(model.parameters(), {.lr = 3e-4});   before or after sharding
//   optimizer.prepare();                                        state exists before the first step
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// A group whose gradient is undefined is skipped. A parameter for which no rank had a gradient is
// skipped on the device, by its arrival count of 0. An update works on this rank's f32 shards only.
// State exists only for the optimizer's own trainable parameters. It follows them through
// fully_shard, and as they are frozen and thawed (Parameter::set_trainable).
//
// An optimizer of your own derives from Optimizer and says two things: the scalars of a step, and
// one launch that updates one group. Lesson tests/tour/095_your_own_optimizer.cpp writes one. An
// optimizer that updates some parameters in another way has several kinds of parameters. An
// optimizer that keeps state of other shapes than its parameters' declares it by states_of, and
// updates tensors in update_together: tests/support/adafactor.hpp is one.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
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

  // Updates element by element, by a formula over V of kernels/update_formulas.hpp:
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
// the segments itself; kernels::FlatSegment says where each lies in the arrays. The arrays of
// offloaded units lie on the host, beside a GPU, too. So their body runs there, and its
// Exec::driver is null.
struct FlatUpdate {
  float* values;
  const float* gradient;
  float* moments[kernels::kMostMoments];
  const FlatSegment* segments;
  const float* counts;  // arrival counts, see kernels::FlatSegment
  const void* scalars;  // as put_scalars has written them
  std::int32_t segment_count;

  // Calls f(FlatRange) for all elements to update, on the CPU, on the threads of `exec`.
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

// State of any shape that an optimizer keeps of one parameter besides moments; zeros at first.
struct StateShape {
  // Rows are cut over the ranks as the parameter's are, along the same dimension. A whole state is
  // on every rank, and every rank writes the same to it.
  enum class Cut : std::uint8_t { rows, whole };
  std::string name;  // what state dicts and files call it, behind the parameter's name and a dot
  Shape shape;       // the global one; of rows, with as many as the parameter has where it is cut
  Cut cut = Cut::rows;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Makes the state: zero moments, tables, scalars. If parameters were sharded, frozen or thawed
  // since, the state follows them, and moments of frozen parameters go. A step or a load calls it
  // if nobody has. A call that only looks at the state, as state_dict, leaves the moments of frozen
  // ones. Throws: ContractError for a parameter without memory, and for groups on several devices.
  void prepare();
  // Makes one update from the gradients as they are. Every call counts as one step for all
  // parameters. All ranks make, set and load the same steps. If one has another number, the next
  // gather or reduction of such parameters is a CommError on every rank. Throws: as prepare;
  // ContractError for gradients that wait unreduced, and for parameters that nobody has
  // initialised, loaded or edited.
  void step();
  // The same step, if `condition`, boolean [], holds when the device comes to it. Otherwise values,
  // moments and the count of steps stay as they are, and its gradients count as none. The host does
  // not wait for the condition now. It blocks with the next step, which needs the count, or earlier
  // in steps() or a state dict. Every rank has the same condition. Throws: as step; ContractError
  // for a condition of another kind or device, and in a captured step.
  void step_if(const Tensor& condition);
  // Drops the gradients of its parameters: there is none until the next backward. In a group that
  // has other parameters, too, their gradients stay. Zeros with an arrival count of 0 take the
  // place of the dropped ones.
  void zero_grad();

  // Sets another weight decay for some of its parameters, and a factor on their learning rate,
  // which is 1 at first. Both hold from the next step on. For example norms and biases get a weight
  // decay of 0; nn::select finds them by name. A group is updated in one launch all the same.
  // Throws: ContractError for a parameter that is not its own, and for a value that is negative or
  // not finite.
  void set_weight_decay(const std::vector<Parameter>& of, double weight_decay);
  void set_lr_factor(const std::vector<Parameter>& of, double factor);

  // Adds parameters, with the weight decay and the factor that the optimizer was made with
  // (PyTorch: add_param_group). Their moments begin as 0 at the count of steps so far. A parameter
  // that it has already stays as it is. Throws: ContractError for an undefined one; then nothing is
  // added.
  void add_parameters(const std::vector<Parameter>& parameters);

  double lr() const noexcept { return lr_; }
  void set_lr(double lr);  // throws: ContractError for what is negative or not finite

  std::vector<Parameter> parameters() const;  // its own, in the order in which they were given

  // For saving and restoring.
  //   steps: steps taken so far. A reset takes back those that never began. The host blocks if the
  // last was a step_if.
  //   moments: this rank's rows of a parameter's moments, to be read and written; none before
  // prepare(), and none if it is frozen.
  //   states: the state of each group, in order of first mention. A group has one for each kind of
  // parameters.
  std::int64_t steps() const;
  void set_steps(std::int64_t steps);  // on every rank alike; ContractError outside [0, 2^53]
  std::vector<Tensor> moments(const Parameter& of) const;
  // The moments with their global shape and mesh; see distributed/distributed_tensor.hpp. Throws:
  // ContractError for a parameter of no unit.
  std::vector<DistributedTensor> distributed_moments(const Parameter& of) const;
  // This rank's part of what states_of declares under `name`, f32, to be read and written: [rows,
  // ...] or the whole. Undefined before prepare(), and of what is frozen.
  // Throws: ContractError for a parameter that is not its own, and a name that it does not have.
  Tensor state(const Parameter& of, std::string_view name) const;
  struct GroupState {
    std::shared_ptr<FlatGroup> group;  // not for programs to change
    // f32, of the optimizer's own parameters only; their meaning is the optimizer's
    std::vector<Tensor> moments{};
    Tensor segments{};  // table of FlatSegment
    std::int32_t segment_count = 0;
    std::uint64_t layouts = 0;  // the group's, when this was laid out
    std::size_t kind = 0;       // of these parameters
  };
  const std::vector<GroupState>& states() const noexcept { return states_; }

  // All that it keeps, by the names that `model` gives its parameters (PyTorch:
  // get_optimizer_state_dict, flattened). `model` is a module around all of them. The state is made
  // if it does not exist yet.
  //
  //   steps  i64 []   lr  f64 []                    of all
  //   blocks.0.up.weight.exp_avg  f32 [rows, ...]   of AdamW, with exp_avg_sq; of SGD with momentum
  //                                                 and Muon's matrices momentum_buffer; none of
  //                                                 what is frozen
  //   blocks.0.up.weight.row  f32 [rows, 1]         of what states_of declares: rows, or a whole
  //   blocks.0.up.weight.lr_factor  f64 []          likewise weight_decay
  //
  // Collective with StateForm::full.  Throws: ContractError for a parameter of the optimizer that
  // the model does not have; as prepare and make_state_dict (distributed/state.hpp).
  template <class Model>
  StateDict state_dict(const Model& model, const StateDictOptions& options = {}) {
    return state_dict(model.named_parameters(), options);
  }
  StateDict state_dict(const NamedParameters& names, const StateDictOptions& options = {});
  // Takes such a state back: this rank's rows on a mesh of the same size, or whole tensors on any
  // number of ranks. It looks at everything first, and changes nothing when it refuses. Throws:
  // ContractError that names what is missing, unexpected, of another shape, or out of range; as
  // state_dict.
  template <class Model>
  LoadReport load(const Model& model, const StateDict& state, const LoadOptions& options = {}) {
    return load(model.named_parameters(), state, options);
  }
  LoadReport load(const NamedParameters& names, const StateDict& state,
                  const LoadOptions& options = {});
  // Loads from files: load(model, checkpoint::WeightFiles("adamw.safetensors")). Moments may stand
  // there as the parameters do: in row parts, or transposed. State of other shapes is never
  // transposed. Whole state stands in parts only if it has as many rows as the parameter.
  template <class Model>
  LoadReport load(const Model& model, const StateSource& source, const LoadOptions& options = {}) {
    return load(model.named_parameters(), source, options,
                [&model](std::string_view name) { return model.saves_transposed(name); });
  }
  LoadReport load(const NamedParameters& names, const StateSource& source,
                  const LoadOptions& options = {},
                  const std::function<bool(std::string_view)>& is_transposed = {});

 protected:
  // What an update needs: arrays of f32 state for each group, and bytes of scalars for each step.
  struct Needs {
    int moments = 0;
    std::size_t scalar_bytes = sizeof(kernels::UpdateScalars);
    // The moments' names in state dicts, behind the name of a parameter and a dot.
    std::array<const char*, kernels::kMostMoments> names{"moment_0", "moment_1", "moment_2"};
  };
  Optimizer(const std::vector<Parameter>& parameters, double lr, double weight_decay,
            const Needs& needs);

  // Parameters that are updated in one way: what the update needs for each, and the rates that they
  // begin with.
  struct Kind {
    Needs needs{};  // scalar_bytes are the same for all kinds
    double weight_decay = 0, lr_factor = 1;
  };
  // For several kinds, without parameters yet. add_parameters adds to the first kind.
  Optimizer(double lr, const std::vector<Kind>& kinds);
  // Adds parameters of this kind; see add_parameters.
  void add(const std::vector<Parameter>& parameters, std::size_t kind);

  // Writes this step's scalars, by put_scalars; `step` counts from 1.
  virtual void write_scalars(const Tensor& scalars, std::int64_t step) const = 0;
  // Updates the parameters of one kind in one group, by one call of launch or launch_update; by
  // nothing, if update_together does all of it.
  virtual void update(const GroupState& state, const Tensor& scalars) const = 0;
  // What the optimizer keeps of a parameter besides moments; asked whenever the state is made. A
  // state that is there already stays, as long as name, shape and cut stay. If the parameter is
  // sharded meanwhile, each rank keeps its rows of the state.
  virtual std::vector<StateShape> states_of(const Parameter& /*of*/) const { return {}; }
  // What a step does over all groups together, behind update() of each. It may talk to other ranks,
  // because every rank that takes the step calls it, whatever its shards are. `scalars` is what
  // write_scalars has put, as f32 [scalar_bytes / 4], on the device. Take the rate from there: a
  // replay of a captured step has others than lr() had when it was captured.
  virtual void update_together(const Tensor& /*scalars*/) {}
  // Called when the states were laid out, so that tables that depend on them are made anew. Not
  // collective.
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
  // Submits `body`, which updates one group, to the compute stream. It reads gradient, segments and
  // scalars, and changes values and moments.
  template <class F>
  static void launch(const char* name, const GroupState& state, const Tensor& scalars,
                     const F& body) {
    submit(name, state, scalars, Body(body));
  }
  // Submits an update of the library, which has a body for every device.
  static void launch_update(kernels::UpdateOp op, const GroupState& state, const Tensor& scalars);

  // One of its parameters, and where its moments lie.
  struct Own {
    Parameter parameter;
    std::size_t kind = 0;
    double weight_decay = 0, lr_factor = 1;
    std::size_t state = 0;     // of states()
    std::int64_t offset = -1;  // in that state's moments; -1: none
    ShardSpec spec{};
    struct Kept {
      std::string name;
      ShardSpec spec;  // of world 1 where it is whole
      Tensor values;
    };
    std::vector<Kept> kept{};  // of states_of
  };
  const std::vector<Own>& own() const noexcept { return own_; }

  // What an update that is made of tensor operations works on, of one parameter.
  struct Update {
    Tensor values;    // f32, this rank's rows, to be written
    Tensor gradient;  // f32, the same rows
    // f32 []: on how many ranks it had a gradient. Where that is 0, as in a step_if whose condition
    // does not hold, values and state stay as they are: the device decides, by raw::where.
    Tensor arrivals;
  };
  // For update_together, which every rank calls for the same parameters. Nothing for one that is
  // frozen, or that no backward has reached since zero_grad: on every rank alike.
  std::optional<Update> begin_update(const Own& of);

 private:
  // The source is made where it is asked for: on rank 0 alone, where that sends.
  LoadReport load_from(const NamedParameters& names,
                       const std::function<std::shared_ptr<const StateSource>()>& source,
                       const LoadOptions& options,
                       const std::function<bool(std::string_view)>& is_transposed);
  void update_all(const Tensor& given);  // undefined: always
  void count_step();
  void forget_done_updates();
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
  bool take_states(const GroupState& state, const std::vector<Own*>& own,
                   const Before& before) const;
  const Own& own_of(const char* function, const Parameter& of) const;
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
  Tensor scalars_;                // Needs::scalar_bytes, on the device
  std::vector<bool> is_written_;  // of states_, by begin_update in this step
};

}  // namespace tessera::optim
