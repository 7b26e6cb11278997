#include "tools/train/run_checkpoints.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <string_view>
#include <utility>

#include "tessera/checkpoint/model.hpp"
#include "tools/train/run_facts.hpp"

namespace tessera::train {
namespace {

constexpr const char* kSamples = "samples";

// The most that one takes: weights and moments in f32.
std::int64_t bytes_of_checkpoint(const Config& config, std::int64_t parameters) {
  const auto& o = config.optimizer;
  const std::int64_t moments = o.name != OptimizerName::sgd  ? 2
                               : o.momentum.value_or(0) != 0 ? 1
                                                             : 0;
  return (1 + moments) * 4 * parameters;
}

// What all ranks find alike, and none in the place of others.
[[noreturn]] void refuse(const std::string& message) {
  throw detail::with_rank(DataError(message), 0);
}

}  // namespace

RunCheckpoints::RunCheckpoints(const Config& config, const Inputs& inputs, const World& world,
                               std::int64_t parameters)
    : config_(config), world_(world), facts_(run_facts(config, inputs)) {
  const auto& c = config.checkpoint;
  find();
  if (from_) check_fit();
  if (!c.load_only) take_folder();
  if (!c.load_only) check_room(bytes_of_checkpoint(config, parameters));
  if (c.stages()) saver_.emplace(c.folder, world, options());
}

checkpoint::CheckpointOptions RunCheckpoints::options() const {
  const auto& c = config_.checkpoint;
  return {.must_be_finite = config_.training.stop_on_nan,
          .keep_latest = c.keep_latest_k,
          .loaded = is_own_ ? std::optional(first_step_) : std::nullopt};
}

// Of one run at a time. What was refused before has made no folder.
void RunCheckpoints::take_folder() {
  const std::string& folder = config_.checkpoint.folder;
  const auto newest = named("checkpoint.folder", [&] {
    checkpoint::check_folder(folder, 0, world_);
    lock_.emplace(folder, world_);
    return checkpoint::newest(folder, world_);
  });
  if (newest && (!is_own_ || *newest > first_step_))
    refuse(concat("checkpoint.folder: another run has just saved step ", *newest, " in '", folder,
                  "'; start again, or name another folder"));
}

// Each checkpoint is written before an older one goes, so there is one more than are kept.
void RunCheckpoints::check_room(std::int64_t bytes) const {
  const auto& c = config_.checkpoint;
  const std::int64_t steps = config_.training.steps;
  // Those that are to come: at multiples of the interval, behind the first step, at the end.
  std::int64_t count = std::max<std::int64_t>(0, steps / c.interval - first_step_ / c.interval);
  if (c.enable_first_step_checkpoint && first_step_ == 0 && c.interval > 1 && steps > 1) ++count;
  if (steps > first_step_ && steps % c.interval != 0) ++count;
  if (c.keep_latest_k > 0) {
    const std::int64_t there = std::ssize(checkpoint::steps_in(c.folder));
    count = std::min(count, std::max<std::int64_t>(1, c.keep_latest_k + 1 - there));
  }
  named(count > 1 ? concat("checkpoint.keep_latest_k=", c.keep_latest_k, ", so room for ", count,
                           " more checkpoints")
                  : std::string("checkpoint.folder"),
        [&] {
          constexpr double kMost = 1ll << 62;  // more than any disk has
          const double all = static_cast<double>(count) * static_cast<double>(bytes);
          checkpoint::check_folder(c.folder, static_cast<std::int64_t>(std::min(all, kMost)),
                                   world_);
        });
}

// A run that goes on in its folder has begun anew what it left out when it began.
bool RunCheckpoints::leaves_out(std::string_view what) const {
  return (!is_own_ || config_.checkpoint.load_only) &&
         config_.checkpoint.exclude_from_loading.find(what) != std::string::npos;
}

const char* RunCheckpoints::from_key() const {
  return is_own_ ? "checkpoint.folder" : "checkpoint.initial_load_path";
}

void RunCheckpoints::find() {
  const auto& c = config_.checkpoint;
  using checkpoint::Broken;
  const bool is_named = c.load_step >= 0;
  const std::optional<std::int64_t> newest = named("checkpoint.folder", [&] {
    return checkpoint::newest(c.folder, world_,
                              is_named && c.load_only ? Broken::passed_over : Broken::refused);
  });
  if (newest && c.load_step >= 0 && c.load_step < *newest && !c.load_only)
    refuse(concat("checkpoint.load_step=", c.load_step, ": '", c.folder, "' has step ", *newest,
                  ", so the steps between would be written twice; name another checkpoint.folder, "
                  "and this folder as checkpoint.initial_load_path"));
  if (newest && !c.load_only && c.initial_load_path.empty() && !c.exclude_from_loading.empty())
    refuse(concat("checkpoint.exclude_from_loading=", c.exclude_from_loading, ": '", c.folder,
                  "' has step ", *newest,
                  ", and a run goes on in its folder with all it has; name "
                  "another checkpoint.folder, and this one as checkpoint.initial_load_path"));
  is_own_ = newest.has_value();
  if (newest) {
    named(from_key(), [&] { from_.emplace(c.folder, c.load_step >= 0 ? c.load_step : *newest); });
  } else if (!c.initial_load_path.empty()) {
    const auto step = named(from_key(), [&] {
      return checkpoint::newest(c.initial_load_path, world_,
                                is_named ? Broken::passed_over : Broken::refused);
    });
    named(from_key(), [&] {
      from_.emplace(step ? checkpoint::step_folder(c.initial_load_path,
                                                   c.load_step >= 0 ? c.load_step : *step)
                         : c.initial_load_path);
    });
    if (!step && c.load_step >= 0 && c.load_step != from_->step())
      refuse(concat("checkpoint.load_step=", c.load_step, ": '", c.initial_load_path, "' is step ",
                    from_->step(), " alone; leave load_step out, or name the folder around it"));
  } else if (c.load_step >= 0) {
    refuse(concat("checkpoint.load_step=", c.load_step, ": '", c.folder,
                  "' has no checkpoint; leave load_step out to begin one"));
  }
  if (!from_) return;
  // Files that are missing or of another save are told before anything is said or made.
  named(from_key(), [&] {
    (void)from_->part("model");
    if (!leaves_out("optimizer")) (void)from_->part("optimizer");
  });
  first_step_ = from_->step();
  saved_ = is_own_ ? first_step_ : -1;
  if (leaves_out("dataloader")) return;
  named(from_key(), [&] {
    constexpr std::int64_t kMost = 1ll << 53;  // more than any run takes
    first_sample_ = from_->integer(kSamples);
    if (first_sample_ < 0 || first_sample_ > kMost)
      throw DataError(concat("checkpoint '", from_->path(), "' says that ", first_sample_,
                             " samples were taken, expected 0 to ", kMost,
                             "; take another checkpoint"));
  });
}

void RunCheckpoints::check_fit() const {
  const auto changed = named(from_key(), [&] { return changed_facts(*from_, facts_); });
  for (const ChangedFact& fact : changed) {
    const bool makes_other = fact.makes == Makes::other_samples ? !leaves_out("dataloader")
                             : fact.makes == Makes::other_state ? !leaves_out("optimizer")
                                                                : fact.makes == Makes::other_run;
    if (makes_other)
      refuse(concat(fact.key, ": '", from_->path(), "' was made with ", fact.then,
                    ", this run has ", fact.now, "; give the same value, or name another ",
                    from_key()));
  }
}

void RunCheckpoints::prepare(Trainer& trainer) {
  if (saver_) saver_->prepare(trainer.parts());
}

void RunCheckpoints::resume(Trainer& trainer, const Say& say) {
  if (!from_) return;
  named(from_key(), [&] {
    trainer.model().load(*from_->part("model"));
    if (!leaves_out("optimizer"))
      trainer.optimizer().load(trainer.model(), *from_->part("optimizer"));
  });
  trainer.set_rates();
  world_.barrier();
  say(concat("checkpoint: the run goes on after step ", first_step_, " of '", from_->path(),
             "', which ", from_->ranks(), from_->ranks() == 1 ? " rank" : " ranks", " saved"));
  for (const auto& [part, what] : {std::pair("optimizer", "the optimizer's state"),
                                   std::pair("dataloader", "the order of samples")})
    if (leaves_out(part)) say(concat("checkpoint: ", what, " begins anew"));
  if (config_.training.steps <= first_step_)
    say(concat("checkpoint: training.steps=", config_.training.steps,
               " are done, so nothing is trained"));
  std::string changed;
  for (const ChangedFact& fact : changed_facts(*from_, facts_))
    changed += concat(changed.empty() ? "" : ", ", fact.key, ' ', fact.then, " -> ", fact.now);
  if (!changed.empty()) say("checkpoint: changed since: " + changed);
}

bool RunCheckpoints::is_due(std::int64_t done, bool is_last) const {
  const auto& c = config_.checkpoint;
  if (c.load_only || done == saved_) return false;
  return is_last || done % c.interval == 0 || (c.enable_first_step_checkpoint && done == 1);
}

// What is said of a save that fails. It could be written when the run began: no bad input. Weights
// that are not finite are no better in another file.
template <class F>
void RunCheckpoints::saving(std::int64_t step, const F& f) const {
  const auto fail = [](const auto& error) {
    throw detail::with_rank(SaveFailed(error.what(), error.where()), std::max(error.rank(), 0));
  };
  try {
    f();
  } catch (const checkpoint::NotFinite& error) {
    const std::string why = concat("training.stop_on_nan: step ", step, ": ", error.what(),
                                   "; lower optimizer.lr or look at the data");
    throw detail::with_rank(DeviceError(why, error.where()), std::max(error.rank(), 0));
  } catch (const DataError& error) {
    fail(error);
  } catch (const DeviceError& error) {
    fail(error);
  }
}

void RunCheckpoints::save(Trainer& trainer, std::int64_t done, std::int64_t samples,
                          const Say& say) {
  const Time begin = std::chrono::steady_clock::now();
  const auto& c = config_.checkpoint;
  checkpoint::Scalars scalars = facts_;
  scalars[kSamples] = samples;
  if (saver_) {
    saving(saver_->in_flight().value_or(done),
           [&] { saver_->save(done, trainer.parts(), scalars); });
    begun_[done] = begin;
    tell_saved(say);  // what this save has waited for
  } else {
    saving(done,
           [&] { checkpoint::save(c.folder, done, trainer.parts(), scalars, world_, options()); });
    tell(done, begin, say);
  }
  saved_ = done;
}

void RunCheckpoints::poll(double sum, const Say& say) {
  if (!saver_ || !saver_->in_flight()) return;
  saving(*saver_->in_flight(), [&] { saver_->poll(sum); });
  tell_saved(say);
}

void RunCheckpoints::finish(const Say& say) {
  if (!saver_ || !saver_->in_flight()) return;
  saving(*saver_->in_flight(), [&] { saver_->wait(); });
  tell_saved(say);
}

void RunCheckpoints::tell_saved(const Say& say) {
  const auto begun = saver_->saved() ? begun_.find(*saver_->saved()) : begun_.end();
  if (begun == begun_.end()) return;
  tell(begun->first, begun->second, say);
  begun_.erase(begun);
}

void RunCheckpoints::tell(std::int64_t step, Time begin, const Say& say) const {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  say(concat("checkpoint: step ", step, " is in '",
             checkpoint::step_folder(config_.checkpoint.folder, step), "', ",
             std::round(took.count() * 100) / 100, " s"));
}

}  // namespace tessera::train
