// Recomputation of activations: memory for time. Models wrap their blocks in it.
//
//   forward    y = f(x), nothing inside f is kept ─────── y
//   backward   y' = f(x) again, with history ── backward of y' ── gradient of x
//
// Or some results inside f are kept, those that cost most for their bytes, see Keep.
#pragma once

#include <concepts>
#include <functional>
#include <span>
#include <type_traits>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera {

// What a recomputed function keeps besides its inputs: the second run takes these results instead
// of computing them, and makes everything else again: norms, activations, casts, what is done to
// elements, products with slices of a streamed parameter. A result at the end that backward has no
// use for is not kept. PyTorch: create_selective_checkpoint_contexts with a list of operations.
struct Keep {
  int products = 0;  // of matmul, linear, linear_gelu, einsum: 1 each, 2 the first, third, ...
  bool attention = false;  // its output and one number a row, not the scores
  bool operator==(const Keep&) const = default;
};

// f(x), keeping x only; backward runs f once more, with the same random draws and as far as that
// saves something, and then its backward. The gradients are the ones that f(x) itself would have
// had, bit by bit (with `keep`, on a GPU those of gelu(linear()) where f calls linear_gelu; where x
// has users beside f, a linear in f would have added its gradient to theirs before it is rounded).
// The graph keeps f; what f has captured by reference must live until backward. Where recomputed
// functions are nested, what happens inside one is kept as that one says.
//
// Of tensors with history f may use x and leaves (parameters), and it must give the same result
// each time. Without gradients enabled this is f(x). Throws: what f throws, here or in backward;
// ContractError in backward when f uses the result of another operation that this backward runs,
// and does not get it as an input, and when it has other products or attentions than in forward and
// `keep` keeps them.
Tensor recompute(std::function<Tensor(const Tensor&)> f, const Tensor& x, Keep keep = {});
// The same of what can't be copied, a module: it is taken by reference, and lives until backward.
template <class F>
  requires(!std::copy_constructible<F> && std::is_invocable_r_v<Tensor, F&, const Tensor&>)
Tensor recompute(F& f, const Tensor& x, Keep keep = {}, Caller at = Caller::current()) {
  const CallSite site(at);
  return recompute([&f](const Tensor& in) -> Tensor { return f(in); }, x, keep);
}
// The same of several inputs, each of which gets its gradient: what blocks share goes here, such as
// a condition or the states of an encoder.
Tensor recompute(std::function<Tensor(std::span<const Tensor>)> f, std::vector<Tensor> inputs,
                 Keep keep = {});

}  // namespace tessera
