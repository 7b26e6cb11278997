#include "tests/parity/op_calls.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/parity/op_arguments.hpp"

namespace op_samples {

double number_of(const Json& j) {
  if (j.is_boolean()) return j.get<bool>() ? 1 : 0;
  if (j.is_number()) return j.get<double>();
  const std::string text = j.at("number");
  const double inf = std::numeric_limits<double>::infinity();
  return text == "nan" ? std::numeric_limits<double>::quiet_NaN() : text == "inf" ? inf : -inf;
}

DType dtype_of_name(const std::string& name) {
  for (const DType dtype : {f32, f64, bf16, f16, i32, i64, boolean})
    if (concat(dtype) == name) return dtype;
  throw std::runtime_error("unknown dtype " + name);
}

Shape shape_of(const Json& j) {
  const Sizes sizes = j.get<Sizes>();
  return Shape(std::span<const std::int64_t>(sizes));
}

namespace {

Tensor tensor_of(const Json& j, const Device& device) {
  const DType dtype = dtype_of_name(j.at("dtype"));
  const Shape shape = shape_of(j.at("shape"));
  if (is_floating(dtype)) {
    std::vector<double> values;
    for (const Json& v : j.at("values")) values.push_back(number_of(v));
    return raw::cast(Tensor::from(values, shape, device), dtype);
  }
  Sizes values;
  for (const Json& v : j.at("values"))
    values.push_back(v.is_boolean() ? v.get<bool>() : v.get<std::int64_t>());
  return raw::cast(Tensor::from(values, shape, device), dtype);
}

// How a value may differ: samples have at most some hundred terms a result, of the size of the
// largest, and functions are good to a few roundings.
std::string difference(const char* what, const Tensor& got, const Tensor& expected) {
  if (got.shape() != expected.shape())
    return concat(what, " has shape ", got.shape(), ", expected ", expected.shape());
  if (got.dtype() != expected.dtype())
    return concat(what, " is ", got.dtype(), ", expected ", expected.dtype());
  const auto a = raw::cast(raw::contiguous(got), f64).to_vector<double>();
  const auto b = raw::cast(expected, f64).to_vector<double>();
  double largest = 1;
  for (const double v : b)
    if (std::isfinite(v)) largest = std::max(largest, std::abs(v));
  const double unit = got.dtype() == f64 ? 0x1p-53 : got.dtype() == f32 ? 0x1p-24 : 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    if (std::abs(a[i] - b[i]) <= 256 * unit * largest) continue;
    return concat(what, "[", i, "] is ", a[i], ", expected ", b[i]);
  }
  return {};
}

// What the table of operations says that we refuse.
bool is_by_design(const std::string& message) {
  for (const char* part :
       {"expected a floating dtype", "cast one of them", "no whole number", "expected numbers",
        "cast them first", "at most 6 dimensions", "expected bool", "is beyond i64",
        "expected i32 or i64", "two equal dtypes", "does not join", "two floating matrices"})
    if (message.find(part) != std::string::npos) return true;
  return false;
}

// Where values differ, too: a quotient of integers is cut off here.
bool is_whole_quotient(const Json& line) {
  if (line.at("ours") != "div" || line.contains("fails")) return false;
  for (const Json& t : line.at("tensors"))
    if (t.at("dtype") != "i64") return false;
  return true;
}

const Ours& ours(const std::string& name) {
  const auto found = operations().find(name);
  return found != operations().end() ? found->second : layers().at(name);
}

enum class Layout { contiguous, strided };

// x as rows with a gap between them.
Tensor with_gaps(const Tensor& x) {
  return x.ndim() == 0 ? x : slice(pad(x, {1, 2}), -1, 1, x.size(-1) + 1);
}

std::string run(const Json& line, Layout layout, const Device& device) {
  Tensors tensors, operands;
  for (const Json& j : line.at("tensors")) {
    tensors.push_back(tensor_of(j, device));
    if (j.at("grad").get<bool>()) tensors.back().require_grad();
    operands.push_back(layout == Layout::strided ? with_gaps(tensors.back()) : tensors.back());
  }
  const Call call{line.at("args"), operands, device};
  const Tensors got = ours(line.at("ours"))(call);
  if (line.contains("fails")) return "it was accepted, and PyTorch refuses it";
  const Json& expected = line.at("out");
  if (got.size() != expected.size())
    return concat(got.size(), " results, expected ", expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    if (auto text = difference("the result", got[i], tensor_of(expected[i], device)); !text.empty())
      return text;
  if (!line.contains("cotangents")) return {};
  std::size_t next = 0;
  for (const Tensor& y : got)
    if (y.requires_grad()) y.backward(tensor_of(line["cotangents"].at(next++), device), true);
  if (next == 0) return "no result has a gradient";
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Json& gradient = line["gradients"][i];
    if (gradient.is_null()) continue;
    if (!tensors[i].grad().defined()) return concat("tensor ", i, " has no gradient");
    const auto text = difference("the gradient", tensors[i].grad(), tensor_of(gradient, device));
    if (!text.empty()) return text;
  }
  return {};
}

}  // namespace

Outcome call(const std::string& text, const Device& device) {
  const Json line = Json::parse(text);
  Outcome out{line.at("theirs"), Verdict::agreed, {}};
  const bool fails = line.contains("fails");
  try {
    out.why = run(line, Layout::contiguous, device);
    if (out.why.empty()) out.why = run(line, Layout::strided, device);
    if (!out.why.empty())
      out.verdict = is_whole_quotient(line) ? Verdict::refused : Verdict::differed;
  } catch (const ContractError& error) {
    out.why = error.what();
    if (!fails) out.verdict = is_by_design(out.why) ? Verdict::refused : Verdict::differed;
  } catch (const std::exception& error) {  // the sample's arguments are none of ours
    out.why = error.what();
    if (!fails) out.verdict = Verdict::differed;
  }
  return out;
}

}  // namespace op_samples
