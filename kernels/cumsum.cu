// Running sums: a block a column, which goes through it by as many elements as it has threads.
#include "kernels/cumsum.hpp"

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/vector.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Cumsum {
  static constexpr bool kWhole = std::is_integral_v<T>;
  using Sum = std::conditional_t<kWhole, std::uint64_t, double>;
  using Out = std::conditional_t<kWhole, std::int64_t, T>;
  Out* out;
  const T* in;
  std::int64_t n, inner;
  bool reversed;

  TESSERA_DEVICE static Sum term(const T& x) {
    if constexpr (kWhole)
      return static_cast<Sum>(x);
    else
      return load_as_compute(x);
  }
  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t from = t.block() / inner * n * inner + t.block() % inner;
    Sum* sums = t.shared<Sum>();
    Sum before = 0;  // of the turns so far
    for (std::int64_t base = 0; base < n; base += kThreads) {
      const std::int64_t k = base + t.index();
      const std::int64_t at = from + (reversed ? n - 1 - k : k) * inner;
      Sum sum = k < n ? term(in[at]) : Sum(0);
      for (int step = 1; step < kThreads; step *= 2) {
        sums[t.index()] = sum;
        t.sync();
        if (t.index() >= step) sum += sums[t.index() - step];
        t.sync();
      }
      sums[t.index()] = sum;
      t.sync();
      if (k < n) {
        if constexpr (kWhole)
          out[at] = static_cast<Out>(before + sum);
        else
          out[at] = rounded<T>(static_cast<Compute<T>>(before + sum));
      }
      before += sums[kThreads - 1];
      t.sync();
    }
  }
};

}  // namespace

void cumsum(const CumsumArgs& a, Exec& exec) {
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Body = Cumsum<T>;
    launch<kThreads>(exec, {a.outer * a.inner}, kThreads * sizeof(typename Body::Sum),
                     Body{static_cast<typename Body::Out*>(a.out), static_cast<const T*>(a.in), a.n,
                          a.inner, a.reversed});
  });
}

}  // namespace tessera::kernels::cuda
