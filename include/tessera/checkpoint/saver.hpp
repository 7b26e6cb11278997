// Checkpoints that training does not wait for: `checkpoint::save` in three parts. Only the first
// holds a step up, by a copy of its values to the host.
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

// Saves into one folder, one save at a time. All calls are collective, except those marked "alone".
// Threads: the rank's submitting thread.
class Saver {
 public:
  // Alone. `world` outlives it.
  Saver(std::string folder, const World& world, const CheckpointOptions& options = {});
  // Alone. Gives up what is still being written, and says so in a line of the log.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Alone. Takes the memory that saves of such parts need, and touches it. It is as large as this
  // rank's values. It lies on Device::host, pinned for a GPU, and is booked as "checkpoint
  // staging". It is kept until the end. Without this call the first save takes it. Throws:
  // OutOfMemory.
  void prepare(const std::vector<Part>& parts);

  // Copies the values that these parts have at this point of the program, so later steps may change
  // all of them. The writing begins with the next poll. If the save before is not done, this waits
  // for it, and says so in the log. Throws: as checkpoint::save where it can be known by now, and
  // as `poll`; ContractError for the step that is in flight.
  void save(std::int64_t step, const std::vector<Part>& parts, const Scalars& scalars);

  // Hears how far the ranks are, and goes on with the save in flight. Call it now and then, as
  // after each step. It costs a sum of 8 bytes over the ranks, and a few more sums when all have
  // written.
  //   Throws: on every rank the same, with the rank on which it was: what checkpoint::save throws
  // while it writes. Nothing of that save is left, and the next one is made as if it had not been.
  void poll();
  // The same for a program that sums over all ranks anyway, in f32 or wider. term() is this rank's
  // term, which it gives alone. poll(sum) takes the sum over all ranks.
  double term();
  void poll(double sum);
  // Polls until nothing is in flight. After 10 s, and each 10 s more, a line of the log names the
  // rank that has most left to write.
  void wait();

  // Alone. The step that is being saved, and the last one that was saved; the same on every rank.
  std::optional<std::int64_t> in_flight() const;
  std::optional<std::int64_t> saved() const;

 private:
  friend void save(const std::string&, std::int64_t, const std::vector<Part>&, const Scalars&,
                   const World&, const CheckpointOptions&);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::checkpoint
