// Sums, maxima and copies of peers' memory. The pointers travel with the launch; every element is
// folded over the peers in their order by one thread, so bits do not depend on the rank.
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera::kernels::cuda {

namespace {

// Of a launch, whose arguments may take 4 KiB.
constexpr int kMostPeers = 448;
static_assert(kMostCopies * sizeof(CopyArgs) <= 4096);

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

// Block (x, y): bytes kCopyBytes x and on of copy y.
struct Copies {
  static constexpr std::int64_t kCopyBytes = 32 * 1024;
  CopyArgs copies[kMostCopies];

  TESSERA_DEVICE void operator()(Thread& t) const {
    const CopyArgs& c = copies[t.block_y()];
    const std::int64_t first = t.block() * kCopyBytes, left = c.bytes - first;
    if (left <= 0 || c.out == c.in) return;
    auto* const out = static_cast<std::byte*>(c.out) + first;
    const auto* const in = static_cast<const std::byte*>(c.in) + first;
    const std::int64_t bytes = left < kCopyBytes ? left : kCopyBytes;
    const auto odd = reinterpret_cast<std::uintptr_t>(out) | reinterpret_cast<std::uintptr_t>(in);
    if (odd % 16 == 0) return move<Pack<std::uint64_t, 2>>(t, out, in, bytes);
    if (odd % 4 == 0) return move<std::uint32_t>(t, out, in, bytes);
    if (odd % 2 == 0) return move<std::uint16_t>(t, out, in, bytes);
    move<std::byte>(t, out, in, bytes);
  }

 private:
  // In accesses of one U, and the last bytes one by one.
  template <class U>
  TESSERA_DEVICE static void move(Thread& t, std::byte* out, const std::byte* in,
                                  std::int64_t bytes) {
    constexpr int kAtOnce = 4;  // loads in flight
    const int step = t.threads(), units = static_cast<int>(bytes / std::int64_t{sizeof(U)});
    for (int base = t.index(); base < units; base += kAtOnce * step) {
      U values[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k)
        if (base + k * step < units) values[k] = reinterpret_cast<const U*>(in)[base + k * step];
      for (int k = 0; k < kAtOnce; ++k)
        if (base + k * step < units) reinterpret_cast<U*>(out)[base + k * step] = values[k];
    }
    const std::int64_t i = units * std::int64_t{sizeof(U)} + t.index();
    if (i < bytes) out[i] = in[i];
  }
};

}  // namespace

void reduce_peers(const PeersArgs& a, Exec& exec) {
  if (a.n_inputs > kMostPeers) {
    exec.error = "reduce_peers: more than 448 peers on one device; use fewer ranks a device";
    return;
  }
  bool aligned = are_aligned(a.out);
  for (int p = 0; p < a.n_inputs; ++p) aligned = aligned && are_aligned(a.inputs[p]);
  visit_computed(a.dtype, [&](auto tag) {
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

void copies(const CopiesArgs& a, Exec& exec) {
  Copies body{};
  std::int64_t most = 0;
  for (std::int32_t i = 0; i < a.count; ++i) {
    body.copies[i] = a.copies[i];
    most = std::max(most, a.copies[i].bytes);
  }
  launch<kElementThreads>(exec, Grid{blocks_for(most, Copies::kCopyBytes), a.count}, 0, body);
}

}  // namespace tessera::kernels::cuda
