#include "tessera/param/row_parts.hpp"

#include <utility>

#include "runtime/param/parameter_state.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

void Parameter::initialize(std::span<const std::uint64_t> keys) const {
  const std::vector<RowPart>& parts = row_parts();
  TESSERA_EXPECT(keys.size() == std::max<std::size_t>(parts.size(), 1), "initialize: ", keys.size(),
                 " keys for ", state_->called(), "; expected one, or one for each row part");
  // `out`: rows `of` along the first dimension.
  const auto fill = [&](const Tensor& out, const RowRange& of) {
    const std::int64_t row = parts.empty() ? 0 : shape().with(0, 1).numel();
    RowRange part;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      part = {part.end, part.end + parts[i].rows};
      const RowRange to = within(of, part), from = within(part, of);
      state_->initializer.fill(raw::slice(out, 0, to.begin, to.end), shape().with(0, part.size()),
                               keys[i], from.begin * row);
    }
    if (parts.empty())
      state_->initializer.fill(out, shape(), keys[0], of.begin * spec().row_numel());
  };
  edit([&](const Tensor& rows) {
    if (spec().dim == 0) return fill(rows, spec().owned());
    const Tensor whole = Tensor::empty(shape(), rows.dtype(), rows.device());
    fill(whole, {0, shape()[0]});
    raw::copy_into(rows, tessera::rows_of(whole, spec()));
  });
}

void Parameter::set_row_parts(std::vector<RowPart> parts) const {
  ParameterState& state = *state_of(*this);
  std::int64_t rows = 0;
  for (const RowPart& part : parts) {
    TESSERA_EXPECT(part.rows > 0 && !part.name.empty(), "set_row_parts: '", part.name, "' of ",
                   part.rows, " rows in ", state.called(), "; expected a name and 1 row or more");
    rows = checked_add(rows, part.rows);
  }
  TESSERA_EXPECT(parts.empty() || (shape().ndim() > 0 && rows == shape()[0]),
                 "set_row_parts: ", state.called(), " is ", shape(), ", its parts have ", rows,
                 " rows; give parts of all its rows, or none");
  state.row_parts = std::move(parts);
}
const std::vector<RowPart>& Parameter::row_parts() const { return state_of(*this)->row_parts; }

std::vector<RowPart> named_row_parts(const std::string& name, const Parameter& parameter) {
  std::vector<RowPart> parts = parameter.row_parts();
  if (parts.empty()) return {{name, parameter.shape().ndim() > 0 ? parameter.shape()[0] : 1}};
  const std::size_t own = name.rfind('.') + 1;  // 0 of a name without a module
  const std::size_t module = own > 1 ? name.rfind('.', own - 2) + 1 : 0;
  for (RowPart& part : parts)
    part.name = concat(name.substr(0, module), part.name, '.', name.substr(own));
  return parts;
}

}  // namespace tessera
