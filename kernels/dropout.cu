// Dropout: a thread draws the words of its pack and keeps or drops its elements. The bits are the
// CPU's: one product and one rounding an element.
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels::cuda {

namespace {

// N: 4 elements of one draw, or 8 of two.
template <class T, int N, bool kAligned>
struct DropoutBody {
  T* y;
  const T* x;
  const std::uint64_t* device_key;
  std::uint64_t key;
  std::int64_t offset, count;
  float p;
  Compute<T> factor;

  struct Item {
    Held<T, N> x;
  };
  TESSERA_DEVICE int elements(std::int64_t pack) const {
    return count - pack * N < N ? static_cast<int>(count - pack * N) : N;
  }
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    const T* from = x + pack * N;
    return {kAligned ? load_most<N>(from, elements(pack)) : load_few<N>(from, elements(pack))};
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    const std::uint64_t drawn = device_key == nullptr ? key : *device_key;
    const Pack<T, N> given = item.x;
    Pack<T, N> kept{};
    for (int draw = 0; draw < N / 4; ++draw) {
      const auto words = philox(drawn, static_cast<std::uint64_t>(pack * (N / 4) + draw + offset));
      for (int j = 0; j < 4; ++j)
        if (unit_float(words[static_cast<std::size_t>(j)]) >= p)
          kept.at[4 * draw + j] = rounded<T>(load_as_compute(given.at[4 * draw + j]) * factor);
    }
    kAligned ? store_most(y + pack * N, kept, elements(pack))
             : store_few(y + pack * N, kept, elements(pack));
  }
};

template <class T, int N, bool kAligned>
void queue(const DropoutArgs& a, Exec& exec) {
  using C = Compute<T>;
  const C factor = a.p < 1 ? C(1) / (C(1) - static_cast<C>(a.p)) : C(0);
  launch_packs<2>(exec, blocks_for(a.count, N),
                  DropoutBody<T, N, kAligned>{static_cast<T*>(a.y), static_cast<const T*>(a.x),
                                              a.device_key, a.key, a.offset, a.count, a.p, factor});
}

}  // namespace

void dropout(const DropoutArgs& a, Exec& exec) {
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, double>)
      queue<T, 4, false>(a, exec);
    else if constexpr (!std::is_integral_v<T>)
      are_aligned(a.y, a.x) ? queue<T, kPack<T>, true>(a, exec) : queue<T, 4, false>(a, exec);
  });
}

}  // namespace tessera::kernels::cuda
