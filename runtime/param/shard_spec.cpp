#include "tessera/param/shard_spec.hpp"

#include "tessera/tensor/ops.hpp"

namespace tessera {

Tensor rows_of(const Tensor& whole, const ShardSpec& spec) {
  if (spec.world == 1 || spec.shape.ndim() == 0) return whole;
  return raw::slice(whole, spec.dim, spec.owned().begin, spec.owned().end);
}

}  // namespace tessera
