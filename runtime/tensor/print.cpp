// Tensors as NumPy prints them: nested brackets, aligned columns, long dimensions shortened to
// three at each end.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "tessera/tensor/ops.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kThreshold = 1000;  // elements; beyond it, dimensions are shortened
constexpr std::int64_t kEdge = 3;

struct Printer {
  const Shape& shape;
  const std::vector<double>& values;
  DType dtype;
  bool shorten;
  bool scientific = false;
  int decimals = 0;
  std::size_t width = 0;

  std::string number(double value) const {
    if (dtype == boolean) return value != 0 ? "True" : "False";
    if (std::isnan(value)) return "nan";
    if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
    char text[64];
    if (!is_floating(dtype))
      std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value));
    else if (scientific)
      std::snprintf(text, sizeof text, "%.*e", decimals, value);
    else
      std::snprintf(text, sizeof text, "%.*f", decimals, value);
    return text;
  }

  // Visits the positions that are shown; f(index) for an element.
  template <class F>
  void each(int d, std::int64_t offset, F&& f) const {
    if (d == shape.ndim()) return f(offset);
    std::int64_t inner = 1;
    for (int i = d + 1; i < shape.ndim(); ++i) inner *= shape[i];
    for (std::int64_t i = 0; i < shape[d]; ++i) {
      if (hidden(d, i)) continue;
      each(d + 1, offset + i * inner, f);
    }
  }
  bool hidden(int d, std::int64_t i) const {
    return shorten && shape[d] > 2 * kEdge && i >= kEdge && i < shape[d] - kEdge;
  }

  void choose_format() {
    double largest = 0, smallest = INFINITY;
    each(0, 0, [&](std::int64_t i) {
      const double a = std::abs(values[static_cast<std::size_t>(i)]);
      if (std::isfinite(a) && a > 0) {
        largest = std::max(largest, a);
        smallest = std::min(smallest, a);
      }
    });
    scientific = largest >= 1e8 || smallest < 1e-4 ||
                 (largest > 0 && largest / smallest > 1e3 && smallest < 1e-3);
    // As many decimals, up to 8 (NumPy's default), as some value needs at its dtype's precision.
    const int digits = dtype == f64 ? 15 : dtype == f32 ? 7 : 4;
    each(0, 0, [&](std::int64_t i) {
      const double v = values[static_cast<std::size_t>(i)];
      if (!std::isfinite(v) || v == 0) return;
      const int magnitude = static_cast<int>(std::floor(std::log10(std::abs(v)))) + 1;
      const int limit = scientific ? std::min(8, digits - 1) : std::clamp(digits - magnitude, 0, 8);
      for (int k = decimals; k <= limit; ++k) {
        char text[64];
        std::snprintf(text, sizeof text, scientific ? "%.*e" : "%.*f", k, v);
        decimals = std::max(decimals, k);
        if (std::abs(std::strtod(text, nullptr) - v) <= std::abs(v) * std::pow(10.0, -digits) * 2)
          break;
      }
    });
    each(0, 0, [&](std::int64_t i) {
      width = std::max(width, shown(values[static_cast<std::size_t>(i)]).size());
    });
  }

  // NumPy drops trailing zeros of whole numbers: "1." rather than "1.0".
  std::string shown(double v) const {
    std::string text = number(v);
    if (is_floating(dtype) && decimals == 0 && !scientific && std::isfinite(v)) text += '.';
    return text;
  }

  void write(std::string& out, int d, std::int64_t offset) const {
    if (d == shape.ndim()) {
      const std::string text = shown(values[static_cast<std::size_t>(offset)]);
      out.append(width - std::min(width, text.size()), ' ');
      out += text;
      return;
    }
    std::int64_t inner = 1;
    for (int i = d + 1; i < shape.ndim(); ++i) inner *= shape[i];
    const bool last = d + 1 == shape.ndim();
    const std::string separator =
        last ? " "
             : std::string(static_cast<std::size_t>(shape.ndim() - 1 - d), '\n') +
                   std::string(static_cast<std::size_t>(d + 1), ' ');
    out += '[';
    bool dots = false;
    for (std::int64_t i = 0; i < shape[d]; ++i) {
      if (hidden(d, i)) {
        if (!dots) out += separator + "...";
        dots = true;
        continue;
      }
      if (i > 0) out += separator;
      write(out, d + 1, offset + i * inner);
    }
    out += ']';
  }
};

}  // namespace

std::string Tensor::to_string() const {
  if (!defined()) return "undefined";
  if (device().is_meta() || !device().runs_bodies()) return concat("meta ", shape(), " ", dtype());
  if (numel() == 0) return concat("[] ", shape(), " ", dtype());
  const std::vector<double> values = raw::cast(*this, f64).to_vector<double>();
  Printer printer{shape(), values, dtype(), numel() > kThreshold};
  if (is_floating(dtype()))
    printer.choose_format();
  else
    printer.each(0, 0, [&](std::int64_t i) {
      printer.width =
          std::max(printer.width, printer.number(values[static_cast<std::size_t>(i)]).size());
    });
  std::string out;
  printer.write(out, 0, 0);
  return out;
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  return out << tensor.to_string();
}

}  // namespace tessera
