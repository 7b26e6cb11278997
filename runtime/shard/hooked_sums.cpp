#include "runtime/shard/hooked_sums.hpp"

#include "runtime/shard/gradient_piece.hpp"

namespace tessera::shard {

// Tensors' own operations run on compute, which nothing here orders with another stream.
void HookedSums::pass(Reduction& r) {
  const ReductionPolicy& policy = shards_.reductions();
  const Stream stream = policy.hook_stream ? shards_.device().stream(*policy.hook_stream) : r.last,
               compute = shards_.device().compute();
  if (stream.id() != r.last.id()) stream.wait(r.last.record());
  const Tick before = stream.clock()[stream.id()], computed = compute.clock()[compute.id()];
  policy.hook({piece_.values_of(r.sums), piece_.counts_of(r.sums), stream});
  const Tick now = compute.clock()[compute.id()];
  TESSERA_EXPECT(
      now == computed || stream.id() == compute.id() ||
          (compute.clock()[stream.id()] >= before && stream.clock()[compute.id()] >= now),
      "unit '", shards_.name(),
      "': its all-reduce hook has queued operations on compute, where operations of tensors run, "
      "while the gradients are on ",
      name(stream.id()),
      shards_.has_replicas() ? "; " : "; give set_all_reduce_hook StreamId::compute, or ",
      "let compute wait for g.stream.record() before them, and g.stream for compute.record() after "
      "them");
  if (r.is_direct)
    r.last = stream;
  else
    r.last.wait(stream.record());
}

}  // namespace tessera::shard
