#include "tests/parity/op_calls.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/autograd/ops.hpp"

namespace op_samples {
namespace {

using namespace tessera;
using Json = nlohmann::json;
using Tensors = std::vector<Tensor>;
using Sizes = std::vector<std::int64_t>;

double number_of(const Json& j) {
  if (j.is_boolean()) return j.get<bool>() ? 1 : 0;
  if (j.is_number()) return j.get<double>();
  const std::string text = j.at("number");
  const double inf = std::numeric_limits<double>::infinity();
  return text == "nan" ? std::numeric_limits<double>::quiet_NaN() : text == "inf" ? inf : -inf;
}

DType dtype_of_name(const std::string& name) {
  for (const DType dtype : {f32, f64, i32, i64, boolean})
    if (concat(dtype) == name) return dtype;
  throw std::runtime_error("unknown dtype " + name);
}

Shape shape_of(const Json& j) {
  const Sizes sizes = j.get<Sizes>();
  return Shape(std::span<const std::int64_t>(sizes));
}

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

// The arguments of a call; those that are left out have the defaults of PyTorch.
struct Call {
  const Json& args;
  const Tensors& tensors;

  bool has(std::size_t i) const { return i < args.size() && !args[i].is_null(); }
  bool is_tensor(std::size_t i) const {
    return has(i) && args[i].is_object() && args[i].contains("tensor");
  }
  const Tensor& of(const Json& j) const {
    if (!j.is_object() || !j.contains("tensor"))
      throw ContractError("the call has a number where ours takes a tensor: expected numbers");
    return tensors.at(j.at("tensor").get<std::size_t>());
  }
  const Tensor& t(std::size_t i) const { return of(args.at(i)); }
  Tensors list(std::size_t i) const {
    Tensors out;
    for (const Json& j : args.at(i)) out.push_back(of(j));
    return out;
  }
  double number(std::size_t i, double otherwise = 0) const {
    return has(i) ? number_of(args[i]) : otherwise;
  }
  std::int64_t whole(std::size_t i, std::int64_t otherwise = 0) const {
    return has(i) ? args[i].get<std::int64_t>() : otherwise;
  }
  int dim(std::size_t i, int otherwise = 0) const { return static_cast<int>(whole(i, otherwise)); }
  bool flag(std::size_t i) const { return has(i) && args[i].get<bool>(); }
  Shape shape(std::size_t i) const { return shape_of(args.at(i)); }
  raw::KeepDim keep(std::size_t i) const { return flag(i) ? raw::KeepDim::yes : raw::KeepDim::no; }
  Dims dims(std::size_t i) const {
    const auto d = has(i) ? args[i].get<std::vector<int>>() : std::vector<int>{};
    switch (d.size()) {
      case 0:
        return {};
      case 1:
        return d[0];
      case 2:
        return {d[0], d[1]};
      case 3:
        return {d[0], d[1], d[2]};
      default:
        return {d.at(0), d.at(1), d.at(2), d.at(3)};
    }
  }
  std::optional<double> maybe(std::size_t i) const {
    return has(i) ? std::optional(number(i)) : std::nullopt;
  }
};

using Ours = std::function<Tensors(const Call&)>;

Ours unary(Tensor (*f)(const Tensor&, Caller)) {
  return [f](const Call& c) { return Tensors{f(c.t(0), Caller::current())}; };
}
Ours reduction(Tensor (*f)(const Tensor&, const Dims&, raw::KeepDim, Caller)) {
  return [f](const Call& c) { return Tensors{f(c.t(0), c.dims(1), c.keep(2), Caller::current())}; };
}
// Of two operands, either of which may be a number.
template <class F>
Ours binary(F f) {
  return [f](const Call& c) {
    if (!c.is_tensor(0)) return Tensors{f(c.number(0), c.t(1))};
    if (!c.is_tensor(1)) return Tensors{f(c.t(0), c.number(1))};
    return Tensors{f(c.t(0), c.t(1))};
  };
}
// Of tensors alone on the left.
template <class F>
Ours comparison(F f) {
  return [f](const Call& c) {
    if (!c.is_tensor(1)) return Tensors{f(c.t(0), c.number(1))};
    return Tensors{f(c.t(0), c.t(1))};
  };
}
Ours pair(Tensor (*f)(const Tensor&, const Tensor&, Caller)) {
  return [f](const Call& c) { return Tensors{f(c.t(0), c.t(1), Caller::current())}; };
}
Tensors both(const ValuesAndIndices& v) { return {v.values, v.indices}; }

std::vector<Index> places_of(const Call& c) {
  const auto end_of = [](const Json& j) {
    return j.is_null() ? std::nullopt : std::optional(j.get<std::int64_t>());
  };
  std::vector<Index> out;
  for (const Json& j : c.args.at(1)) {
    if (j.contains("place")) out.emplace_back(j["place"].get<std::int64_t>());
    if (j.contains("all")) out.emplace_back(ellipsis);
    if (j.contains("new")) out.emplace_back(new_axis);
    if (j.contains("at")) out.emplace_back(c.of(j["at"]));
    if (j.contains("range")) {
      const Json& r = j["range"];
      out.emplace_back(Range{end_of(r[0]), end_of(r[1]), r[2].get<std::int64_t>()});
    }
  }
  return out;
}

Order order_of(const Call& c, std::size_t i) {
  return c.flag(i) ? Order::descending : Order::ascending;
}

const std::map<std::string, Ours>& ours() {
  static const std::map<std::string, Ours> table = {
      {"add", binary([](const auto& a, const auto& b) { return a + b; })},
      {"sub", binary([](const auto& a, const auto& b) { return a - b; })},
      {"mul", binary([](const auto& a, const auto& b) { return a * b; })},
      {"div", binary([](const auto& a, const auto& b) { return a / b; })},
      {"pow", binary([](const auto& a, const auto& b) { return pow(a, b); })},
      {"eq", comparison([](const Tensor& a, const auto& b) { return a == b; })},
      {"ne", comparison([](const Tensor& a, const auto& b) { return a != b; })},
      {"lt", comparison([](const Tensor& a, const auto& b) { return a < b; })},
      {"le", comparison([](const Tensor& a, const auto& b) { return a <= b; })},
      {"gt", comparison([](const Tensor& a, const auto& b) { return a > b; })},
      {"ge", comparison([](const Tensor& a, const auto& b) { return a >= b; })},
      {"logical_and", pair(logical_and)},
      {"logical_or", pair(logical_or)},
      {"logical_not", unary(logical_not)},
      {"isnan", unary(isnan)},
      {"isinf", unary(isinf)},
      {"isfinite", unary(isfinite)},
      {"neg", [](const Call& c) { return Tensors{-c.t(0)}; }},
      {"square", unary(square)},
      {"reciprocal", unary(reciprocal)},
      {"minimum", pair(minimum)},
      {"maximum", pair(maximum)},
      {"clamp", [](const Call& c) { return Tensors{clamp(c.t(0), c.maybe(1), c.maybe(2))}; }},
      {"where",
       [](const Call& c) {
         if (!c.is_tensor(1)) return Tensors{where(c.t(0), c.number(1), c.t(2))};
         if (!c.is_tensor(2)) return Tensors{where(c.t(0), c.t(1), c.number(2))};
         return Tensors{where(c.t(0), c.t(1), c.t(2))};
       }},
      {"masked_fill",
       [](const Call& c) { return Tensors{masked_fill(c.t(0), c.t(1), c.number(2))}; }},
      {"exp", unary(exp)},
      {"expm1", unary(expm1)},
      {"log", unary(log)},
      {"log1p", unary(log1p)},
      {"sqrt", unary(sqrt)},
      {"rsqrt", unary(rsqrt)},
      {"sin", unary(sin)},
      {"cos", unary(cos)},
      {"tanh", unary(tanh)},
      {"erf", unary(erf)},
      {"abs", unary(abs)},
      {"sign", unary(sign)},
      {"floor", unary(floor)},
      {"round", unary(round)},
      {"relu", unary(relu)},
      {"leaky_relu", [](const Call& c) { return Tensors{leaky_relu(c.t(0), c.number(1))}; }},
      {"elu", [](const Call& c) { return Tensors{elu(c.t(0), c.number(1))}; }},
      {"gelu",
       [](const Call& c) {
         return Tensors{c.args.at(1) == "tanh" ? gelu(c.t(0)) : gelu_exact(c.t(0))};
       }},
      {"sigmoid", unary(sigmoid)},
      {"log_sigmoid", unary(log_sigmoid)},
      {"softplus", unary(softplus)},
      {"silu", unary(silu)},
      {"sum", reduction(sum)},
      {"mean", reduction(mean)},
      {"prod",
       [](const Call& c) {
         return Tensors{prod(c.t(0), c.dims(1), c.keep(2))};
       }},
      {"var",
       [](const Call& c) { return Tensors{var(c.t(0), c.dims(1), c.number(2), c.keep(3))}; }},
      {"stddev",
       [](const Call& c) { return Tensors{stddev(c.t(0), c.dims(1), c.number(2), c.keep(3))}; }},
      {"norm", reduction(norm)},
      {"logsumexp", reduction(logsumexp)},
      {"any", reduction(any)},
      {"all", reduction(all)},
      {"amax", reduction(amax)},
      {"amin", reduction(amin)},
      {"max_with_index",
       [](const Call& c) { return both(max_with_index(c.t(0), c.dim(1), c.keep(2))); }},
      {"min_with_index",
       [](const Call& c) { return both(min_with_index(c.t(0), c.dim(1), c.keep(2))); }},
      {"argmax",
       [](const Call& c) {
         return Tensors{c.has(1) ? argmax(c.t(0), c.dim(1), c.keep(2)) : argmax(c.t(0))};
       }},
      {"argmin",
       [](const Call& c) {
         return Tensors{c.has(1) ? argmin(c.t(0), c.dim(1), c.keep(2)) : argmin(c.t(0))};
       }},
      {"cumsum", [](const Call& c) { return Tensors{cumsum(c.t(0), c.dim(1))}; }},
      {"sort", [](const Call& c) { return both(sort(c.t(0), c.dim(1), order_of(c, 2))); }},
      {"argsort", [](const Call& c) { return Tensors{argsort(c.t(0), c.dim(1), order_of(c, 2))}; }},
      {"topk",
       [](const Call& c) { return both(topk(c.t(0), c.whole(1), c.dim(2), order_of(c, 3))); }},
      {"reshape", [](const Call& c) { return Tensors{reshape(c.t(0), c.shape(1))}; }},
      {"flatten", [](const Call& c) { return Tensors{flatten(c.t(0), c.dim(1), c.dim(2))}; }},
      {"squeeze",
       [](const Call& c) {
         return Tensors{c.has(1) ? squeeze(c.t(0), c.dim(1)) : squeeze(c.t(0))};
       }},
      {"unsqueeze", [](const Call& c) { return Tensors{unsqueeze(c.t(0), c.dim(1))}; }},
      {"transpose", [](const Call& c) { return Tensors{transpose(c.t(0), c.dim(1), c.dim(2))}; }},
      {"permute",
       [](const Call& c) {
         return Tensors{permute(c.t(0), std::span<const int>(c.args.at(1).get<std::vector<int>>()))};
       }},
      {"expand", [](const Call& c) { return Tensors{expand(c.t(0), c.shape(1))}; }},
      {"narrow",
       [](const Call& c) {
         return Tensors{slice(c.t(0), c.dim(1), c.whole(2), c.whole(2) + c.whole(3))};
       }},
      {"select", [](const Call& c) { return Tensors{select(c.t(0), c.dim(1), c.whole(2))}; }},
      {"diagonal",
       [](const Call& c) {
         return Tensors{diagonal(c.t(0), c.dim(1), c.dim(2), c.dim(3, 1))};
       }},
      {"split", [](const Call& c) { return split(c.t(0), c.whole(1), c.dim(2)); }},
      {"chunk", [](const Call& c) { return chunk(c.t(0), c.whole(1), c.dim(2)); }},
      {"cat", [](const Call& c) { return Tensors{cat(c.list(0), c.dim(1))}; }},
      {"stack", [](const Call& c) { return Tensors{stack(c.list(0), c.dim(1))}; }},
      {"repeat", [](const Call& c) { return Tensors{repeat(c.t(0), c.shape(1))}; }},
      {"repeat_interleave",
       [](const Call& c) { return Tensors{repeat_interleave(c.t(0), c.whole(1), c.dim(2))}; }},
      {"flip",
       [](const Call& c) {
         return Tensors{c.args.at(1).empty() ? c.t(0) * 1.0 : flip(c.t(0), c.dims(1))};
       }},
      {"roll", [](const Call& c) { return Tensors{roll(c.t(0), c.whole(1), c.dim(2))}; }},
      {"pad",
       [](const Call& c) {
         return Tensors{pad(c.t(0), std::span<const std::int64_t>(c.args.at(1).get<Sizes>()),
                            c.number(2))};
       }},
      {"tril", [](const Call& c) { return Tensors{tril(c.t(0), c.dim(1))}; }},
      {"triu", [](const Call& c) { return Tensors{triu(c.t(0), c.dim(1))}; }},
      {"diag", [](const Call& c) { return Tensors{diag(c.t(0), c.dim(1))}; }},
      {"index_select",
       [](const Call& c) { return Tensors{index_select(c.t(0), c.dim(1), c.t(2))}; }},
      {"index_copy",
       [](const Call& c) { return Tensors{index_copy(c.t(0), c.dim(1), c.t(2), c.t(3))}; }},
      {"index_add",
       [](const Call& c) { return Tensors{index_add(c.t(0), c.dim(1), c.t(2), c.t(3))}; }},
      {"index_put",
       [](const Call& c) {
         return Tensors{index_put(c.t(0), c.list(1), c.t(2), c.flag(3) ? Put::add : Put::set)};
       }},
      {"gather", [](const Call& c) { return Tensors{gather(c.t(0), c.dim(1), c.t(2))}; }},
      {"scatter",
       [](const Call& c) {
         return Tensors{c.is_tensor(3) ? scatter(c.t(0), c.dim(1), c.t(2), c.t(3))
                                       : scatter(c.t(0), c.dim(1), c.t(2), c.number(3))};
       }},
      {"scatter_add",
       [](const Call& c) { return Tensors{scatter_add(c.t(0), c.dim(1), c.t(2), c.t(3))}; }},
      {"index",
       [](const Call& c) {
         return Tensors{index(c.t(0), std::span<const Index>(places_of(c)))};
       }},
      {"einsum",
       [](const Call& c) {
         return Tensors{einsum(c.args.at(0).get<std::string>(), c.t(1), c.t(2))};
       }},
      {"outer", pair(outer)},
      {"one_hot", [](const Call& c) { return Tensors{one_hot(c.t(0), c.whole(1))}; }},
      {"linspace",
       [](const Call& c) {
         return Tensors{linspace(c.number(0), c.number(1), c.whole(2), dtype_of_name(c.args.at(3)),
                                 Device::cpu({.executor = ExecutorKind::inlined}))};
       }},
      {"matmul", [](const Call& c) { return Tensors{matmul(c.t(0), c.t(1))}; }},
      {"softmax", [](const Call& c) { return Tensors{softmax(c.t(0))}; }},
  };
  return table;
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
  const Call call{line.at("args"), operands};
  const Tensors got = ours().at(line.at("ours"))(call);
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

Outcome call(const std::string& text) {
  const Json line = Json::parse(text);
  Outcome out{line.at("theirs"), Verdict::agreed, {}};
  const bool fails = line.contains("fails");
  try {
    const Device device = Device::cpu({.executor = ExecutorKind::inlined});
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
