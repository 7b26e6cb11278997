// y = alpha x + beta y: how gradients are accumulated. The pairs of dtypes that training uses have
// kernels of their own; the others, and misaligned views, share one that works element by element.
#include <cmath>

#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

namespace {

template <class C>
TESSERA_DEVICE C combined(C alpha, C x, C beta, C y) {
  return beta == 0 ? rounded_product(alpha, x) : std::fma(alpha, x, rounded_product(beta, y));
}

template <class Y, class X, int N>
struct Axpby {
  Views<2> views;
  Y* y;
  const X* x;
  float alpha, beta;

  struct Item {
    Held<X, N> x;
    Held<Y, N> y;
    std::int64_t to;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t at[2];
    views.template locate<N>(pack, at);
    const int n = views.template elements<N>(pack);
    Item item{load_view<N>(x + at[1], views.repeats[1], n), {}, at[0]};
    if (beta != 0) item.y = load_view<N>(y + at[0], false, n);
    return item;
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    const Pack<X, N> of_x = item.x;
    const Pack<Y, N> of_y = item.y;
    Pack<Y, N> sum;
    for (int j = 0; j < N; ++j)
      sum.at[j] = rounded<Y>(
          combined(alpha, load_as_compute(of_x.at[j]), beta, load_as_compute(of_y.at[j])));
    store_most(y + item.to, sum, views.template elements<N>(pack));
  }
};

struct AxpbyAny {
  Views<2> views;
  void* y;
  const void* x;
  double alpha, beta;
  DType y_dtype, x_dtype;

  struct Item {
    double x, y;
    std::int64_t to;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t at[2];
    views.template locate<1>(pack, at);
    return {load_number(x_dtype, x, at[1]).real,
            beta == 0 ? 0 : load_number(y_dtype, y, at[0]).real, at[0]};
  }
  TESSERA_DEVICE void finish(std::int64_t, const Item& item) const {
    const bool wide = x_dtype == DType::f64 || y_dtype == DType::f64;
    const double sum =
        wide ? combined(alpha, item.x, beta, item.y)
             : static_cast<double>(combined(static_cast<float>(alpha), static_cast<float>(item.x),
                                            static_cast<float>(beta), static_cast<float>(item.y)));
    store_number(y_dtype, y, item.to, {sum});
  }
};

// Whether this pair and these views have a kernel of their own.
template <class Y, class X>
bool queue_as(const AxpbyArgs& a, Exec& exec) {
  constexpr int n = 16 / static_cast<int>(std::max(sizeof(Y), sizeof(X)));
  if (a.y_dtype != dtype_of<Y>() || a.x_dtype != dtype_of<X>()) return false;
  const View views[] = {{a.y, a.y_strides, sizeof(Y)}, {a.x, a.x_strides, sizeof(X)}};
  if (!can_pack(n, a.ndim, a.shape, views)) return false;
  launch_packs<2>(exec, blocks_for(a.count, n),
                  Axpby<Y, X, n>{make_views(n, a.count, a.ndim, a.shape, views),
                                 static_cast<Y*>(a.y), static_cast<const X*>(a.x),
                                 static_cast<float>(a.alpha), static_cast<float>(a.beta)});
  return true;
}

}  // namespace

void axpby(const AxpbyArgs& a, Exec& exec) {
  if (queue_as<float, float>(a, exec) || queue_as<float, BFloat16>(a, exec) ||
      queue_as<float, Float16>(a, exec) || queue_as<BFloat16, BFloat16>(a, exec) ||
      queue_as<Float16, Float16>(a, exec) || queue_as<BFloat16, float>(a, exec) ||
      queue_as<Float16, float>(a, exec))
    return;
  const View views[] = {{a.y, a.y_strides, 1}, {a.x, a.x_strides, 1}};
  launch_packs<4>(exec, a.count,
                  AxpbyAny{make_views(1, a.count, a.ndim, a.shape, views), a.y, a.x, a.alpha,
                           a.beta, a.y_dtype, a.x_dtype});
}

}  // namespace tessera::kernels::cuda
