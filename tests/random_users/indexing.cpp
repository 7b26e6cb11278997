// Operations of random expressions that put several tensors together, order one, or read and write
// it at indices.
#include <algorithm>
#include <numeric>

#include "tessera/autograd/ops.hpp"
#include "tests/random_users/expression.hpp"

namespace tessera::testing {
namespace {

int draw_dim(Draw& draw, const Shape& shape) {
  need(shape.ndim() > 0);
  return draw.number(0, shape.ndim() - 1);
}

// A leaf of indices below n, of which some are counted from the back where those are read so.
std::size_t add_indices(Draw& draw, Expression& e, const Shape& shape, std::int64_t n,
                        bool from_back = false) {
  need(n > 0);
  return e.leaf(draw, shape, draw.chance(0.5) ? i32 : i64, [&, n] {
    return static_cast<double>(draw.whole(from_back && draw.chance(0.5) ? -n : 0, n - 1));
  });
}
std::int64_t index_at(const Line& indices, const Shape& place, std::int64_t n) {
  const double at = indices.values[spread_index(indices.shape, place)].value;
  return static_cast<std::int64_t>(at) + (at < 0 ? n : 0);
}

// The places of each slice along d in the order of their elements, which is known.
std::vector<std::int64_t> sorted_places(const Line& x, int d, Shape place, bool descends) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(x.shape[d]));
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](std::int64_t i) { return x.values[index_of(x.shape, place.with(d, i))]; };
  std::ranges::sort(order, [&](auto i, auto j) {
    const double a = at(i).value, b = at(j).value;
    if (a == b) return i < j;  // equal ones keep their order
    return descends ? a > b : a < b;
  });
  for (std::size_t k = 1; k < order.size(); ++k) {
    const Number a = at(order[k - 1]), b = at(order[k]);
    need((a.is_exact() && b.is_exact()) || (descends ? a.low() > b.high() : a.high() < b.low()));
  }
  return order;
}

std::size_t add_order(Draw& draw, Expression& e, std::size_t x) {
  const bool gives_places = draw.chance(0.3);
  const int d = draw_dim(draw, e[x].shape), n = e[x].shape.ndim(), dim = d - n;
  const std::int64_t size = e[x].shape[d], k = draw.whole(0, size);
  need(e[x].dtype != boolean && e[x].shape.numel() > 0);
  const Order order = draw.chance(0.5) ? Order::ascending : Order::descending;
  const int kind = draw.number(0, 2);  // sort, topk, the largest
  const bool descends = kind == 2 || order == Order::descending;
  const Run run = [=](auto v) {
    const ValuesAndIndices both = kind == 0   ? sort(v[0], dim, order)
                                  : kind == 1 ? topk(v[0], k, dim, order)
                                              : max_with_index(v[0], dim);
    return gives_places ? both.indices : both.values;
  };
  const char* const names[] = {"sort", "topk", "max"};
  const std::string text = concat(names[kind], gives_places ? "_places " : " ", d, ' ',
                                  descends ? "descending" : "ascending");
  const Shape shape = kind == 2 ? e[x].shape.without(d) : e[x].shape.with(d, kind == 1 ? k : size);
  const auto source = [&](const Shape& at) {
    const Shape place = kind == 2 ? inserted(at, d, 0) : at;
    return place.with(d, sorted_places(e[x], d, place,
                                       descends)[static_cast<std::size_t>(kind == 2 ? 0 : at[d])]);
  };
  if (!gives_places)
    return add_linear(e, text, {x}, run, shape, [&](const Shape& at) {
      return std::vector<Term>{{0, index_of(e[x].shape, source(at))}};
    });
  Line line{.text = text, .operands = {x}, .run = run, .shape = shape, .dtype = i64};
  for_each_place(shape, [&](const Shape& at) {
    line.values.push_back(exact(static_cast<double>(source(at)[d]), i64));
  });
  return e.add(std::move(line));
}

// x[...] with numbers, ranges, a new dimension and at most one tensor.
std::size_t add_index(Draw& draw, Expression& e, std::size_t x) {
  const Shape shape = e[x].shape;
  struct Part {
    enum { number, range, axis, tensor } kind;
    std::int64_t begin, step;
    int at;  // of its dimensions in the result
  };
  std::vector<Part> parts;
  std::vector<Index> written;
  std::vector<std::size_t> operands{x};
  Shape result;
  std::size_t tensor_at = 0;
  const int dims = draw_dim(draw, shape) + 1;
  for (int d = 0; d < dims; ++d) {
    const std::int64_t n = shape[d];
    const int kind = draw.number(0, operands.size() == 1 ? 3 : 2);
    if (kind == Part::number) {
      need(n > 0);
      const std::int64_t i = draw.whole(-n, n - 1);
      parts.push_back({Part::number, i < 0 ? i + n : i, 1, 0});
      written.emplace_back(i);
    } else if (kind == Part::tensor) {
      operands.push_back(add_indices(draw, e, draw.shape(0, 2), n, true));
      parts.push_back({Part::tensor, n, 1, result.ndim()});
      tensor_at = written.size();
      written.emplace_back(0);
      for (const std::int64_t size : e[operands[1]].shape) result.push_back(size);
    } else {
      if (kind == Part::axis && result.ndim() == 0) {
        result.push_back(1);
        written.emplace_back(new_axis);
      }
      // By Python's rules: cut off at the ends.
      const std::int64_t begin = draw.whole(-n - 1, n + 1), end = draw.whole(-n - 1, n + 1),
                         step = draw.whole(1, 3);
      const auto cut = [n](std::int64_t i) {
        return std::clamp<std::int64_t>(i < 0 ? i + n : i, 0, n);
      };
      parts.push_back({Part::range, cut(begin), step, result.ndim()});
      result.push_back(std::max<std::int64_t>(0, (cut(end) - cut(begin) + step - 1) / step));
      written.emplace_back(Range{begin, end, step});
    }
  }
  if (draw.chance(0.3)) written.emplace_back(ellipsis);
  const int rest = result.ndim();
  // A new dimension, of which there is one, stands beside all that no number takes away.
  need(shape.ndim() < kMaxDims || std::ranges::count(parts, Part::number, &Part::kind) > 0);
  for (int d = dims; d < shape.ndim(); ++d) result.push_back(shape[d]);
  const Run run = [=](auto v) {
    std::vector<Index> at = written;
    if (v.size() > 1) at[tensor_at] = Index(v[1]);
    return index(v[0], at);
  };
  return add_linear(e, concat("index of ", dims), operands, run, result, [&](const Shape& place) {
    Shape from = shape;
    for (int d = 0; d < shape.ndim(); ++d) {
      if (d >= dims) {
        from[d] = place[rest + d - dims];
        continue;
      }
      const Part& part = parts[static_cast<std::size_t>(d)];
      if (part.kind == Part::tensor) {
        const Line& indices = e[operands[1]];
        Shape at = indices.shape;
        for (int k = 0; k < at.ndim(); ++k) at[k] = place[part.at + k];
        from[d] = index_at(indices, at, shape[d]);
      } else {
        from[d] = part.begin + (part.kind == Part::range ? part.step * place[part.at] : 0);
      }
    }
    return std::vector<Term>{{0, index_of(shape, from)}};
  });
}

// x with a source's elements set or added where `target` says that they go.
template <class F>
std::size_t add_written(Expression& e, std::string text, std::vector<std::size_t> operands, Run run,
                        const Shape& source, F target, bool adds) {
  const Shape shape = e[operands[0]].shape;
  std::vector<std::vector<Term>> terms;
  for (std::size_t i = 0; i < e[operands[0]].values.size(); ++i) terms.push_back({{0, i}});
  for_each_place(source, [&](const Shape& place) {
    auto& at = terms[index_of(shape, target(place))];
    if (!adds) at.clear();  // the last one stays
    at.push_back({1, spread_index(e[operands[1]].shape, place)});
  });
  return add_linear(e, std::move(text), std::move(operands), std::move(run), shape,
                    [&](const Shape& place) { return terms[index_of(shape, place)]; });
}

std::size_t add_at_rows(Draw& draw, Expression& e, std::size_t x) {
  const Shape shape = e[x].shape;
  const int d = draw_dim(draw, shape), dim = d - shape.ndim(), kind = draw.number(0, 2);
  const std::size_t rows = add_indices(draw, e, {draw.whole(0, 5)}, shape[d]);
  const Shape source = shape.with(d, e[rows].shape[0]);
  const auto to = [&](const Shape& at) { return at.with(d, index_at(e[rows], {at[d]}, shape[d])); };
  if (kind == 0)
    return add_linear(
        e, concat("index_select ", d), {x, rows},
        [=](auto v) { return index_select(v[0], dim, v[1]); }, source,
        [&](const Shape& at) { return std::vector<Term>{{0, index_of(shape, to(at))}}; });
  const std::size_t y = add_input(draw, e, source, e[x].dtype);
  return add_written(
      e, concat(kind == 1 ? "index_add " : "index_copy ", d), {x, y, rows},
      [=](auto v) {
        return kind == 1 ? index_add(v[0], dim, v[2], v[1]) : index_copy(v[0], dim, v[2], v[1]);
      },
      source, to, kind == 1);
}

std::size_t add_at_elements(Draw& draw, Expression& e, std::size_t x) {
  const Shape shape = e[x].shape;
  const int d = draw_dim(draw, shape), dim = d - shape.ndim(), kind = draw.number(0, 2);
  Shape read = shape.with(d, draw.whole(0, 5));
  for (int k = 0; k < shape.ndim(); ++k)
    if (k != d && read[k] > 1 && draw.chance(0.3)) --read[k];
  const std::size_t at = add_indices(draw, e, read, shape[d]);
  const auto to = [&](const Shape& p) { return p.with(d, index_at(e[at], p, shape[d])); };
  if (kind == 0)
    return add_linear(
        e, concat("gather ", d), {x, at}, [=](auto v) { return gather(v[0], dim, v[1]); }, read,
        [&](const Shape& p) { return std::vector<Term>{{0, index_of(shape, to(p))}}; });
  const std::size_t y = add_input(draw, e, read, e[x].dtype);
  return add_written(
      e, concat(kind == 1 ? "scatter_add " : "scatter ", d), {x, y, at},
      [=](auto v) {
        return kind == 1 ? scatter_add(v[0], dim, v[2], v[1]) : scatter(v[0], dim, v[2], v[1]);
      },
      read, to, kind == 1);
}

std::size_t add_index_put(Draw& draw, Expression& e, std::size_t x) {
  const Shape shape = e[x].shape;
  const int n = draw_dim(draw, shape) + 1;
  Shape values = draw.shape(0, 2);
  const int leading = values.ndim();
  std::vector<std::size_t> operands{x, x};
  for (int d = 0; d < n; ++d) {
    Shape own = values;
    own = Shape(std::span(own.begin(), static_cast<std::size_t>(leading)));
    if (leading > 0 && d > 0 && draw.chance(0.3)) own[0] = 1;
    operands.push_back(add_indices(draw, e, own, shape[d], true));
  }
  for (int d = n; d < shape.ndim(); ++d) values.push_back(shape[d]);
  Shape given = values;
  for (int d = 0; d < given.ndim(); ++d)
    if (draw.chance(0.2)) given[d] = 1;
  operands[1] = add_input(draw, e, given, e[x].dtype);
  const Put how = draw.chance(0.5) ? Put::set : Put::add;
  return add_written(
      e, how == Put::add ? "index_put added" : "index_put set", operands,
      [how](auto v) { return index_put(v[0], v.subspan(2), v[1], how); }, values,
      [&](const Shape& place) {
        Shape to = shape;
        const Shape front(std::span(place.begin(), static_cast<std::size_t>(leading)));
        for (int d = 0; d < shape.ndim(); ++d)
          to[d] = d < n ? index_at(e[operands[static_cast<std::size_t>(d) + 2]], front, shape[d])
                        : place[leading + d - n];
        return to;
      },
      how == Put::add);
}

std::size_t add_cat(Draw& draw, Expression& e, std::size_t x) {
  const Shape s = e[x].shape;
  const int d = draw_dim(draw, s), dim = d - s.ndim();
  const Shape other = s.with(d, draw.whole(0, 3));
  const std::size_t y = add_input(draw, e, other, e[x].dtype);
  return add_linear(
      e, concat("cat ", d), {x, y, x}, [=](auto v) { return cat(v, dim); },
      s.with(d, 2 * s[d] + other[d]),
      [&](const Shape& at) {
        const std::int64_t i = at[d] - s[d], j = i - other[d];
        if (i < 0) return std::vector<Term>{{0, index_of(s, at)}};
        return j < 0 ? std::vector<Term>{{1, index_of(other, at.with(d, i))}}
                     : std::vector<Term>{{2, index_of(s, at.with(d, j))}};
      });
}

std::size_t add_where(Draw& draw, Expression& e, std::size_t x) {
  const Shape s = e[x].shape;
  const std::size_t y = add_input(draw, e, s, e[x].dtype), mask = add_input(draw, e, s, boolean);
  return add_linear(
      e, "where", {x, y, mask}, [](auto v) { return where(v[2], v[0], v[1]); }, s,
      [&](const Shape& at) {
        const std::size_t i = index_of(s, at);
        return std::vector<Term>{{e[mask].values[i].value != 0 ? 0u : 1u, i}};
      });
}

}  // namespace

std::size_t add_indexing(Draw& draw, Expression& e, std::size_t x) {
  constexpr Operation kOperations[] = {add_order,       add_index, add_index_put, add_at_rows,
                                       add_at_elements, add_cat,   add_where};
  return draw.one_of(kOperations)(draw, e, x);
}

}  // namespace tessera::testing
