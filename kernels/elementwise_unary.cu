// Unary operations on floats, and on integers where the contract has them; copies, casts and what
// gives boolean are in elementwise_copy.cu. One kernel a dtype: which operation is asked once for
// each pack, which costs less than the pack's bytes.
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/math.hpp"

namespace tessera::kernels::cuda {

namespace {

// Operations of many instructions, which go element by element: laid out for each of a pack they
// would take the registers of the others.
constexpr bool is_long(UnaryOp op) { return op >= UnaryOp::sin && op <= UnaryOp::gelu_exact; }

template <class C, int N>
TESSERA_DEVICE void apply(UnaryOp op, C (&x)[N]) {
  visit_formula(op, [&](auto formula) {
    using F = decltype(formula);
    if constexpr (has_floats<F, Value<C>>() && (N == 1 || !is_long(F::op)))
      for (C& value : x) value = F::floats(Value<C>(value)).v;
  });
}

template <class T, int N>
struct Unary {
  Views<2> views;
  T* out;
  const T* in;
  UnaryOp op;

  struct Item {
    Held<T, N> x;
    std::int64_t to;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t at[2];
    views.template locate<N>(pack, at);
    return {load_view<N>(in + at[1], views.repeats[1], views.template elements<N>(pack)), at[0]};
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    const Pack<T, N> in_x = item.x;
    Pack<T, N> y{};
    if constexpr (std::is_integral_v<T>) {
      visit_formula(op, [&](auto formula) {
        using F = decltype(formula);
        if constexpr (has_integers<F, T>())
          for (int j = 0; j < N; ++j) y.at[j] = static_cast<T>(F::integers(in_x.at[j]));
      });
    } else {
      Compute<T> x[N];
      for (int j = 0; j < N; ++j) x[j] = load_as_compute(in_x.at[j]);
      apply(op, x);
      for (int j = 0; j < N; ++j) y.at[j] = rounded<T>(x[j]);
    }
    store_most(out + item.to, y, views.template elements<N>(pack));
  }
};

template <class T, int N>
bool queue(const UnaryArgs& a, Exec& exec) {
  const View views[] = {{a.out, a.out_strides, sizeof(T)}, {a.in, a.in_strides, sizeof(T)}};
  if (N > 1 && !can_pack(N, a.ndim, a.shape, views)) return false;
  launch_packs<4>(exec, blocks_for(a.count, N),
                  Unary<T, N>{make_views(N, a.count, a.ndim, a.shape, views),
                              static_cast<T*>(a.out), static_cast<const T*>(a.in), a.op});
  return true;
}

}  // namespace

void unary(const UnaryArgs& a, Exec& exec) {
  if (a.op == UnaryOp::copy || a.op == UnaryOp::logical_not || a.op == UnaryOp::isfinite)
    return unary_copy(a, exec);
  visit_computed(a.in_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 8) {
      queue<T, 1>(a, exec);
    } else if constexpr (!std::is_same_v<T, bool>) {
      if (is_long(a.op) || !queue<T, kPack<T>>(a, exec)) queue<T, 1>(a, exec);
    }
  });
}

}  // namespace tessera::kernels::cuda
