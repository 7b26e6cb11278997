// Tensors as NumPy's str prints arrays with its default options: shortest digits that tell the
// values apart, aligned columns, long dimensions shortened, long rows wrapped. The rules are those
// of numpy/_core/arrayprint.py.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <vector>

#include "tessera/tensor/ops.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kThreshold = 1000;  // elements; beyond it, dimensions are shortened
constexpr std::int64_t kEdge = 3;          // elements kept at each end
constexpr int kPrecision = 8;              // decimals at most
constexpr std::size_t kLineWidth = 75;

std::string text_of(double v, std::chars_format format, int decimals) {
  char buffer[400];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, v, format, decimals).ptr;
  return {buffer, end};
}

bool same(double a, double b, DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return BFloat16(static_cast<float>(a)).bits == BFloat16(static_cast<float>(b)).bits;
    case DType::f16:
      return Float16(static_cast<float>(a)).bits == Float16(static_cast<float>(b)).bits;
    case DType::e4m3:
      return Float8E4M3(static_cast<float>(a)).bits == Float8E4M3(static_cast<float>(b)).bits;
    case DType::e5m2:
      return Float8E5M2(static_cast<float>(a)).bits == Float8E5M2(static_cast<float>(b)).bits;
    case DType::f32:
      return static_cast<float>(a) == static_cast<float>(b);
    default:
      return a == b;
  }
}

// The fewest decimals of the mantissa that `dtype` reads back as the same value.
int shortest(double v, DType dtype) {
  for (int k = 0; k < 17; ++k) {
    const std::string text = text_of(v, std::chars_format::scientific, k);
    double back = 0;
    std::from_chars(text.data(), text.data() + text.size(), back);
    if (same(back, v, dtype)) return k;
  }
  return 17;
}

// A number in parts: 1.5e-07 is {"1", "5", "-07"}, 0.25 is {"0", "25", ""}.
struct Parts {
  std::string whole, fraction, exponent;
};

Parts split(std::string text) {
  Parts parts;
  if (const auto e = text.find('e'); e != std::string::npos) {
    parts.exponent = text.substr(e + 1);
    text.resize(e);
  }
  const auto dot = text.find('.');
  parts.whole = text.substr(0, dot);
  if (dot != std::string::npos) parts.fraction = text.substr(dot + 1);
  parts.fraction.resize(parts.fraction.find_last_not_of('0') + 1);
  return parts;
}

Parts number(double v, DType dtype, bool scientific, int most) {
  const int digits = shortest(v, dtype);
  if (scientific) return split(text_of(v, std::chars_format::scientific, std::min(digits, most)));
  const Parts p = split(text_of(v, std::chars_format::scientific, digits));
  const int magnitude = v == 0 ? 0 : std::stoi(p.exponent);
  if (digits < magnitude) {  // fewer digits than stand before the point: zeros fill them
    std::string whole = p.whole + p.fraction;
    whole.resize(p.whole.size() + static_cast<std::size_t>(magnitude), '0');
    return {whole, "", ""};
  }
  return split(text_of(v, std::chars_format::fixed, std::min(digits - magnitude, most)));
}

void pad(std::string& text, std::size_t width) {
  text.insert(0, width - std::min(width, text.size()), ' ');
}

// A tensor of no dimension prints as a NumPy scalar does: 3.0 where an array shows 3. and an
// exponent from 10^16 on, 10^6 for f32, 10^3 for 16 bits and 8.
std::string scalar(double v, DType dtype) {
  if (std::isnan(v)) return "nan";
  if (std::isinf(v)) return v > 0 ? "inf" : "-inf";
  const double from = dtype == DType::f64 ? 1e16 : dtype == DType::f32 ? 1e6 : 1e3;
  const bool scientific = v != 0 && (std::abs(v) < 1e-4 || std::abs(v) >= from);
  const Parts p = number(v, dtype, scientific, 400);
  if (scientific) return p.whole + (p.fraction.empty() ? "" : "." + p.fraction) + "e" + p.exponent;
  return p.whole + "." + (p.fraction.empty() ? "0" : p.fraction);
}

std::vector<std::string> floats(const std::vector<double>& values, DType dtype) {
  double largest = 0, smallest = INFINITY;
  for (const double v : values)
    if (std::isfinite(v) && v != 0) {
      largest = std::max(largest, std::abs(v));
      smallest = std::min(smallest, std::abs(v));
    }
  const double from = dtype == DType::f64 ? 1e8 : dtype == DType::f32 ? 1e6 : 1e3;
  const bool scientific =
      largest >= from || (largest > 0 && (smallest < 1e-4 || largest / smallest > 1000));
  std::vector<Parts> parts(values.size());
  std::size_t left = 0, right = 0, exponent = 0, width = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      parts[i].whole = scalar(values[i], dtype);
      width = std::max(width, parts[i].whole.size());
      continue;
    }
    parts[i] = number(values[i], dtype, scientific, kPrecision);
    left = std::max(left, parts[i].whole.size());
    right = std::max(right, parts[i].fraction.size());
    exponent = std::max(exponent, parts[i].exponent.size());
  }
  const std::size_t tail = exponent > 0 ? 1 + exponent : 0;  // e and the exponent
  width = std::max(width, left > 0 ? left + 1 + right + tail : 0);
  left = width - std::min(width, 1 + right + tail);
  std::vector<std::string> out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    Parts& p = parts[i];
    if (!std::isfinite(values[i])) {
      pad(p.whole, width);
      out[i] = p.whole;
      continue;
    }
    // All show as many decimals: more than tell the value apart where another needs them.
    if (scientific)
      p = split(text_of(values[i], std::chars_format::scientific, static_cast<int>(right)));
    pad(p.whole, left);
    p.fraction.resize(right, scientific ? '0' : ' ');
    if (scientific) p.exponent.insert(1, exponent - p.exponent.size(), '0');
    out[i] = p.whole + '.' + p.fraction + (scientific ? 'e' + p.exponent : "");
  }
  return out;
}

// Brackets, separators and line breaks around the texts of the elements that are shown.
struct Layout {
  const Shape& shape;
  bool shorten;
  std::vector<std::string> texts = {};  // in the order of each()
  std::size_t next = 0;

  bool hidden(int d, std::int64_t i) const {
    return shorten && shape[d] > 2 * kEdge && i >= kEdge && i < shape[d] - kEdge;
  }
  // f(index) for the elements that are shown.
  template <class F>
  void each(int d, std::int64_t offset, F&& f) const {
    if (d == shape.ndim()) return f(offset);
    for (std::int64_t i = 0; i < shape[d]; ++i)
      if (!hidden(d, i)) each(d + 1, offset * shape[d] + i, f);
  }

  std::string row(std::size_t indent, std::size_t width, int d) {
    std::string done, line(indent, ' ');
    for (std::int64_t i = 0; i < shape[d]; ++i) {
      const bool gap = hidden(d, i);
      const std::string word = gap ? "..." : texts[next++];
      if (line.size() + word.size() > width && line.size() > indent) {
        line.resize(line.find_last_not_of(' ') + 1);
        done += line + '\n';
        line.assign(indent, ' ');
      }
      line += word;
      if (gap) i = shape[d] - kEdge - 1;
      if (i + 1 < shape[d]) line += ' ';
    }
    return done + line;
  }

  std::string write(int d, std::size_t indent, std::size_t width) {
    if (d == shape.ndim()) return texts[next++];
    std::string out;
    if (d + 1 == shape.ndim()) {
      out = row(indent + 1, width - 1, d);
    } else {
      const auto blank_lines = static_cast<std::size_t>(shape.ndim() - 1 - d);
      for (std::int64_t i = 0; i < shape[d]; ++i) {
        out.append(indent + 1, ' ');
        if (hidden(d, i)) {
          out += "...";
          i = shape[d] - kEdge - 1;
        } else {
          out += write(d + 1, indent + 1, width - 1);
        }
        if (i + 1 < shape[d]) out.append(blank_lines, '\n');
      }
    }
    return '[' + out.substr(indent + 1) + ']';
  }
};

}  // namespace

std::string Tensor::to_string() const {
  if (!defined()) return "undefined";
  if (device().is_meta() || !device().runs_bodies()) return concat("meta ", shape(), " ", dtype());
  if (numel() == 0) return "[]";
  Layout layout{shape(), numel() > kThreshold};
  if (is_floating(dtype())) {
    const std::vector<double> values = raw::cast(*this, f64).to_vector<double>();
    if (ndim() == 0) return scalar(values[0], dtype());
    std::vector<double> shown;
    layout.each(0, 0,
                [&](std::int64_t i) { shown.push_back(values[static_cast<std::size_t>(i)]); });
    layout.texts = floats(shown, dtype());
  } else {
    const std::vector<std::int64_t> values = raw::cast(*this, i64).to_vector<std::int64_t>();
    std::size_t width = dtype() == boolean && ndim() > 0 ? 5 : 0;
    layout.each(0, 0, [&](std::int64_t i) {
      const std::int64_t v = values[static_cast<std::size_t>(i)];
      layout.texts.push_back(dtype() != boolean ? std::to_string(v) : v != 0 ? "True" : "False");
      width = std::max(width, layout.texts.back().size());
    });
    for (std::string& text : layout.texts) pad(text, width);
  }
  return layout.write(0, 0, kLineWidth);
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  return out << tensor.to_string();
}

}  // namespace tessera
