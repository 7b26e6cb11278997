// The checkpoints of a run: which one it goes on from, whether that fits, and when the next one is
// due. The keys of `checkpoint.*` are torchtitan's (0.2.2).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/saver.hpp"
#include "tools/train/inputs.hpp"
#include "tools/train/trainer.hpp"

namespace tessera::train {

// A save that failed, on all ranks alike: they can end in order.
class SaveFailed : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

class RunCheckpoints {
 public:
  using Say = std::function<void(const std::string& line)>;

  // Looks up, on rank 0 for all, where the run goes on, and whether it may: the same model, data
  // and seed. Checks that the folder takes checkpoints of `parameters` weights, as many as will be
  // kept and one more. Collective, and before any memory is taken.
  // Throws: DataError that names the key.
  RunCheckpoints(const Config& config, const Inputs& inputs, const World& world,
                 std::int64_t parameters);

  // Where the run goes on: the step, counted from 0, and the first sample of it.
  std::int64_t first_step() const noexcept { return first_step_; }
  std::int64_t first_sample() const noexcept { return first_sample_; }
  // Takes the memory of saves that the run does not wait for, as the plan does.
  void prepare(Trainer& trainer);
  // Loads what there is, and says so. Collective.
  void resume(Trainer& trainer, const Say& say);
  // Whether one is due behind step `done`, counted from 1. `is_last`: the run ends there.
  bool is_due(std::int64_t done, bool is_last) const;
  // Saves, or begins to. Collective.  Throws: as checkpoint::save, SaveFailed in the place of
  // DataError; so do the calls below, for the save in flight.
  void save(Trainer& trainer, std::int64_t done, std::int64_t samples, const Say& say);
  // What this rank gives to a step, and what the sum over the ranks says. Collective.
  double term() { return saver_ ? saver_->term() : 0; }
  void poll(double sum, const Say& say);
  // Waits until what was begun is saved. Collective.
  void finish(const Say& say);

 private:
  using Time = std::chrono::steady_clock::time_point;

  void find();
  void take_folder();
  checkpoint::CheckpointOptions options() const;
  void check_room(std::int64_t bytes) const;
  template <class F>
  void saving(std::int64_t step, const F& f) const;
  void tell(std::int64_t step, Time begin, const Say& say) const;
  void tell_saved(const Say& say);
  void check_fit() const;
  bool leaves_out(std::string_view what) const;
  const char* from_key() const;  // which names where `from_` is

  const Config& config_;
  const World& world_;
  checkpoint::Scalars facts_;                   // of this run, as the next one compares them
  std::optional<checkpoint::FolderLock> lock_;  // until all is saved
  std::optional<checkpoint::Checkpoint> from_;
  bool is_own_ = false;  // `from_` is of checkpoint.folder
  std::int64_t first_step_ = 0, first_sample_ = 0, saved_ = -1;
  std::optional<checkpoint::Saver> saver_;  // of checkpoint.async_mode
  std::map<std::int64_t, Time> begun_;      // by step, until it is told that it is saved
};

}  // namespace tessera::train
