// A rank's batches as tensors, for a range-for loop:
//
//   const data::BatchesOptions mine{.rank = 0, .world = 2, .steps = 100};
//   for (auto [tokens, targets] : data::Batches(loader, mine, device)) ...
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/data/token_file.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::data {

struct Batch {
  Tensor tokens, targets;  // i32 [global_batch / world, T]
};

// The rank-th part of each of the steps first_step .. first_step + steps - 1.
struct BatchesOptions {
  int rank = 0, world = 1;
  std::int64_t first_step = 0, steps = 0;
};

// The loader must outlive it. Requires: world divides the loader's global batch; 0 <= rank < world.
// Throws: ContractError otherwise.
class Batches {
 public:
  Batches(const TokenLoader& loader, const BatchesOptions& options, const Device& device)
      : loader_(loader), options_(options), device_(device) {
    TESSERA_EXPECT(options.world > 0 && loader.options().global_batch % options.world == 0,
                   "Batches: ", options.world, " ranks do not divide a global batch of ",
                   loader.options().global_batch, "; choose a multiple of the ranks");
  }
  Batches(const TokenLoader&&, const BatchesOptions&, const Device&) = delete;  // it would be gone

  class iterator {
   public:
    iterator(const Batches* of, std::int64_t step) : of_(of), step_(step) {}
    Batch operator*() const { return of_->at(step_); }
    iterator& operator++() {
      ++step_;
      return *this;
    }
    bool operator==(const iterator&) const = default;

   private:
    const Batches* of_;
    std::int64_t step_;
  };
  iterator begin() const { return {this, options_.first_step}; }
  iterator end() const { return {this, options_.first_step + options_.steps}; }

 private:
  Batch at(std::int64_t step) const {
    const Shape shape{loader_.options().global_batch / options_.world, loader_.options().seq_len};
    std::vector<std::int32_t> inputs(static_cast<std::size_t>(shape.numel())),
        targets(inputs.size());
    loader_.batch(step, options_.rank, options_.world, 0, inputs, targets);
    const OwnerGuard owner(device_, "batch");
    return {Tensor::from(inputs, shape, device_), Tensor::from(targets, shape, device_)};
  }

  const TokenLoader& loader_;
  BatchesOptions options_;
  Device device_;
};

}  // namespace tessera::data
