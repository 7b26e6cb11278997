// Operations of random expressions that see a slice at a time, and products of matrices.
#include <numeric>

#include "tessera/autograd/ops.hpp"
#include "tests/random_users/expression.hpp"

namespace tessera::testing {
namespace {

struct OverSlices {
  const char* name;
  enum Dimensions { any, one, last } dimensions;
  enum Gives { one_number, as_many } gives;
  Tensor (*run)(const Tensor& x, const Dims& dims, int dim, KeepDim keep);
  Numbers (*value)(const Numbers& x);
  Numbers (*slope)(const Numbers& g, const Numbers& x);  // g: what `value` gives, as many
};

// Maps the elements; f(i) makes each.
template <class F>
Numbers each(const Numbers& x, F f) {
  Numbers out;
  for (std::size_t i = 0; i < x.size(); ++i) out.push_back(f(i));
  return out;
}
Number sum_of(const Numbers& x) {
  Sum sum;
  for (const Number v : x) sum.add(v);
  return sum.get(x.empty() ? f64 : x[0].dtype);
}
Number mean_of(const Numbers& x) { return sum_of(x) * (1 / static_cast<double>(x.size())); }
Number largest_of(const Numbers& x) {
  need(!x.empty());
  return std::accumulate(x.begin() + 1, x.end(), x[0], max);
}
Numbers products(const Numbers& x, const Numbers& y) {
  return each(x, [&](auto i) { return x[i] * y[i]; });
}
Numbers centred(const Numbers& x) {
  const Number mean = mean_of(x);
  return each(x, [&](auto i) { return x[i] - mean; });
}
Number variance_of(const Numbers& x) {
  need(x.size() > 1);
  const Numbers c = centred(x);
  return sum_of(products(c, c)) * (1 / static_cast<double>(x.size() - 1));
}
Numbers variance_slope(Number g, const Numbers& x) {
  const Numbers c = centred(x);
  const Number scaled = g * (1 / static_cast<double>(x.size() - 1));
  const Numbers d = each(c, [&](auto i) { return scaled * c[i] + scaled * c[i]; });
  const Number mean = mean_of(d);
  return each(d, [&](auto i) { return d[i] - mean; });
}
// Of halves of halves: what one of them loses below the smallest number, the others may enlarge.
Number product_of(const Numbers& x) {
  Number y = exact(1, x.empty() ? f64 : x[0].dtype);
  double lost = kernel_test::smallest(y.dtype) * static_cast<double>(x.size());
  for (const Number v : x) {
    y = y * v;
    lost *= std::max(1.0, std::abs(v.value) + v.error);
  }
  y.error += lost;
  return y;
}
Number product_with(Number g, Numbers x, std::size_t at) {
  x[at] = g;
  return product_of(x);
}
Number deviation_of(const Numbers& x) {
  const Number variance = variance_of(x);
  need(variance.low() > 0.1);
  return sqrt(variance);
}
// exp(x - largest), by which softmax and its kin do not overflow.
Numbers powers(const Numbers& x) {
  const Number top = largest_of(x);
  return each(x, [&](auto i) { return exp(x[i] - top); });
}
Numbers softmax_of(const Numbers& x) {
  const Numbers p = powers(x);
  const Number sum = sum_of(p);
  return each(p, [&](auto i) { return p[i] / sum; });
}
Number log_of_sum(const Numbers& x) { return log(sum_of(powers(x))) + largest_of(x); }

// The share of the gradient that each gets: equal largest ones share it. Where several may be the
// largest, anything between none and all of it.
Numbers largest_shares(const Numbers& g, const Numbers& x) {
  const Number top = largest_of(x);
  double least = x[0].low(), candidates = 0;
  for (const Number v : x) least = std::max(least, v.low());
  for (const Number v : x) candidates += v.high() >= least;
  const bool is_known = candidates == 1 || top.is_exact();  // exact only where all are
  return each(x, [&](auto i) {
    if (x[i].high() < least) return exact(0, g[0].dtype);
    return is_known ? g[0] / candidates : g[0] * Number{0.5, 0.5, g[0].dtype};
  });
}

constexpr double kEps = 0.0625;
Number root_mean_square(const Numbers& x) { return 1 / sqrt(mean_of(products(x, x)) + kEps); }
Numbers normalized(const Numbers& x) {
  const Number r = root_mean_square(x);
  return each(x, [&](auto i) { return x[i] * r; });
}
Numbers normalized_slope(const Numbers& g, const Numbers& x) {
  const Number r = root_mean_square(x);
  const Number mean = mean_of(products(g, normalized(x)));
  return each(x, [&](auto i) { return (g[i] - x[i] * r * mean) * r; });
}

Tensor ones_like_row(const Tensor& x, double value) {
  return Tensor::full({x.size(-1)}, value, x.dtype(), x.device());
}

const OverSlices kOverSlices[] = {
    {"sum", OverSlices::any, OverSlices::one_number,
     [](const Tensor& x, const Dims& d, int, KeepDim k) { return sum(x, d, k); },
     [](const Numbers& x) { return Numbers{sum_of(x)}; },
     [](const Numbers& g, const Numbers& x) { return Numbers(x.size(), g[0]); }},
    {"mean", OverSlices::any, OverSlices::one_number,
     [](const Tensor& x, const Dims& d, int, KeepDim k) { return mean(x, d, k); },
     [](const Numbers& x) { return Numbers{mean_of(x)}; },
     [](const Numbers& g, const Numbers& x) {
       return Numbers(x.size(), g[0] * (1 / static_cast<double>(x.size())));
     }},
    {"prod", OverSlices::any, OverSlices::one_number,
     [](const Tensor& x, const Dims& d, int, KeepDim k) { return prod(x, d, k); },
     [](const Numbers& x) { return Numbers{product_of(x)}; },
     [](const Numbers& g, const Numbers& x) {
       return each(x, [&](auto i) { return product_with(g[0], x, i); });
     }},
    {"var", OverSlices::any, OverSlices::one_number,
     [](const Tensor& x, const Dims& d, int, KeepDim k) { return var(x, d, 1, k); },
     [](const Numbers& x) { return Numbers{variance_of(x)}; },
     [](const Numbers& g, const Numbers& x) { return variance_slope(g[0], x); }},
    {"stddev", OverSlices::any, OverSlices::one_number,
     [](const Tensor& x, const Dims& d, int, KeepDim k) { return stddev(x, d, 1, k); },
     [](const Numbers& x) { return Numbers{deviation_of(x)}; },
     [](const Numbers& g, const Numbers& x) {
       return variance_slope(g[0] / deviation_of(x) * 0.5, x);
     }},
    {"logsumexp", OverSlices::any, OverSlices::one_number,
     [](const Tensor& x, const Dims& d, int, KeepDim k) { return logsumexp(x, d, k); },
     [](const Numbers& x) { return Numbers{log_of_sum(x)}; },
     [](const Numbers& g, const Numbers& x) {
       const Number y = log_of_sum(x);
       return each(x, [&](auto i) { return exp(x[i] - y) * g[0]; });
     }},
    {"amax", OverSlices::any, OverSlices::one_number,
     [](const Tensor& x, const Dims& d, int, KeepDim k) { return amax(x, d, k); },
     [](const Numbers& x) { return Numbers{largest_of(x)}; }, largest_shares},
    {"cumsum", OverSlices::one, OverSlices::as_many,
     [](const Tensor& x, const Dims&, int d, KeepDim) { return cumsum(x, d); },
     [](const Numbers& x) {
       Sum sum;
       return each(x, [&](auto i) { return sum.add(x[i]), sum.get(x[i].dtype, true); });
     },
     [](const Numbers& g, const Numbers&) {
       Sum sum;
       Numbers out(g.size());
       for (std::size_t i = g.size(); i-- > 0;) sum.add(g[i]), out[i] = sum.get(g[i].dtype, true);
       return out;
     }},
    {"softmax", OverSlices::one, OverSlices::as_many,
     [](const Tensor& x, const Dims&, int d, KeepDim) { return softmax(x, d); }, softmax_of,
     [](const Numbers& g, const Numbers& x) {
       const Numbers y = softmax_of(x);
       const Number sum = sum_of(products(g, y));
       return each(x, [&](auto i) { return y[i] * (g[i] - sum); });
     }},
    {"layer_norm", OverSlices::last, OverSlices::as_many,
     [](const Tensor& x, const Dims&, int, KeepDim) {
       return layer_norm(x, ones_like_row(x, 1), ones_like_row(x, 0), kEps);
     },
     [](const Numbers& x) { return normalized(centred(x)); },
     [](const Numbers& g, const Numbers& x) { return centred(normalized_slope(g, centred(x))); }}};

// The elements of each slice, in order; slices in the order of what they leave.
std::vector<std::vector<std::size_t>> slices_of(const Shape& shape, unsigned mask) {
  const Shape kept = kept_shape(shape, mask);
  std::vector<std::vector<std::size_t>> out(static_cast<std::size_t>(kept.numel()));
  std::size_t i = 0;
  for_each_place(shape, [&](const Shape& place) { out[spread_index(kept, place)].push_back(i++); });
  return out;
}

}  // namespace

std::size_t add_over_slices(Draw& draw, Expression& e, std::size_t x) {
  const OverSlices& op = draw.one_of(kOverSlices);
  const Line& in = e[x];
  const int n = in.shape.ndim();
  need(is_floating(in.dtype) && (n > 0 || op.dimensions == OverSlices::any));
  const int dim = n == 0 || op.dimensions == OverSlices::last ? -1 : draw.number(-n, n - 1);
  Dims dims(dim);
  if (op.dimensions == OverSlices::any && draw.chance(0.3)) dims = Dims();
  if (op.dimensions == OverSlices::any && n > 1 && draw.chance(0.4))
    dims = Dims({dim, draw.chance(0.5) ? (dim + 1 + n) % n : (dim + n - 1 + n) % n});
  const unsigned mask = dims.mask(n);
  const KeepDim keep = draw.chance(0.5) ? KeepDim::yes : KeepDim::no;
  const bool reduces = op.gives == OverSlices::one_number;
  const Shape left =
      keep == KeepDim::yes ? kept_shape(in.shape, mask) : dropped_shape(in.shape, mask);
  Line line{.text = concat(op.name, " of dimensions ", mask, keep == KeepDim::yes ? " kept" : ""),
            .operands = {x},
            .run = [&op, dims, dim, keep](auto v) { return op.run(v[0], dims, dim, keep); },
            .shape = reduces ? left : in.shape,
            .dtype = in.dtype};
  line.values.resize(static_cast<std::size_t>(line.shape.numel()));
  const auto slices = slices_of(in.shape, mask);
  const auto slice_of = [](const Numbers& all, const std::vector<std::size_t>& slice) {
    Numbers out;
    for (const std::size_t i : slice) out.push_back(all[i]);
    return out;
  };
  need(!slices.empty());  // of no slice at all, some operations ask for elements all the same
  for (std::size_t s = 0; s < slices.size(); ++s) {
    const Numbers y = op.value(slice_of(in.values, slices[s]));
    for (std::size_t k = 0; k < y.size(); ++k) line.values[reduces ? s : slices[s][k]] = y[k];
  }
  line.adjoint = [=, &op, values = in.values](const Numbers& g, auto to) {
    for (std::size_t s = 0; s < slices.size(); ++s) {
      if (slices[s].empty()) continue;
      const Numbers slope =
          op.slope(reduces ? Numbers{g[s]} : slice_of(g, slices[s]), slice_of(values, slices[s]));
      for (std::size_t k = 0; k < slope.size(); ++k) to[0][slices[s][k]].add(slope[k]);
    }
  };
  return e.add(std::move(line));
}

// Stacks of matrices, whose leading dimensions broadcast, or a vector on either side.
std::size_t add_matmul(Draw& draw, Expression& e, std::size_t x) {
  need(is_floating(e[x].dtype) && e[x].shape.ndim() > 0);
  const Shape shape = e[x].shape;
  Shape other;
  for (int d = draw.number(0, std::max(0, shape.ndim() - 2)); d < shape.ndim() - 2; ++d)
    other.push_back(draw.chance(0.3) ? 1 : shape[d]);
  other.push_back(shape.back());
  if (draw.chance(0.8))
    other.push_back(draw.whole(1, 4));
  else
    need(other.ndim() == 1);
  const std::size_t y = add_input(draw, e, other, e[x].dtype);
  const Shape& b = e[y].shape;
  const bool row = shape.ndim() == 1, column = b.ndim() == 1;
  const auto leading = [](const Shape& s) {
    Shape out;
    for (int d = 0; d < s.ndim() - 2; ++d) out.push_back(s[d]);
    return out;
  };
  const auto as_matrix = [](const Shape& s, bool is_row, bool is_column) {
    if (is_row) return Shape{1, s[0]};
    return is_column ? Shape{s[0], 1} : s;
  };
  const Shape of_a = as_matrix(shape, row, false), of_b = as_matrix(b, false, column);
  const std::int64_t depth = shape.back();
  Shape full = broadcast(leading(of_a), leading(of_b));  // with dimensions that a vector drops
  full.push_back(of_a[of_a.ndim() - 2]);
  full.push_back(of_b.back());
  Line line{.text = "matmul",
            .operands = {x, y},
            .run = [](auto v) { return matmul(v[0], v[1]); },
            .shape = full,
            .dtype = e[x].dtype,
            .rounds_parts = true};
  if (column) line.shape = line.shape.without(line.shape.ndim() - 1);
  if (row) line.shape = line.shape.without(line.shape.ndim() - 1 - (column ? 0 : 1));
  // A product is not rounded to 16 bits before it is added.
  const DType computing = kernel_test::computed_in(line.dtype);
  const auto in_computing = [computing](Number v) { return Number{v.value, v.error, computing}; };
  // The places of factor k of the element at `place`.
  const auto factors = [=](const Shape& place, std::int64_t k) {
    Shape p = place, q = place;
    p[p.ndim() - 1] = k;
    q[q.ndim() - 2] = k;
    return std::pair(spread_index(of_a, p), spread_index(of_b, q));
  };
  for_each_place(full, [&](const Shape& place) {
    Sum sum;
    for (std::int64_t k = 0; k < depth; ++k) {
      const auto [i, j] = factors(place, k);
      sum.add(in_computing(e[x].values[i]) * in_computing(e[y].values[j]));
    }
    const Number total = sum.get(computing);
    line.values.push_back(depth == 0 ? exact(0, line.dtype)
                                     : rounded(total.value, total.error, line.dtype));
  });
  line.adjoint = [=, va = e[x].values, vb = e[y].values](const Numbers& g, auto to) {
    std::size_t n = 0;
    for_each_place(full, [&](const Shape& place) {
      for (std::int64_t k = 0; k < depth; ++k) {
        const auto [i, j] = factors(place, k);
        to[0][i].add(g[n] * vb[j]);
        to[1][j].add(g[n] * va[i]);
      }
      ++n;
    });
  };
  return e.add(std::move(line));
}

}  // namespace tessera::testing
