// Sums, maxima and copies of peers' memory. The pointers travel with the launch; every element is
// folded over the peers in their order by one thread, so bits do not depend on the rank.
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"
#include "tessera/device/driver.hpp"

namespace tessera::kernels::cuda {

namespace {

// Of a launch, whose arguments may take 4 KiB.
constexpr int kMostPeers = 448;

template <class T>
struct FoldOf {
  using type = std::conditional_t<std::is_class_v<T>, float, T>;
};
template <class T>
using Fold = typename FoldOf<T>::type;

template <class T>
TESSERA_DEVICE Fold<T> widened(const T& x) {
  if constexpr (std::is_class_v<T>)
    return to_float(x);
  else
    return x;
}

template <class T>
TESSERA_DEVICE Fold<T> fold(PeersOp op, Fold<T> sum, Fold<T> x) {
  if (op == PeersOp::max) return x > sum || !(x == x) ? x : sum;
  if constexpr (std::is_same_v<T, bool>)
    return sum || x;
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(sum) +
                          static_cast<std::make_unsigned_t<T>>(x));
  else
    return sum + x;
}

template <class T, int N, int kPeers>
struct FoldPeers {
  T* out;
  std::int64_t count;
  std::int32_t n_inputs;
  PeersOp op;
  const T* inputs[kPeers];

  struct Item {
    Fold<T> sum[N];
  };
  TESSERA_DEVICE int elements(std::int64_t pack) const {
    return count - pack * N < N ? static_cast<int>(count - pack * N) : N;
  }
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    const int n = elements(pack);
    Item item{};
    for (int p = 0; p < n_inputs; ++p) {
      const Pack<T, N> x = load_most<N>(inputs[p] + pack * N, n);
      for (int j = 0; j < N; ++j)
        item.sum[j] = p == 0 ? widened(x.at[j]) : fold<T>(op, item.sum[j], widened(x.at[j]));
    }
    return item;
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    Pack<T, N> y;
    for (int j = 0; j < N; ++j) {
      if constexpr (std::is_class_v<T>)
        y.at[j] = rounded<T>(item.sum[j]);
      else
        y.at[j] = item.sum[j];
    }
    store_most(out + pack * N, y, elements(pack));
  }
};

template <class T, int N, int kPeers>
void queue(const PeersArgs& a, Exec& exec) {
  FoldPeers<T, N, kPeers> body{static_cast<T*>(a.out), a.count, a.n_inputs, a.op, {}};
  for (int p = 0; p < a.n_inputs; ++p) body.inputs[p] = static_cast<const T*>(a.inputs[p]);
  launch_packs<1>(exec, blocks_for(a.count, N), body);
}

}  // namespace

void reduce_peers(const PeersArgs& a, Exec& exec) {
  if (a.n_inputs > kMostPeers) {
    exec.error = "reduce_peers: more than 448 peers on one device; use fewer ranks a device";
    return;
  }
  bool aligned = are_aligned(a.out);
  for (int p = 0; p < a.n_inputs; ++p) aligned = aligned && are_aligned(a.inputs[p]);
  visit(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!aligned) return queue<T, 1, kMostPeers>(a, exec);
    a.n_inputs <= 16 ? queue<T, kPack<T>, 16>(a, exec) : queue<T, kPack<T>, kMostPeers>(a, exec);
  });
}

void copy(const CopyArgs& a, Exec& exec) {
  if (a.out == a.in || a.bytes == 0) return;
  const DriverError error = exec.driver->copy(a.out, a.in, a.bytes, exec.native_stream);
  if (error) exec.error = error;
}

}  // namespace tessera::kernels::cuda
