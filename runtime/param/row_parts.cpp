#include "tessera/param/row_parts.hpp"

#include "tessera/param/parameter.hpp"

namespace tessera {

bool has_rows_of(const Shape& shape, const Parameter& parameter) {
  const Shape& own = parameter.shape();
  return shape.ndim() == 0 || own.ndim() == 0 ? shape == own : shape[0] == own[0];
}

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
