// How a parameter is cut, stored and gathered, which is said before it has memory.
#include <utility>

#include "runtime/param/parameter_state.hpp"
#include "tessera/param/gather_transform.hpp"

namespace tessera {

std::string ParameterState::described() const {
  return name.empty() ? called() : concat(called(), " of shape ", shape);
}

DType Parameter::dtype() const { return state_of(*this)->dtype; }
void Parameter::set_dtype(DType dtype) const {
  TESSERA_EXPECT(!state_of(*this)->group, "set_dtype: ", state_->called(),
                 " has memory; call it before materialize");
  TESSERA_EXPECT(is_floating(dtype) && dtype != f64, "set_dtype: ", state_->called(), " in ", dtype,
                 "; expected f32, bf16, f16, e4m3 or e5m2");
  TESSERA_EXPECT(dtype == f32 || !state_->transform, "set_dtype: ", state_->called(),
                 " has a gather transform, which is given values of f32; leave one of the two out");
  TESSERA_EXPECT(dtype == f32 || !trainable(), "set_dtype: ", state_->called(),
                 " is trainable, and what is trained is stored in f32; freeze it first");
  state_->dtype = dtype;
}

void Parameter::set_block_rows(std::int64_t rows) const {
  const Shape& shape = this->shape();
  TESSERA_EXPECT(!unit(), "set_block_rows: parameter '", name(), "' belongs to unit '",
                 *state_->unit, "'; call it before fully_shard");
  TESSERA_EXPECT(rows >= 0 && rows <= (shape.ndim() > 0 ? shape[0] : 0),
                 "set_block_rows: blocks of ", rows, " rows for ", state_->described(),
                 "; give no more than its rows, or 0 for even shards");
  TESSERA_EXPECT(rows == 0 || !state_->transform, "set_block_rows: ", state_->described(),
                 " has a gather transform, which cuts it evenly; leave one of the two out");
  state_->block_rows = rows;
}

void Parameter::set_gather_transform(std::shared_ptr<const GatherTransform> transform) const {
  TESSERA_EXPECT(!state_of(*this)->group, "set_gather_transform: ", state_->called(),
                 " has memory; call it before materialize");
  TESSERA_EXPECT(!transform || state_->dtype == f32, "set_gather_transform: ", state_->called(),
                 " is stored in ", state_->dtype, " and gathered as it is; store it in f32");
  TESSERA_EXPECT(!transform || state_->block_rows == 0,
                 "set_gather_transform: ", state_->described(), " is sharded by blocks of ",
                 state_->block_rows,
                 " rows, and transforms by even ones; leave one of the two out");
  TESSERA_EXPECT(!transform || spec().dim == 0, "set_gather_transform: ", state_->described(),
                 " is sharded along dimension ", spec().dim,
                 ", and transforms along rows; leave one of the two out");
  TESSERA_EXPECT(!transform || !transform->parts(spec()).empty(), "set_gather_transform: '",
                 transform->name(), "' has no parts for ", state_->described(),
                 "; give at least one array that travels");
  state_->transform = std::move(transform);
}

}  // namespace tessera
