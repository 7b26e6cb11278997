// Recomputation of activations: memory for time. Models wrap their blocks in it.
//
//   forward    y = f(x), nothing inside f is kept ─────── y
//   backward   y' = f(x) again, with history ── backward of y' ── gradient of x
//
// With Keep, some results inside f are kept: those that cost most for their bytes.
#pragma once

#include <concepts>
#include <functional>
#include <span>
#include <type_traits>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera {

// What a recomputed function keeps besides its inputs. The second run takes these results instead
// of computing them. It makes everything else again: norms, activations, casts, elementwise
// operations, and products with slices of a streamed parameter. A result that backward does not
// need is not kept. PyTorch: create_selective_checkpoint_contexts with a list of operations.
struct Keep {
  // n: keeps the first of every n products (matmul, linear, linear_gelu, einsum). 0: none.
  int products = 0;
  bool attention = false;  // keeps its output and one number a row, not the scores
  bool operator==(const Keep&) const = default;
};

// Computes f(x) and keeps x only. Backward runs f once more, with the same random draws, as far as
// it needs it. Then it runs f's backward. Without gradients enabled this is f(x).
//   The gradients are bit by bit those of f(x), with two exceptions. With `keep`, on a GPU, those
// of linear_gelu are those of gelu(linear()). And if x has users beside f, a linear in f would have
// added its gradient to theirs before rounding.
//   f gives the same result each time. It may use tensors with history: x, leaves (parameters), and
// what it has captured, as a condition or the states of an encoder. This call finds captured ones,
// and they get their gradients as inputs do. The graph keeps f. What f has captured by reference
// must live until backward. If recomputed functions are nested, each decides what is kept inside of
// it.
//   Throws: what f throws, here or in backward; ContractError in backward when an input or a
// captured tensor was written since, and when f has other products or attentions than in forward
// and `keep` keeps them.
Tensor recompute(std::function<Tensor(const Tensor&)> f, const Tensor& x, Keep keep = {});
// The same for a function that can't be copied, such as a module. It is taken by reference, and
// must live until backward.
template <class F>
  requires(!std::copy_constructible<F> && std::is_invocable_r_v<Tensor, F&, const Tensor&>)
Tensor recompute(F& f, const Tensor& x, Keep keep = {}, Caller at = Caller::current()) {
  const CallSite site(at);
  return recompute([&f](const Tensor& in) -> Tensor { return f(in); }, x, keep);
}
// The same with several inputs, each of which gets its gradient.
Tensor recompute(std::function<Tensor(std::span<const Tensor>)> f, std::vector<Tensor> inputs,
                 Keep keep = {});
// The same with several results, of any dtypes: those that are not floating have no history.
// Backward runs f once more when the gradients of all results have come that it reaches; a result
// that nobody has used has no part in it. Throws: ContractError for no result, and in backward for
// another number of results than in forward.
std::vector<Tensor> recompute(std::function<std::vector<Tensor>(std::span<const Tensor>)> f,
                              std::vector<Tensor> inputs, Keep keep = {});

}  // namespace tessera
