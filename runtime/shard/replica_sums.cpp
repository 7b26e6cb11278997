#include "runtime/shard/replica_sums.hpp"

#include <utility>

#include "runtime/shard/gradient_piece.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::shard {

void ReplicaSums::place(Reduction& r) {
  to_ = r.sums;
  if (postpones()) {
    terms_ = piece_.staging(shards_.device().reduce().id(),
                            kept_.defined() ? "staging" : "postponed sums");
  } else {
    part_ = replicas_.take(piece_.shard_bytes());
    terms_ = Tensor::wrap(
        Storage::borrowed(shards_.device(), part_.data, part_.bytes, *part_.use),
        {piece_.shard_bytes() / static_cast<std::int64_t>(size_bytes(shards_.reduce_dtype()))},
        shards_.reduce_dtype());
  }
  r.sums = piece_.sums_in(terms_);
}

void ReplicaSums::pass(Reduction& r) {
  postpones() ? keep() : sum(r.sums);
  r.sums = to_;
}

void ReplicaSums::sum(const Sums& terms) {
  {
    const Tensor of_this = std::exchange(terms_, {});
    if (kept_.defined()) piece_.accumulate(shards_.device().reduce(), of_this, kept_, false);
    kept_ = {};
    const Sums parts{&of_this, terms.values, terms.counts};
    const Replicas::Sum sums[] = {{piece_.values_of(parts), piece_.values_of(to_)},
                                  {piece_.counts_of(parts), piece_.counts_of(to_)}};
    replicas_.all_reduce(all_reduce_name(), shards_, sums);
  }
  replicas_.give_back(std::exchange(part_, {}));
}

// The reduce-scatter's sums, added to what is kept of earlier ones.
void ReplicaSums::keep() {
  ++backwards_;
  if (kept_.defined())
    piece_.accumulate(shards_.device().reduce(), kept_, std::exchange(terms_, {}), false);
  else
    kept_ = std::exchange(terms_, {});
}

const char* ReplicaSums::all_reduce_name() {
  const char* const name = piece_.with_what_was_kept(shards_.all_reduce_name());
  const int backwards = std::exchange(backwards_, 0) + 1;
  if (backwards == 1) return name;
  return shards_.device().context().intern(concat(name, " of ", backwards, " backwards"));
}

void ReplicaSums::drop() noexcept {
  terms_ = kept_ = {};
  if (part_.arena) replicas_.give_back(std::exchange(part_, {}));  // a failure came before the sum
  backwards_ = 0;
}

// The terms are reduced on their own stream, before and after.
void ReplicaSums::drop_entry(std::size_t entry, std::int64_t begin, std::int64_t chunk) {
  if (!kept_.defined()) return;
  shards_.device().compute().wait(shards_.device().reduce().record());
  const Sums parts = piece_.sums_in(kept_);
  raw::fill(piece_.values_of(parts).view({chunk}, {1}, begin), 0);
  raw::fill(piece_.counts_of(parts).view({1}, {1}, static_cast<std::int64_t>(entry)), 0);
}

}  // namespace tessera::shard
