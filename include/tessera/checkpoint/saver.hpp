// Checkpoints that training does not wait for: `checkpoint::save` in three parts, of which only the
// first holds a step up, by a copy of its values to the host.
//
//   checkpoint::Saver saver("runs/a", world);
//   saver.prepare(parts());                         takes the host's memory before the first step
//   for (; step < last; ++step) {
//     train(step);
//     saver.poll();                                 throws what has failed, on every rank
//     if (step % 100 == 0) saver.save(step, parts(), {{"samples", samples}});
//   }
//   saver.wait();                                   the last one is on the disk
//
//   compute     step 100 ─┐        ┌─ step 101 ── step 102 ── step 103 ── step 104
//   transfer              └ copies ┘
//   submits     save              poll          poll          poll          poll: it is saved
//   writer                          └ files, fsync ┘ all have?  └ manifest, rename
//
// One thread a rank writes, and that of rank 0 commits. Only the submitting thread communicates.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.hpp"

namespace tessera::checkpoint {

// Saves into one folder, one at a time. All calls are collective but those that say otherwise.
// Threads: the rank's submitting thread.
class Saver {
 public:
  // Alone. `world` outlives it.
  Saver(std::string folder, const World& world, const CheckpointOptions& options = {});
  // Alone. What is still being written is given up, which a line of the log says.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Alone. Takes the memory that saves of such parts need, and touches it: this rank's values on
  // Device::host, pinned for a GPU, booked as "checkpoint staging". It is kept until the end.
  // Without this the first save does.  Throws: OutOfMemory.
  void prepare(const std::vector<Part>& parts);

  // Copies what these parts are in the order of the program: later steps may change all of it.
  // The writing begins with the next poll. Where the save before is not done, waits for it, and
  // says so in the log.  Throws: as checkpoint::save where it can be known by now, and as `poll`.
  void save(std::int64_t step, const std::vector<Part>& parts, const Scalars& scalars);

  // Hears how far the ranks are, and goes on with the save in flight: a sum of 8 bytes, and a few
  // more when all have written. To be called now and then, as after each step.
  // Throws: on every rank the same, with the rank on which it was: what checkpoint::save throws
  // while it writes. Nothing of that save is left, and the next one is made as if it had not been.
  void poll();
  // The same for a program that sums over all ranks anyway, in f32 or wider: this rank's term,
  // alone, and what the sum of all says.
  double term();
  void poll(double sum);
  // Polls until nothing is in flight. After 10 s, and each 10 s more, a line of the log names the
  // rank that has most to write.
  void wait();

  // The step that is being saved, and the last one that was: alone, the same on every rank.
  std::optional<std::int64_t> in_flight() const;
  std::optional<std::int64_t> saved() const;

 private:
  friend void save(const std::string&, std::int64_t, const std::vector<Part>&, const Scalars&,
                   const World&, const CheckpointOptions&);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::checkpoint
