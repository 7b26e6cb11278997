// Programs with a bug, which run a second time with the one line that mends it.
#pragma once

#include <functional>
#include <mutex>
#include <source_location>
#include <string>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::tour {

class Weight;

// One run of such a program: on ranks under the race checker, and what has named the bug.
class Run {
 public:
  enum class Version { broken, mended };
  explicit Run(Version version) : version_(version) {}

  // Whether the line that asks does what is right. The place of that line is kept.
  bool is_mended(std::source_location at = std::source_location::current());
  // Runs `body` as each of two ranks.
  void on_ranks(const std::function<void(World&)>& body);
  // The same, with a weight that lasts until nothing uses it.
  void by_hand(const std::function<void(Weight&)>& body);
  // What a test of the program would assert.
  void expect(bool condition, const std::string& message);

  // What an exception, the race checker or `expect` has said, the first of each; empty for nothing.
  std::string error, race, test;
  std::string line_to_mend;  // "01_gather_too_early.cpp:17"

 private:
  Version version_;
  std::mutex mutex_;  // ranks are threads
};

// One weight as lesson 75 shards it, with its steps apart and without the waits between them: those
// are what a program adds, or forgets. On two ranks, two rows each.
class Weight {
 public:
  explicit Weight(const World& world);

  // On `compute`: the optimizer writes this rank's rows; a product reads all rows; backward writes
  // the gradients of all rows; the optimizer reads the sums of this rank's.
  void write() { raw::fill(rows, 1); }
  void use() { product = raw::mul(full, 2); }
  void backward(double gradient) { raw::fill(unreduced, gradient); }
  void update() { raw::axpby(rows, gradient, -1, 1); }
  // On `gathers` and `reduces`, of all ranks.
  void gather();
  void reduce();

  const World& world;
  Stream compute, gathers, reduces;

 private:
  std::shared_ptr<SymmetricMemory> memory_;
  LastUse rows_use_, unreduced_use_;

 public:
  Tensor rows, gradient;   // [2, 2], this rank's
  Tensor full, unreduced;  // [4, 2]
  Tensor product;          // what `use` computes
};

// A layer of one weight, which is 1, as a unit of its own: y = w x.
class OneWeight : public nn::Module {
 public:
  explicit OneWeight(const World& world, const MixedPrecision& precision = {});
  Tensor operator()(const Tensor& x) {  // [n, 1] -> [n, 1]
    return call([&] { return layer(x); });
  }
  // The sum over the ranks of what `of` the weight each has: the value or gradient itself.
  double weight() const;
  double gradient() const;

  nn::Linear layer;

 private:
  const World& world_;
};
// [n, 1]
Tensor column(const World& world, const std::vector<float>& values);

void gather_too_early(Run& run);
void slot_filled_too_early(Run& run);
void gather_before_the_update(Run& run);
void reduction_too_early(Run& run);
void update_before_the_sum(Run& run);
void gradient_overwritten(Run& run);
void host_reads_too_early(Run& run);
void gradient_not_divided(Run& run);
void cast_before_the_sum(Run& run);
void mean_of_means(Run& run);
void same_batch_everywhere(Run& run);
void norm_of_a_shard(Run& run);
void gradients_never_cleared(Run& run);
void micro_batches_not_divided(Run& run);
void parameter_kept(Run& run);
void parameter_outside(Run& run);
void reduction_left_out(Run& run);
void loaded_too_late(Run& run);
void backward_left_out(Run& run);
void collective_of_rank_0(Run& run);

}  // namespace tessera::tour
