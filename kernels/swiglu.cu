// SwiGLU and its derivative: one pass over gate and up, a thread several packs of columns.
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/math.hpp"

namespace tessera::kernels::cuda {

namespace {

// Rows of whole packs.
struct Rows {
  std::int64_t packs;  // of a row
  bool is_small;       // all packs of all rows have 32-bit numbers

  // Row and first column of a pack.
  template <int N>
  TESSERA_DEVICE void locate(std::int64_t pack, std::int64_t& row, std::int64_t& column) const {
    row = is_small ? static_cast<std::uint32_t>(pack) / static_cast<std::uint32_t>(packs)
                   : pack / packs;
    column = (pack - row * packs) * N;
  }
};

template <int N>
Rows make_rows(std::int64_t rows, std::int64_t cols) {
  return {cols / N, rows * (cols / N) <= std::numeric_limits<std::uint32_t>::max()};
}

// In an access that the compiler cannot take apart: of a plain one it stores each 4 bytes as soon
// as they are there, at a stride of 16.
template <class T, int N>
TESSERA_DEVICE void store_pack(T* to, const Pack<T, N>& pack) {
  if constexpr (sizeof(pack) == 16)
    store_whole(to, &pack);
  else
    store_few(to, pack, N);
}

template <class T, int N>
struct Swiglu {
  Rows rows;
  T* out;
  const T *gate, *up;
  std::int64_t out_stride, gate_stride, up_stride;

  struct Item {
    Held<T, N> gate, up;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t r, c;
    rows.template locate<N>(pack, r, c);
    return {load_most<N>(gate + r * gate_stride + c, N), load_most<N>(up + r * up_stride + c, N)};
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    std::int64_t r, c;
    rows.template locate<N>(pack, r, c);
    const Pack<T, N> of_gate = item.gate, of_up = item.up;
    Pack<T, N> y;
    for (int j = 0; j < N; ++j)
      y.at[j] =
          rounded<T>(silu(Value(load_as_compute(of_gate.at[j]))).v * load_as_compute(of_up.at[j]));
    store_pack(out + r * out_stride + c, y);
  }
};

template <class T, int N>
struct SwigluBackward {
  Rows rows;
  SwigluBackwardArgs a;

  struct Item {
    Held<T, N> gate, up, d_out;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t r, c;
    rows.template locate<N>(pack, r, c);
    return {load_most<N>(static_cast<const T*>(a.gate) + r * a.gate_stride + c, N),
            load_most<N>(static_cast<const T*>(a.up) + r * a.up_stride + c, N),
            load_most<N>(static_cast<const T*>(a.d_out) + r * a.d_out_stride + c, N)};
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    using C = Compute<T>;
    std::int64_t r, c;
    rows.template locate<N>(pack, r, c);
    const Pack<T, N> gate = item.gate, up = item.up, d_out = item.d_out;
    Pack<T, N> d_gate, d_up;
    for (int j = 0; j < N; ++j) {
      const C x = load_as_compute(gate.at[j]), u = load_as_compute(up.at[j]),
              d = load_as_compute(d_out.at[j]);
      const C s = sigmoid(x), value = x * s;
      d_gate.at[j] = rounded<T>(d * u * std::fma(value, 1 - s, s));
      d_up.at[j] = rounded<T>(d * value);
    }
    store_pack(static_cast<T*>(a.d_gate) + r * a.d_gate_stride + c, d_gate);
    store_pack(static_cast<T*>(a.d_up) + r * a.d_up_stride + c, d_up);
  }
};

// Whether rows of `cols` elements can be cut into packs of n at every one of these strides.
template <class... Strides>
bool fits(std::int64_t n, std::int64_t cols, Strides... strides) {
  return cols % n == 0 && ((strides % n == 0) && ...);
}

// f(tag, pack size) with packs of 16 bytes; where f refuses, and for f64, element by element.
template <class F>
void visit_packs(DType dtype, F f) {
  visit_computed(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, double>) {
      f(tag, std::integral_constant<int, 1>{});
    } else if constexpr (!std::is_integral_v<T>) {
      if (!f(tag, std::integral_constant<int, kPack<T>>{}))
        f(tag, std::integral_constant<int, 1>{});
    }
  });
}

}  // namespace

void swiglu(const SwigluArgs& args, Exec& exec) {
  SwigluArgs a = args;
  if (a.out_stride == a.cols && a.gate_stride == a.cols && a.up_stride == a.cols) {
    a.cols *= a.rows;
    a.rows = 1;
    a.out_stride = a.gate_stride = a.up_stride = a.cols;
  }
  if (a.rows * a.cols == 0) return;
  visit_packs(a.dtype, [&](auto tag, auto size) {
    using T = typename decltype(tag)::type;
    constexpr int n = decltype(size)::value;
    if (n > 1 && !(are_aligned(a.out, a.gate, a.up) &&
                   fits(n, a.cols, a.out_stride, a.gate_stride, a.up_stride)))
      return false;
    launch_packs<2>(exec, a.rows * (a.cols / n),
                    Swiglu<T, n>{make_rows<n>(a.rows, a.cols), static_cast<T*>(a.out),
                                 static_cast<const T*>(a.gate), static_cast<const T*>(a.up),
                                 a.out_stride, a.gate_stride, a.up_stride});
    return true;
  });
}

void swiglu_backward(const SwigluBackwardArgs& a, Exec& exec) {
  if (a.rows * a.cols == 0) return;
  visit_packs(a.dtype, [&](auto tag, auto size) {
    using T = typename decltype(tag)::type;
    constexpr int n = decltype(size)::value;
    if (n > 1 && !(are_aligned(a.d_gate, a.d_up, a.gate, a.up, a.d_out) &&
                   fits(n, a.cols, a.d_gate_stride, a.d_up_stride, a.gate_stride, a.up_stride,
                        a.d_out_stride)))
      return false;
    launch_packs<1>(exec, a.rows * (a.cols / n),
                    SwigluBackward<T, n>{make_rows<n>(a.rows, a.cols), a});
    return true;
  });
}

}  // namespace tessera::kernels::cuda
