// Operations of random expressions that only move elements: views and copies. Each says where an
// element of its result lies in x.
#include <numeric>

#include "tessera/autograd/ops.hpp"
#include "tests/random_users/expression.hpp"

namespace tessera::testing {
namespace {

// What an operation is given.
struct Arguments {
  Shape s;                                    // of x
  int d = 0, e = 0;                           // dimensions
  std::int64_t begin = 0, end = 0, step = 1;  // of a slice along d
  std::int64_t i = 0, j = 0;                  // any numbers, not negative
  Shape to{};                                 // to which x is expanded

  std::int64_t n() const { return s[d]; }
  int ndim() const { return s.ndim(); }
};

struct Movement {
  const char* name;
  Tensor (*run)(const Tensor& x, const Arguments& g);
  Shape (*shape)(const Arguments& g);
  // The place in x of the result's element at `at`; of none it is `fill`.
  std::optional<Shape> (*from)(const Arguments& g, Shape at);
  double fill = 0;
};

Shape same(const Arguments& g) { return g.s; }
Shape swapped(Shape s, int d, int e) {
  std::swap(s[d], s[e]);
  return s;
}
// The place of the i-th element.
Shape place_of(const Shape& shape, std::size_t i) {
  Shape out = shape;
  auto rest = static_cast<std::int64_t>(i);
  for (int d = shape.ndim() - 1; d >= 0; rest /= shape[d--]) out[d] = rest % shape[d];
  return out;
}
std::vector<int> rotated(const Arguments& g) {
  std::vector<int> order(static_cast<std::size_t>(g.ndim()));
  for (int d = 0; d < g.ndim(); ++d)
    order[static_cast<std::size_t>(d)] = (d + static_cast<int>(g.i)) % g.ndim();
  return order;
}
int offset(const Arguments& g) { return static_cast<int>(g.i % 5) - 2; }
int new_dim(const Arguments& g) { return static_cast<int>(g.i) % (g.ndim() + 1); }

constexpr double kPadding = 3;

const Movement kTranspose{
    "transpose",
    [](const Tensor& x, const Arguments& g) { return transpose(x, g.d, g.e - g.ndim()); },
    [](const Arguments& g) { return swapped(g.s, g.d, g.e); },
    [](const Arguments& g, Shape at) { return std::optional(swapped(at, g.d, g.e)); }};
const Movement kSlice{
    "slice",
    [](const Tensor& x, const Arguments& g) { return slice(x, g.d, g.begin, g.end, g.step); },
    [](const Arguments& g) { return g.s.with(g.d, (g.end - g.begin + g.step - 1) / g.step); },
    [](const Arguments& g, Shape at) {
      return std::optional(at.with(g.d, g.begin + at[g.d] * g.step));
    }};
const Movement kExpand{"expand",
                       [](const Tensor& x, const Arguments& g) { return expand(x, g.to); },
                       [](const Arguments& g) { return g.to; },
                       [](const Arguments& g, Shape at) {
                         return std::optional(place_of(g.s, spread_index(g.s, at)));
                       }};

const Movement kMovements[] = {
    kTranspose,
    kSlice,
    kExpand,
    {"permute", [](const Tensor& x, const Arguments& g) { return permute(x, rotated(g)); },
     [](const Arguments& g) {
       Shape to;
       for (const int d : rotated(g)) to.push_back(g.s[d]);
       return to;
     },
     [](const Arguments& g, Shape at) {
       Shape from = g.s;
       for (int d = 0; d < g.ndim(); ++d) from[rotated(g)[static_cast<std::size_t>(d)]] = at[d];
       return std::optional(from);
     }},
    {"select",
     [](const Tensor& x, const Arguments& g) {
       return select(x, g.d, g.i % g.n() - g.j % 2 * g.n());
     },
     [](const Arguments& g) { return need(g.n() > 0), g.s.without(g.d); },
     [](const Arguments& g, Shape at) { return std::optional(inserted(at, g.d, g.i % g.n())); }},
    {"unsqueeze", [](const Tensor& x, const Arguments& g) { return unsqueeze(x, new_dim(g)); },
     [](const Arguments& g) { return inserted(g.s, new_dim(g), 1); },
     [](const Arguments& g, Shape at) { return std::optional(at.without(new_dim(g))); }},
    {"reshape", [](const Tensor& x, const Arguments& g) { return reshape(x, {-1, 1 + g.i % 4}); },
     [](const Arguments& g) {
       need(g.s.numel() > 0 && g.s.numel() % (1 + g.i % 4) == 0);
       return Shape{g.s.numel() / (1 + g.i % 4), 1 + g.i % 4};
     },
     [](const Arguments& g, Shape at) {
       return std::optional(place_of(g.s, static_cast<std::size_t>(at[0] * (1 + g.i % 4) + at[1])));
     }},
    {"diagonal",
     [](const Tensor& x, const Arguments& g) { return diagonal(x, offset(g), g.d, g.e); },
     [](const Arguments& g) {
       need(g.d != g.e);
       Shape to = g.s.without(std::max(g.d, g.e)).without(std::min(g.d, g.e));
       const std::int64_t most =
           std::min(g.s[g.d] + std::min(offset(g), 0), g.s[g.e] - std::max(offset(g), 0));
       to.push_back(std::max<std::int64_t>(0, most));
       return to;
     },
     [](const Arguments& g, Shape at) {
       Shape from = g.s;
       for (int d = 0, next = 0; d < g.ndim(); ++d)
         from[d] = d == g.d   ? at.back() - std::min(offset(g), 0)
                   : d == g.e ? at.back() + std::max(offset(g), 0)
                              : at[next++];
       return std::optional(from);
     }},
    {"flip", [](const Tensor& x, const Arguments& g) { return flip(x, {g.d}); }, same,
     [](const Arguments& g, Shape at) { return std::optional(at.with(g.d, g.n() - 1 - at[g.d])); }},
    {"roll", [](const Tensor& x, const Arguments& g) { return roll(x, g.i - 30, g.d); }, same,
     [](const Arguments& g, Shape at) {
       return std::optional(at.with(g.d, ((at[g.d] - g.i + 30) % g.n() + g.n()) % g.n()));
     }},
    {"repeat",
     [](const Tensor& x, const Arguments& g) {
       Shape times = g.s;
       for (int d = 0; d < g.ndim(); ++d) times[d] = d == g.d ? g.i % 4 : 1;
       return repeat(x, times);
     },
     [](const Arguments& g) { return g.s.with(g.d, g.i % 4 * g.n()); },
     [](const Arguments& g, Shape at) { return std::optional(at.with(g.d, at[g.d] % g.n())); }},
    {"repeat_interleave",
     [](const Tensor& x, const Arguments& g) {
       return repeat_interleave(x, g.i % 4, g.d - g.ndim());
     },
     [](const Arguments& g) { return g.s.with(g.d, g.i % 4 * g.n()); },
     [](const Arguments& g, Shape at) { return std::optional(at.with(g.d, at[g.d] / (g.i % 4))); }},
    {"split",
     [](const Tensor& x, const Arguments& g) {
       const auto parts = split(x, 1 + g.i % 4, g.d);
       return parts.at(static_cast<std::size_t>(g.j) % parts.size());
     },
     [](const Arguments& g) {
       need(g.n() > 0);
       const std::int64_t size = 1 + g.i % 4, first = g.j % ((g.n() + size - 1) / size) * size;
       return g.s.with(g.d, std::min(size, g.n() - first));
     },
     [](const Arguments& g, Shape at) {
       const std::int64_t size = 1 + g.i % 4;
       return std::optional(at.with(g.d, at[g.d] + g.j % ((g.n() + size - 1) / size) * size));
     }},
    {"pad",
     [](const Tensor& x, const Arguments& g) {
       return pad(x, {g.i % 4 - 1, g.j % 4 - 1}, kPadding);
     },
     [](const Arguments& g) {
       const std::int64_t size = g.s.back() + g.i % 4 + g.j % 4 - 2;
       need(size >= 0);
       return g.s.with(g.ndim() - 1, size);
     },
     [](const Arguments& g, Shape at) {
       const std::int64_t place = at.back() - g.i % 4 + 1;
       return place >= 0 && place < g.s.back() ? std::optional(at.with(g.ndim() - 1, place))
                                               : std::nullopt;
     },
     kPadding},
    {"tril", [](const Tensor& x, const Arguments& g) { return tril(x, offset(g)); },
     [](const Arguments& g) { return need(g.ndim() > 1), g.s; },
     [](const Arguments& g, Shape at) {
       return at.back() - at[g.ndim() - 2] <= offset(g) ? std::optional(at) : std::nullopt;
     }},
    {"contiguous", [](const Tensor& x, const Arguments&) { return contiguous(x); }, same,
     [](const Arguments&, Shape at) { return std::optional(at); }}};

std::size_t add(Expression& e, std::size_t x, const Movement& op, const Arguments& g) {
  std::string text = concat(op.name, " (d ", g.d, " e ", g.e, " i ", g.i, " j ", g.j, " slice ",
                            g.begin, ' ', g.end, ' ', g.step, ')');
  return add_linear(
      e, std::move(text), {x}, [&op, g](auto v) { return op.run(v[0], g); }, op.shape(g),
      [&](const Shape& at) {
        const std::optional<Shape> from = op.from(g, at);
        return from ? std::vector<Term>{{0, index_of(g.s, *from)}} : std::vector<Term>();
      },
      op.fill);
}

}  // namespace

std::size_t add_linear(Expression& e, std::string text, std::vector<std::size_t> operands, Run run,
                       const Shape& shape,
                       const std::function<std::vector<Term>(const Shape& place)>& terms,
                       double fill) {
  need(shape.numel() <= kMostElements);
  const DType dtype = e[operands[0]].dtype;
  Line line{.text = std::move(text),
            .operands = std::move(operands),
            .run = std::move(run),
            .shape = shape,
            .dtype = dtype,
            .rounds_parts = true};
  std::vector<std::vector<Term>> all;
  for_each_place(shape, [&](const Shape& place) {
    all.push_back(terms(place));
    Sum sum;
    for (const auto& [operand, element] : all.back())
      sum.add(e[line.operands[operand]].values.at(element));
    line.values.push_back(all.back().empty() ? exact(fill, dtype) : sum.get(dtype, true));
  });
  line.adjoint = [all](const Numbers& g, auto to) {
    for (std::size_t i = 0; i < g.size(); ++i)
      for (const auto& [operand, element] : all[i]) to[operand][element].add(g[i]);
  };
  return e.add(std::move(line));
}

std::size_t add_movement(Draw& draw, Expression& e, std::size_t x) {
  Arguments g{.s = e[x].shape};
  need(g.ndim() > 0);
  g.d = draw.number(0, g.ndim() - 1);
  g.e = draw.number(0, g.ndim() - 1);
  g.begin = draw.whole(0, g.n());
  g.end = draw.whole(g.begin, g.n());
  g.step = draw.whole(1, 3);
  g.i = draw.whole(0, 59);
  g.j = draw.whole(0, 59);
  if (draw.chance(0.5)) g.to.push_back(draw.whole(1, 3));
  for (const std::int64_t size : g.s) g.to.push_back(size == 1 ? draw.whole(0, 4) : size);
  return add(e, x, draw.one_of(kMovements), g);
}

std::size_t add_input(Draw& draw, Expression& e, const Shape& shape, DType dtype) {
  // Some have ties and kinks among them; half are positive, as logarithms and roots want them.
  const bool is_coarse = draw.chance(0.3);
  const double low = draw.chance(0.5) ? 0.25 : -2;
  const auto value = [&] {
    if (dtype == boolean) return static_cast<double>(draw.number(0, 1));
    if (!is_floating(dtype)) return static_cast<double>(draw.number(-6, 6));
    return is_coarse ? static_cast<double>(draw.number(low > 0 ? 1 : -4, 4)) / 2
                     : draw.real(low, 2);
  };
  const auto leaf = [&](const Shape& of) { return e.leaf(draw, of, dtype, value); };
  Arguments g{.s = shape, .to = shape};
  const int layout = shape.ndim() == 0 ? 0 : draw.number(0, 6);
  if (layout == 0 || layout > 3) return leaf(shape);
  g.d = draw.number(0, g.ndim() - 1);
  g.e = draw.number(0, g.ndim() - 1);
  if (layout == 1) g.s = swapped(shape, g.d, g.e);
  if (layout == 2) {
    g.begin = draw.whole(0, 2);
    g.step = draw.whole(1, 3);
    g.end = g.begin + (g.n() > 0 ? (g.n() - 1) * g.step + 1 : 0);
    g.s[g.d] = g.end + draw.whole(0, 2);
  }
  if (layout == 3) g.s[g.d] = g.s[g.e] = 1;
  const std::size_t base = leaf(g.s);
  return add(e, base, layout == 1 ? kTranspose : layout == 2 ? kSlice : kExpand, g);
}

}  // namespace tessera::testing
