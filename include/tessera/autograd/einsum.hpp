// Einstein's sums, from public operations: letters become batch, rows, columns or sums of one
// matmul.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/autograd/elementwise.hpp"
#include "tessera/autograd/products.hpp"
#include "tessera/autograd/reductions.hpp"
#include "tessera/autograd/shapes.hpp"

namespace tessera {

namespace einsum_terms {

inline bool has(std::string_view letters, char c) {
  return letters.find(c) != std::string_view::npos;
}

inline bool stands_once(std::string_view letters, char c) {
  return has(letters, c) && letters.find(c) == letters.rfind(c);
}

// The letters of one operand. "..." becomes digits that end with 9, so that those of both operands
// meet from the last.
inline std::string letters_of(std::string_view term, int ndim) {
  const std::size_t dots = term.find("...");
  std::string letters(term);
  if (dots != std::string_view::npos) {
    std::string rest;
    for (int d = ndim - static_cast<int>(term.size()) + 3; d > 0; --d)
      rest.push_back(static_cast<char>('9' - d + 1));
    letters = concat(term.substr(0, dots), rest, term.substr(dots + 3));
  }
  TESSERA_EXPECT(static_cast<int>(letters.size()) == ndim, "einsum: '", term, "' names ",
                 letters.size(), " dimensions, the tensor has ", ndim, "; give each a letter");
  return letters;
}

// An operand with a letter for each dimension, every letter once.
struct Lettered {
  Tensor tensor;
  std::string letters;

  void sum_out(const std::string& used) {
    for (std::size_t d = letters.size(); d-- > 0;)
      if (!has(used, letters[d])) {
        tensor = sum(tensor, static_cast<int>(d));
        letters.erase(d, 1);
      }
  }
  // The tensor with the dimensions `wanted`, in that order; a letter that it lacks has size 1.
  Tensor as(std::string_view wanted) const {
    std::vector<int> order;
    for (const char c : wanted)
      if (has(letters, c)) order.push_back(static_cast<int>(letters.find(c)));
    Tensor y = permute(tensor, order);
    for (std::size_t d = 0; d < wanted.size(); ++d)
      if (!has(letters, wanted[d])) y = unsqueeze(y, static_cast<int>(d));
    return y;
  }
  std::int64_t size(char c) const {
    return has(letters, c) ? tensor.size(static_cast<int>(letters.find(c))) : 1;
  }
};

// A letter that stands twice is a diagonal.
inline Lettered lettered(std::string_view term, const Tensor& x) {
  Lettered out{x, letters_of(term, x.ndim())};
  for (std::size_t d = 0; d < out.letters.size(); ++d)
    for (std::size_t e; (e = out.letters.find(out.letters[d], d + 1)) != std::string::npos;) {
      const char c = out.letters[d];
      TESSERA_EXPECT(out.tensor.size(static_cast<int>(d)) == out.tensor.size(static_cast<int>(e)),
                     "einsum: '", c, "' names two dimensions of different sizes in ", x.shape(),
                     "; give each a letter of its own");
      out.tensor = diagonal(out.tensor, 0, static_cast<int>(d), static_cast<int>(e));
      out.letters.erase(e, 1).erase(d, 1).push_back(c);
      d = 0;
    }
  return out;
}

inline bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// The digits of "...", sorted.
inline std::string digits_of(const std::string& letters) {
  std::string digits;
  for (char c = '0'; c <= '9'; ++c)
    if (has(letters, c)) digits.push_back(c);
  return digits;
}
inline std::string default_result(const std::string& both) {
  std::string singles;
  for (char c = 'A'; c <= 'z'; ++c)
    if (is_letter(c) && stands_once(both, c)) singles.push_back(c);
  return digits_of(both) + singles;
}

}  // namespace einsum_terms

// Sums of products of two operands by Einstein's rule, for example "bqd,bkd->bqk". "..." stands for
// leading dimensions of both. Without "->" the letters that stand once are the result's, in
// alphabetic order.
//   Throws: ContractError for a formula that is none of two operands, and for shapes that do not
// fit it.
inline Tensor einsum(std::string_view given, const Tensor& a, const Tensor& b,
                     Caller at = Caller::current()) {
  using namespace einsum_terms;
  const CallSite site("einsum", at);
  std::string formula{given};
  std::erase(formula, ' ');
  const std::size_t comma = formula.find(','), arrow = formula.find("->");
  TESSERA_EXPECT(comma != std::string::npos && formula.find(',', comma + 1) == std::string::npos,
                 "einsum: '", given, "' does not name two operands; write it as \"ij,jk->ik\"");
  for (const char c : formula)
    TESSERA_EXPECT(is_letter(c) || has(".,->", c), "einsum: '", given, "' has the sign '", c,
                   "'; expected letters, \"...\", a comma and \"->\"");
  const std::string left = formula.substr(0, comma);
  const std::string right =
      formula.substr(comma + 1, arrow == std::string::npos ? std::string::npos : arrow - comma - 1);
  const std::string la = letters_of(left, a.ndim()), lb = letters_of(right, b.ndim());
  std::string result =
      arrow == std::string::npos ? default_result(la + lb) : formula.substr(arrow + 2);
  if (const std::size_t dots = result.find("..."); dots != std::string::npos)
    result.replace(dots, 3, digits_of(la + lb));
  for (const char c : result)
    TESSERA_EXPECT(
        has(la + lb, c) && stands_once(result, c), "einsum: '", c, "' of the result of '", given,
        "' ",
        has(la + lb, c) ? "is named twice there; name it once" : "is in no operand; leave it out");

  Lettered x = lettered(left, a), y = lettered(right, b);
  x.sum_out(result + y.letters);
  y.sum_out(result + x.letters);
  std::string batch, rows, columns, summed;
  for (const char c : x.letters)
    (!has(y.letters, c) ? rows : has(result, c) ? batch : summed).push_back(c);
  for (const char c : y.letters)
    if (!has(x.letters, c)) columns.push_back(c);
  Shape shape, from_x, from_y;  // of the result, [batch, rows, columns]; of the operands
  std::int64_t m = 1, n = 1, kx = 1;
  const auto common = [&](char c) {
    const std::int64_t i = x.size(c), j = y.size(c);
    TESSERA_EXPECT(i == j || i == 1 || j == 1, "einsum: '", c, "' of '", given, "' has size ", i,
                   " in one operand and ", j, " in the other; expected one size");
    return i == 1 ? j : i;
  };
  std::int64_t stack = 1;
  for (const char c : batch) shape.push_back(common(c)), stack *= shape.back();
  from_x = from_y = shape;
  for (const char c : rows) shape.push_back(x.size(c)), from_x.push_back(x.size(c)), m *= x.size(c);
  for (const char c : summed)
    from_x.push_back(common(c)), from_y.push_back(common(c)), kx *= common(c);
  for (const char c : columns)
    shape.push_back(y.size(c)), from_y.push_back(y.size(c)), n *= y.size(c);

  const Tensor xs = reshape(expand(x.as(batch + rows + summed), from_x), {stack, m, kx});
  const Tensor ys = reshape(expand(y.as(batch + summed + columns), from_y), {stack, kx, n});
  const Tensor product =
      is_floating(a.dtype()) ? matmul(xs, ys) : sum(unsqueeze(xs, 3) * unsqueeze(ys, 1), 2);
  return Lettered{reshape(product, shape), batch + rows + columns}.as(result);
}

}  // namespace tessera
