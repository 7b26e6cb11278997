// Binary operations, one operand of which may be a scalar. One kernel a dtype: which operation is
// asked once for each pack, which costs less than the pack's bytes.
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/math.hpp"

namespace tessera::kernels::cuda {

namespace {

// What T is computed in: 32 bits for 16-bit floats and boolean, else itself.
template <class T>
struct ArithmeticOf {
  using type = Compute<T>;
};
template <>
struct ArithmeticOf<std::int32_t> {
  using type = std::int32_t;
};
template <>
struct ArithmeticOf<std::int64_t> {
  using type = std::int64_t;
};
template <>
struct ArithmeticOf<bool> {
  using type = std::int32_t;
};
template <class T>
using Arithmetic = typename ArithmeticOf<T>::type;

// a[j] = op(a[j], b[j]), of the same type.
template <class C, int N>
TESSERA_DEVICE void apply(BinaryOp op, C (&a)[N], const C (&b)[N]) {
  visit_formula(op, [&](auto formula) {
    using F = decltype(formula);
    if constexpr (gives_boolean(F::op)) {
      return;
    } else if constexpr (std::is_floating_point_v<C>) {
      for (int j = 0; j < N; ++j) a[j] = F::floats(Value<C>(a[j]), Value<C>(b[j])).v;
    } else if constexpr (has_integers<F, C>()) {
      for (int j = 0; j < N; ++j) a[j] = static_cast<C>(F::integers(a[j], b[j]));
    }
  });
}

template <class C, int N>
TESSERA_DEVICE void compare(BinaryOp op, const C (&a)[N], const C (&b)[N], bool (&answers)[N]) {
  visit_formula(op, [&](auto formula) {
    using F = decltype(formula);
    if constexpr (gives_boolean(F::op))
      for (int j = 0; j < N; ++j) answers[j] = static_cast<bool>(F::integers(a[j], b[j]));
  });
}

// out = op(a, b); a null operand is the scalar.
template <class T, int N>
struct Binary {
  using C = Arithmetic<T>;

  Views<3> views;  // out, a, b
  void* out;
  const T *a, *b;
  C scalar;
  BinaryOp op;

  struct Item {
    Held<T, N> a, b;
    std::int64_t to;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t at[3];
    views.template locate<N>(pack, at);
    const int n = views.template elements<N>(pack);
    Item item{{}, {}, at[0]};
    if (a != nullptr) item.a = load_view<N>(a + at[1], views.repeats[1], n);
    if (b != nullptr) item.b = load_view<N>(b + at[2], views.repeats[2], n);
    return item;
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    const int n = views.template elements<N>(pack);
    const Pack<T, N> of_a = item.a, of_b = item.b;
    C x[N], y[N];
    for (int j = 0; j < N; ++j) {
      x[j] = a == nullptr ? scalar : widened(of_a.at[j]);
      y[j] = b == nullptr ? scalar : widened(of_b.at[j]);
    }
    if (gives_boolean(op)) {
      Pack<bool, N> answers{};
      compare(op, x, y, answers.at);
      return store_most(static_cast<bool*>(out) + item.to, answers, n);
    }
    Pack<T, N> results;
    apply(op, x, y);
    for (int j = 0; j < N; ++j) {
      if constexpr (std::is_floating_point_v<C>)
        results.at[j] = rounded<T>(x[j]);
      else
        results.at[j] = static_cast<T>(x[j]);
    }
    store_most(static_cast<T*>(out) + item.to, results, n);
  }

 private:
  TESSERA_DEVICE static C widened(const T& x) {
    if constexpr (std::is_integral_v<T>)
      return x;
    else
      return load_as_compute(x);
  }
};

// What binary and scalar have in common; a null `a` or `b` is the scalar.
struct Operation {
  void* out;
  const void *a, *b;
  double scalar;
  std::int64_t count;
  const std::int32_t *shape, *out_strides, *a_strides, *b_strides;
  BinaryOp op;
  DType dtype;
  int ndim;
};

template <class T, int N>
bool queue_as(const Operation& o, Exec& exec) {
  const View views[] = {{o.out, o.out_strides, gives_boolean(o.op) ? 1 : sizeof(T)},
                        {o.a, o.a_strides, sizeof(T)},
                        {o.b, o.b_strides, sizeof(T)}};
  if (N > 1 && !can_pack(N, o.ndim, o.shape, views)) return false;
  using C = Arithmetic<T>;
  const C scalar = std::is_same_v<T, bool> ? C(o.scalar != 0) : cast<C>(o.scalar);
  launch_packs<2>(
      exec, blocks_for(o.count, N),
      Binary<T, N>{make_views(N, o.count, o.ndim, o.shape, views), o.out,
                   static_cast<const T*>(o.a), static_cast<const T*>(o.b), scalar, o.op});
  return true;
}

void queue(const Operation& o, Exec& exec) {
  visit_computed(o.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T> || sizeof(T) == 8) {
      queue_as<T, 1>(o, exec);
    } else {
      if (!queue_as<T, kPack<T>>(o, exec)) queue_as<T, 1>(o, exec);
    }
  });
}

}  // namespace

void binary(const BinaryArgs& a, Exec& exec) {
  queue({a.out, a.a, a.b, 0, a.count, a.shape, a.out_strides, a.a_strides, a.b_strides, a.op,
         a.dtype, a.ndim},
        exec);
}

void scalar(const ScalarArgs& a, Exec& exec) {
  queue({a.out, a.scalar_left ? nullptr : a.in, a.scalar_left ? a.in : nullptr, a.scalar, a.count,
         a.shape, a.out_strides, a.in_strides, a.in_strides, a.op, a.dtype, a.ndim},
        exec);
}

}  // namespace tessera::kernels::cuda
