// Operations of elements, dimensions, shapes and places.
#include "tests/parity/op_arguments.hpp"

namespace op_samples {
namespace {

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

}  // namespace

// The functions of unary.def.
#define TESSERA_UNARY(name, theirs, result, on_floats, on_integers, slope, ...) \
  TESSERA_CALLS_##slope(name)
#define TESSERA_CALLS_fused(name) {#name, unary(name)},
#define TESSERA_CALLS_composed(name) TESSERA_CALLS_fused(name)
#define TESSERA_CALLS_steps(name) TESSERA_CALLS_fused(name)
#define TESSERA_CALLS_own(name)

const std::map<std::string, Ours>& operations() {
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
      {"logical_xor",
       [](const Call& c) { return Tensors{cast(c.t(0), boolean) != cast(c.t(1), boolean)}; }},
      {"isnan", unary(isnan)},
      {"isinf", unary(isinf)},
      {"isfinite", unary(isfinite)},
      {"neg", [](const Call& c) { return Tensors{-c.t(0)}; }},
      {"square", unary(square)},
      {"reciprocal", unary(reciprocal)},
      {"minimum", pair(minimum)},
      {"maximum", pair(maximum)},
      {"clamp", one([](const Call& c) {
         if (!c.is_tensor(1) && !c.is_tensor(2)) return clamp(c.t(0), c.maybe(1), c.maybe(2));
         const Tensor x = c.has(1) ? maximum(c.t(0), c.t(1)) : c.t(0);
         return c.has(2) ? minimum(x, c.t(2)) : x;
       })},
      {"where",
       [](const Call& c) {
         if (!c.is_tensor(1)) return Tensors{where(c.t(0), c.number(1), c.t(2))};
         if (!c.is_tensor(2)) return Tensors{where(c.t(0), c.t(1), c.number(2))};
         return Tensors{where(c.t(0), c.t(1), c.t(2))};
       }},
      {"masked_fill",
       [](const Call& c) { return Tensors{masked_fill(c.t(0), c.t(1), c.number(2))}; }},
      {"ceil", [](const Call& c) { return Tensors{-floor(-c.t(0))}; }},
      {"trunc", [](const Call& c) { return Tensors{sign(c.t(0)) * floor(abs(c.t(0)))}; }},
      {"tan", [](const Call& c) { return Tensors{sin(c.t(0)) / cos(c.t(0))}; }},
      {"exp2", [](const Call& c) { return Tensors{pow(2.0, c.t(0))}; }},
      {"leaky_relu", [](const Call& c) { return Tensors{leaky_relu(c.t(0), c.number(1))}; }},
      {"elu", [](const Call& c) { return Tensors{elu(c.t(0), c.number(1))}; }},
      {"gelu",
       [](const Call& c) {
         return Tensors{c.args.at(1) == "tanh" ? gelu(c.t(0)) : gelu_exact(c.t(0))};
       }},
      {"log_sigmoid", unary(log_sigmoid)},
      {"softplus", one([](const Call& c) {
         const double beta = c.number(1);
         return beta == 1 ? softplus(c.t(0)) : softplus(c.t(0) * beta) / beta;
       })},
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
      {"max", one([](const Call& c) { return max(c.t(0)); })},
      {"min", one([](const Call& c) { return min(c.t(0)); })},
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
      {"contiguous", unary(contiguous)},
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
      {"slice",
       [](const Call& c) {
         return Tensors{slice(c.t(0), c.dim(1), c.whole(2), c.whole(3), c.whole(4))};
       }},
      {"split_sizes",
       [](const Call& c) {
         Tensors out;
         std::int64_t begin = 0;
         for (const std::int64_t size : c.args.at(1).get<Sizes>()) {
           out.push_back(slice(c.t(0), c.dim(2), begin, begin + size));
           begin += size;
         }
         if (begin != c.t(0).size(c.dim(2))) throw std::runtime_error("the sizes leave some over");
         return out;
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
      {"matmul", [](const Call& c) { return Tensors{matmul(c.t(0), c.t(1))}; }},
#include "tessera/kernels/unary.def"
  };
  return table;
}

}  // namespace op_samples
