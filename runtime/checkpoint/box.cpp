#include "runtime/checkpoint/box.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <span>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::checkpoint {
namespace {

// Elements `begin` to `end` of dimension d, and all of the others.
std::string text_of_range(std::size_t d, std::int64_t begin, std::int64_t end) {
  const std::string range = concat(begin, " to ", end - 1);
  return d == 0 ? concat("rows ", range) : concat("elements ", range, " of dimension ", d);
}

// Boxes that are to cover [begin, end) of dimension d, and all of those behind it. Sorted by where
// they begin along d, boxes of a grid fall into bands: all of one band begin and end together. What
// is no grid is cut into bands first.
std::string fault_of_bands(const Sizes& whole, std::span<Box> boxes, std::size_t d) {
  if (d == whole.size())
    return boxes.size() == 1 ? "" : concat("is stored ", boxes.size(), " times in its files");
  std::ranges::sort(boxes, {}, [d](const Box& box) { return std::pair(box.begin[d], box.end(d)); });
  std::int64_t covered = 0;
  std::vector<Box> cut;  // what is left of boxes that reach beyond a band
  std::size_t next = 0;
  const auto hole = [&](std::int64_t end) {
    return concat("lacks ", text_of_range(d, covered, end), ", which are in none of its files");
  };
  while (next < boxes.size() || !cut.empty()) {
    std::vector<Box> band = std::move(cut);
    cut.clear();
    if (band.empty() && boxes[next].begin[d] > covered) return hole(boxes[next].begin[d]);
    while (next < boxes.size() && boxes[next].begin[d] == covered) band.push_back(boxes[next++]);
    std::int64_t end = next < boxes.size() ? boxes[next].begin[d] : whole[d];
    for (const Box& box : band) end = std::min(end, box.end(d));
    for (Box& box : band) {
      if (box.end(d) > end) {
        cut.push_back(box);
        cut.back().sizes[d] = box.end(d) - end;
        cut.back().begin[d] = end;
      }
      box.begin[d] = covered;
      box.sizes[d] = end - covered;
    }
    const std::string fault = fault_of_bands(whole, band, d + 1);
    if (!fault.empty())
      return d == 0 ? concat(fault, ", in ", text_of_range(d, covered, end)) : fault;
    covered = end;
  }
  return covered < whole[d] ? hole(whole[d]) : "";
}

// Whether boxes within a tensor, of which none is empty, hold each of its elements once: that is
// where they are as large together and none meets another. Swept along one of the two dimensions
// that they cut, which takes n log n steps for any n boxes; false where they cut more dimensions.
bool is_swept(const Sizes& whole, std::vector<Box>& boxes) {
  std::vector<std::size_t> cut;
  for (std::size_t d = 0; d < whole.size(); ++d)
    if (std::ranges::any_of(boxes, [&](const Box& box) { return box.sizes[d] != whole[d]; }))
      cut.push_back(d);
  if (cut.empty() || cut.size() > 2) return false;
  const std::size_t along = cut.front(), across = cut.back();
  // Elements of the dimensions that are cut.
  const auto get_area = [&](const Sizes& sizes, std::int64_t& area) {
    area = sizes[along];
    return cut.size() == 1 || !__builtin_mul_overflow(area, sizes[across], &area);
  };
  std::int64_t left = 0;
  if (!get_area(whole, left)) return false;
  std::ranges::sort(boxes, {}, [&](const Box& box) { return box.begin[along]; });
  struct Last {
    std::int64_t end, until;  // across, along
  };
  std::map<std::int64_t, Last> last;  // by where they begin across: the last boxes there
  for (const Box& box : boxes) {
    std::int64_t own = 0;
    if (!get_area(box.sizes, own) || own > left) return false;
    left -= own;
    auto at = last.upper_bound(box.begin[across]);
    if (at != last.begin()) --at;
    while (at != last.end() && at->first < box.end(across)) {
      const bool is_beside = at->second.end <= box.begin[across];
      if (!is_beside && at->second.until > box.begin[along]) return false;
      at = is_beside ? std::next(at) : last.erase(at);
    }
    last[box.begin[across]] = {box.end(across), box.end(along)};
  }
  return left == 0;
}

}  // namespace

std::int64_t numel_of(const Sizes& sizes) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) n = checked_mul(n, size);
  return n;
}

Sizes strides_of(const Sizes& sizes) {
  Sizes strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  return strides;
}

std::int64_t element_of(const Sizes& index, const Sizes& strides) {
  std::int64_t element = 0;
  for (std::size_t d = 0; d < index.size(); ++d) element += index[d] * strides[d];
  return element;
}

Box common(const Box& a, const Box& b) {
  Box out = a;
  for (std::size_t d = 0; d < a.begin.size(); ++d) {
    out.begin[d] = std::max(a.begin[d], b.begin[d]);
    out.sizes[d] = std::max<std::int64_t>(std::min(a.end(d), b.end(d)) - out.begin[d], 0);
  }
  return out;
}

std::string text_of(const Sizes& sizes) {
  std::string out = "[";
  for (const std::int64_t size : sizes) out += concat(out.size() > 1 ? ", " : "", size);
  return out + ']';
}

std::string text_of(const Box& box, const Sizes& whole) {
  std::size_t cut = whole.size();  // the only dimension that is cut; or several, or none
  bool several = false;
  for (std::size_t d = 0; d < whole.size(); ++d)
    if (box.sizes[d] != whole[d]) {
      several = cut < whole.size();
      cut = d;
    }
  if (cut == whole.size()) return "all of it";
  if (!several) return text_of_range(cut, box.begin[cut], box.end(cut));
  return concat(text_of(box.sizes), " at ", text_of(box.begin));
}

std::string fault_of_cover(const Sizes& whole, std::vector<Box> boxes) {
  for (const Box& box : boxes)
    for (std::size_t d = 0; d < whole.size(); ++d)
      if (box.begin[d] > whole[d] || box.sizes[d] > whole[d] - box.begin[d])
        return concat("has a box ", text_of(box.sizes), " at ", text_of(box.begin),
                      " outside of its shape ", text_of(whole));
  if (std::ranges::find(whole, 0) != whole.end())
    return boxes.size() == 1 ? "" : concat("is stored ", boxes.size(), " times in its files");
  if (is_swept(whole, boxes)) return "";
  return fault_of_bands(whole, boxes, 0);
}

std::vector<Stretch> stretches(const Box& of, const Box& box, const Sizes& to_strides) {
  std::vector<Stretch> inner_first;
  std::int64_t from = 1;
  for (std::size_t d = of.sizes.size(); d-- > 0;) {
    const Stretch own{of.sizes[d], from, to_strides[d]};
    from *= box.sizes[d];
    if (own.count == 1 && !inner_first.empty()) continue;
    Stretch* const last = inner_first.empty() ? nullptr : &inner_first.back();
    if (last && own.from == last->count * last->from && own.to == last->count * last->to)
      last->count *= own.count;
    else
      inner_first.push_back(own);
  }
  if (inner_first.empty()) inner_first.push_back({1, 1, 1});
  return {inner_first.rbegin(), inner_first.rend()};
}

std::vector<Box> boxes_of_run(const Sizes& sizes, std::int64_t begin, std::int64_t end) {
  std::vector<Box> boxes;
  const Sizes strides = strides_of(sizes);
  // At each place the largest box that begins there and ends within the run.
  while (begin < end) {
    Box box{Sizes(sizes.size()), Sizes(sizes.size(), 1)};
    std::size_t d = sizes.size();  // the outermost dimension of which it has several
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      box.begin[i] = begin / strides[i] % sizes[i];
      if (d == sizes.size() && begin % strides[i] == 0 && end - begin >= strides[i]) d = i;
      if (d < i) box.sizes[i] = sizes[i];
    }
    if (d < sizes.size())
      box.sizes[d] = std::min((end - begin) / strides[d], sizes[d] - box.begin[d]);
    begin += numel_of(box.sizes);
    boxes.push_back(std::move(box));
  }
  return boxes;
}

}  // namespace tessera::checkpoint
