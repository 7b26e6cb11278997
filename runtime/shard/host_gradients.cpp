#include "runtime/shard/host_gradients.hpp"

#include <utility>

#include "runtime/shard/gradient_piece.hpp"
#include "runtime/shard/host_link.hpp"

namespace tessera::shard {

void HostGradients::place(Reduction& r) {
  sums_ = shards_.host()->take_sums(
      r.last, piece_.shard_bytes() / static_cast<std::int64_t>(size_bytes(shards_.reduce_dtype())),
      shards_.reduce_dtype());
  r.sums = piece_.sums_in(sums_);
}

void HostGradients::pass(Reduction& r) {
  r.reduced = shards_.host()->add_to(piece_.values_of(r.gradient), piece_.counts_of(r.gradient),
                                     std::exchange(sums_, {}), r.last, r.is_fresh);
}

}  // namespace tessera::shard
