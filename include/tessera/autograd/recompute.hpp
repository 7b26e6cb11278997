// Recomputation of activations: memory for time. Models wrap their blocks in it.
//
//   forward    y = f(x), nothing inside f is kept ─────── y
//   backward   y' = f(x) again, with history ── backward of y' ── gradient of x
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera {

namespace autograd {

// The regions of the calls inside a recomputed function, handed from its first run to its second.
// The first run records no node, yet the sharding engine must know already where backward meets
// each call. So it makes the call's region in the first run and keeps it here; in the second run
// the same call takes that region, and its nodes get it.
//
//   forward    first run    keep(region of block 0)
//   backward   second run   take(block 0's) ── its nodes ── the region ends
class RecomputedRegions {
 public:
  // Of the function that runs on this thread now, null outside of recomputation.
  static RecomputedRegions* current() noexcept;

  bool is_first_run() const noexcept { return first_run_; }
  void keep(std::shared_ptr<Region> region) { regions_.push_back(std::move(region)); }
  // The first one left for which `is_mine` holds, null for none. Inside the first run of a function
  // that is recomputed within another, one that the outer one has kept.
  std::shared_ptr<Region> take(const std::function<bool(Region&)>& is_mine);

 private:
  friend class RecomputeGuard;
  RecomputedRegions* outer_ = nullptr;
  bool first_run_ = true;
  std::vector<std::shared_ptr<Region>> regions_;
};

}  // namespace autograd

// f(x), keeping x only; backward runs f once more, with the same random draws, and then its
// backward. The gradients are the ones that f(x) itself would have had, bit by bit.
//
// Of tensors with history f may use x and leaves (parameters), and it must give the same result
// each time. Without gradients enabled this is f(x). Throws: what f throws, here or in backward;
// ContractError in backward when f uses the result of another operation that this backward runs.
Tensor recompute(std::function<Tensor(const Tensor&)> f, const Tensor& x);

}  // namespace tessera
