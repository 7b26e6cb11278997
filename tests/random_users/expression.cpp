#include "tests/random_users/expression.hpp"

#include <cstring>
#include <sstream>

#include "tessera/autograd/ops.hpp"
#include "tests/support/values.hpp"

namespace tessera::testing {

std::size_t Expression::add(Line line) {
  constexpr double kLargest = 100;     // products of a few stay far from f16's largest
  constexpr double kLoosest = 1 / 8.;  // of what is known of a value, relative or absolute
  need(line.shape.numel() <= kMostElements);
  for (Number& v : line.values) {
    v.dtype = line.dtype;
    if (line.dtype == boolean) v.value = v.value != 0;
    need(std::abs(v.value) <= kLargest && v.error <= kLoosest * std::max(1.0, std::abs(v.value)));
  }
  for (const std::size_t i : line.operands)
    line.has_gradient =
        line.has_gradient || (lines[i].has_gradient && line.adjoint && is_floating(line.dtype));
  lines.push_back(std::move(line));
  return lines.size() - 1;
}

std::size_t Expression::leaf(Draw& draw, const Shape& shape, DType dtype,
                             const std::function<double()>& value) {
  Line line{.text = concat("leaf ", dtype, ' ', shape),
            .operands = {},
            .run = {},
            .shape = shape,
            .dtype = dtype};
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    line.values.push_back(exact(kernel_test::rounded_to(dtype, value()), dtype));
  line.has_gradient = is_floating(dtype) && draw.chance(0.8);
  if (line.has_gradient) line.text += " with gradient";
  return add(std::move(line));
}

std::string Expression::to_string() const {
  std::ostringstream out;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    out << "  " << i << ": " << lines[i].text;
    for (std::size_t k = 0; k < lines[i].operands.size(); ++k)
      out << (k ? ", " : " of ") << lines[i].operands[k];
    if (lines[i].run) out << " -> " << lines[i].dtype << ' ' << lines[i].shape;
    out << '\n';
  }
  out << "  backward from";
  for (const std::size_t root : roots) out << ' ' << root;
  out << '\n';
  return out.str();
}

Expression make_expression(std::uint64_t seed) {
  Draw draw(seed);
  constexpr DType kDtypes[] = {f64, f64, f64, f32, f32, f32, bf16, f16, i32, i64};
  Expression e;
  const DType dtype = draw.one_of(kDtypes);
  std::vector<std::size_t> results;
  const int wanted = draw.number(3, 10);
  for (int tries = 0; std::ssize(results) <= wanted && tries < 60; ++tries) {
    const std::size_t before = e.lines.size();
    try {
      if (results.empty()) {
        const Shape shape = draw.shape(0, 4);
        need(shape.numel() <= 60);  // room to grow
        results.push_back(add_input(draw, e, shape, dtype));
        continue;
      }
      // Long chains rather than many short ones: one of the last three results.
      const std::size_t x =
          *(results.end() - draw.whole(1, std::min<std::int64_t>(3, std::ssize(results))));
      constexpr Operation kKinds[] = {add_unary,  add_binary, add_movement,    add_movement,
                                      add_matmul, add_cast,   add_over_slices, add_indexing};
      results.push_back(draw.one_of(kKinds)(draw, e, x));
    } catch (const NotTaken&) {
      e.lines.resize(before);
    } catch (const ContractError&) {  // a shape of more than kMaxDims dimensions
      e.lines.resize(before);
    }
  }
  std::vector<std::size_t> differentiable;
  for (std::size_t i = 0; i < e.lines.size(); ++i)
    if (e[i].has_gradient && e[i].run) differentiable.push_back(i);
  if (differentiable.empty()) return e;
  e.roots = {differentiable.back()};
  if (draw.chance(0.3)) e.roots.push_back(draw.one_of(differentiable));
  return e;
}

namespace {

Tensor to_tensor(const Shape& shape, DType dtype, const std::function<double(std::size_t)>& value,
                 const Device& device) {
  return visit(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<std::byte> bytes(static_cast<std::size_t>(shape.numel()) * sizeof(T));
    for (std::size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
      T element{};
      if constexpr (std::is_class_v<T>)
        element = T(static_cast<float>(value(i)));
      else
        element = static_cast<T>(value(i));
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    }
    return Tensor::from_bytes(bytes, shape, dtype, device);
  });
}

// Counts what is compared, and keeps the first difference.
class Comparer {
 public:
  void same(const std::string& what, const Tensor& got, const Shape& shape, DType dtype,
            const Numbers& expected) {
    if (!result.complaint.empty()) return;
    if (got.shape() != shape || got.dtype() != dtype) {
      result.complaint =
          concat(what, " is ", got.dtype(), ' ', got.shape(), ", expected ", dtype, ' ', shape);
      return;
    }
    const std::vector<double> values = to_doubles(got);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const Number& e = expected[i];
      ++result.compared;
      result.sharp += e.error <= 0.01 * std::max(1.0, std::abs(e.value));
      // Nothing is known of what may have overflowed on the way.
      if (!std::isfinite(e.error) || std::abs(values[i] - e.value) <= e.error) continue;
      std::ostringstream out;
      out.precision(17);
      out << what << ", element " << i << " is " << values[i] << ", expected " << e.value
          << " within " << e.error;
      result.complaint = out.str();
      return;
    }
  }
  Comparison result;
};

// What a line's uses give its gradient, element by element.
using Gradient = std::vector<Sum>;
Numbers get(const Gradient& gradient, DType dtype) {
  Numbers out;
  for (const Sum& sum : gradient) out.push_back(sum.get(dtype, true));
  return out;
}

// Adds what a backward from `root` with these weights gives the leaves, by the adjoints.
void go_backward(const Expression& e, std::size_t root, const Numbers& weights,
                 const std::string& wrong, std::vector<Gradient>& of_leaves) {
  std::vector<Gradient> of(root + 1);
  for (std::size_t i = 0; i <= root; ++i) of[i].resize(e[i].values.size());
  for (std::size_t k = 0; k < weights.size(); ++k) of[root][k].add(weights[k]);
  for (std::size_t i = root + 1; i-- > 0;) {
    const Line& line = e[i];
    if (!line.run || !line.has_gradient) continue;
    Numbers g = get(of[i], line.dtype);
    if (!wrong.empty() && line.text.substr(0, line.text.find(' ')) == wrong)
      for (Number& v : g) v.value *= 1.125;
    std::vector<std::vector<Sum>> to;
    for (const std::size_t operand : line.operands) to.emplace_back(e[operand].values.size());
    line.adjoint(g, to);
    for (std::size_t k = 0; k < to.size(); ++k) {
      const std::size_t operand = line.operands[k];
      auto& gradients = e[operand].run ? of[operand] : of_leaves[operand];
      for (std::size_t n = 0; n < to[k].size(); ++n)
        if (!to[k][n].is_empty())
          gradients[n].add(to[k][n].get(e[operand].dtype, line.rounds_parts));
    }
  }
}

}  // namespace

Comparison compare(const Expression& e, std::uint64_t seed, const std::string& wrong) {
  Draw draw(seed + 1);
  Comparer comparer;
  const Device device =
      Device::cpu({.executor = draw.chance(0.8) ? ExecutorKind::inlined : ExecutorKind::threaded,
                   .threads = draw.number(1, 2)});
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < e.lines.size(); ++i) {
    const Line& line = e[i];
    std::vector<Tensor> operands;
    for (const std::size_t operand : line.operands) operands.push_back(tensors[operand]);
    tensors.push_back(line.run ? line.run(operands)
                               : to_tensor(
                                     line.shape, line.dtype,
                                     [&](std::size_t k) { return line.values[k].value; }, device));
    if (!line.run && line.has_gradient) tensors.back().require_grad();
    if (tensors.back().requires_grad() != line.has_gradient)
      comparer.result.complaint =
          concat("line ", i, " has ", line.has_gradient ? "no" : "a", " history");
  }
  for (std::size_t i = 0; i < e.lines.size(); ++i)
    comparer.same(concat("line ", i), tensors[i], e[i].shape, e[i].dtype, e[i].values);
  if (!comparer.result.complaint.empty()) return comparer.result;

  std::vector<Gradient> gradients;
  for (const Line& line : e.lines) gradients.emplace_back(line.values.size());
  for (const std::size_t root : e.roots) {
    const Line& line = e[root];
    Numbers weights;
    for (std::size_t k = 0; k < line.values.size(); ++k)
      weights.push_back(exact(static_cast<double>(draw.whole(-16, 16)) / 16, line.dtype));
    tensors[root].backward(
        to_tensor(
            line.shape, line.dtype, [&](std::size_t k) { return weights[k].value; }, device),
        true);
    go_backward(e, root, weights, wrong, gradients);
  }
  for (std::size_t i = 0; i < e.lines.size() && !e.roots.empty(); ++i) {
    const Line& line = e[i];
    if (line.run || !line.has_gradient) continue;
    Tensor got = tensors[i].grad();
    if (!got.defined()) got = Tensor::zeros(line.shape, line.dtype, device);
    comparer.same(concat("the gradient of leaf ", i), got, line.shape, line.dtype,
                  get(gradients[i], line.dtype));
  }
  return comparer.result;
}

}  // namespace tessera::testing

namespace tessera::testing {
std::string describe_expression(std::uint64_t seed) { return make_expression(seed).to_string(); }
std::string expression_complaint(std::uint64_t seed) {
  const Expression e = make_expression(seed);
  try {
    const std::string complaint = compare(e, seed).complaint;
    return complaint.empty() ? "" : complaint + '\n' + e.to_string();
  } catch (const std::exception& error) {
    return concat("threw ", error.what(), '\n', e.to_string());
  }
}
}  // namespace tessera::testing
