// Copies of any dtype to any other, fill, arange and where.
//
// Equal dtypes move as raw words; casts between floating dtypes of 8, 16 and 32 bits have kernels
// of their own; every other pair shares one that works element by element.
#include <cmath>
#include <cstring>

#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

namespace {

// Calls f(TypeTag<word>) for the word of `size` bytes.
template <class F>
void visit_word(std::size_t size, F f) {
  if (size == 1) return f(TypeTag<std::uint8_t>{});
  if (size == 2) return f(TypeTag<std::uint16_t>{});
  if (size == 4) return f(TypeTag<std::uint32_t>{});
  f(TypeTag<std::uint64_t>{});
}

template <class To, class From>
TESSERA_DEVICE To converted(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else
    return rounded<To>(load_as_compute(x));
}

// out = in, or `value` everywhere when `in` is null.
template <class To, class From, int N>
struct Copy {
  Views<2> views;
  To* out;
  const From* in;
  From value;

  struct Item {
    Held<From, N> x;
    std::int64_t to;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t at[2];
    views.template locate<N>(pack, at);
    if (in != nullptr)
      return {load_view<N>(in + at[1], views.repeats[1], views.template elements<N>(pack)), at[0]};
    Pack<From, N> values;
    for (From& x : values.at) x = value;
    return {values, at[0]};
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    const Pack<From, N> x = item.x;
    Pack<To, N> y;
    for (int j = 0; j < N; ++j) y.at[j] = converted<To>(x.at[j]);
    store_most(out + item.to, y, views.template elements<N>(pack));
  }
};

constexpr int kCopyUnroll = 4;

template <class To, class From>
void queue_copy(const UnaryArgs& a, From value, Exec& exec) {
  constexpr int n = 16 / static_cast<int>(std::max(sizeof(To), sizeof(From)));
  const View views[] = {{a.out, a.out_strides, sizeof(To)}, {a.in, a.in_strides, sizeof(From)}};
  To* out = static_cast<To*>(a.out);
  const From* in = static_cast<const From*>(a.in);
  if (can_pack(n, a.ndim, a.shape, views))
    launch_packs<kCopyUnroll>(
        exec, blocks_for(a.count, n),
        Copy<To, From, n>{make_views(n, a.count, a.ndim, a.shape, views), out, in, value});
  else
    launch_packs<kCopyUnroll>(
        exec, a.count,
        Copy<To, From, 1>{make_views(1, a.count, a.ndim, a.shape, views), out, in, value});
}

// Every pair of dtypes, and what gives boolean from any dtype.
struct CastAny {
  Views<2> views;
  void* out;
  const void* in;
  UnaryOp op;
  DType out_dtype, in_dtype;

  struct Item {
    Number x;
    std::int64_t to;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t at[2];
    views.template locate<1>(pack, at);
    return {load_number(in_dtype, in, at[1]), at[0]};
  }
  TESSERA_DEVICE void finish(std::int64_t, const Item& item) const {
    if (op == UnaryOp::copy) return store_number(out_dtype, out, item.to, item.x);
    static_cast<bool*>(out)[item.to] =
        op == UnaryOp::logical_not ? !item.x.as<bool>()
                                   : std::abs(item.x.real) <= std::numeric_limits<double>::max();
  }
};

// With a kernel of its own.
bool is_common(DType dtype) { return is_floating(dtype) && dtype != DType::f64; }

template <class F>
void visit_common(DType dtype, F f) {
  if (dtype == DType::f32) return f(TypeTag<float>{});
  if (dtype == DType::bf16) return f(TypeTag<BFloat16>{});
  if (dtype == DType::f16) return f(TypeTag<Float16>{});
  if (dtype == DType::e4m3) return f(TypeTag<Float8E4M3>{});
  f(TypeTag<Float8E5M2>{});
}

struct Arange {
  void* out;
  double start, step;
  std::int64_t count;
  DType dtype;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t i = t.global_index();
    if (i >= count) return;
    store_number(dtype, out, i, {start + rounded_product(static_cast<double>(i), step)});
  }
};

template <class Word, int N>
struct Where {
  Views<4> views;  // out, condition, a, b
  Word* out;
  const bool* condition;
  const Word *a, *b;

  struct Item {
    Held<bool, N> c;
    Held<Word, N> x, y;
    std::int64_t to;
  };
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    std::int64_t at[4];
    views.template locate<N>(pack, at);
    return {load_view<N>(condition + at[1], views.repeats[1], N),
            load_view<N>(a + at[2], views.repeats[2], N),
            load_view<N>(b + at[3], views.repeats[3], N), at[0]};
  }
  TESSERA_DEVICE void finish(std::int64_t, const Item& item) const {
    const Pack<bool, N> c = item.c;
    const Pack<Word, N> x = item.x, y = item.y;
    Pack<Word, N> chosen;
    for (int j = 0; j < N; ++j) chosen.at[j] = c.at[j] ? x.at[j] : y.at[j];
    store_most(out + item.to, chosen, N);
  }
};

}  // namespace

// Copies, casts and what gives boolean; the other unary operations are in elementwise_unary.cu.
void unary_copy(const UnaryArgs& a, Exec& exec) {
  if (a.op == UnaryOp::copy && a.out_dtype == a.in_dtype)
    return visit_word(size_bytes(a.in_dtype), [&](auto word) {
      using Word = typename decltype(word)::type;
      queue_copy<Word, Word>(a, Word{}, exec);
    });
  if (a.op == UnaryOp::copy && is_common(a.out_dtype) && is_common(a.in_dtype))
    return visit_common(a.out_dtype, [&](auto to) {
      visit_common(a.in_dtype, [&](auto from) {
        using To = typename decltype(to)::type;
        using From = typename decltype(from)::type;
        if constexpr (!std::is_same_v<To, From>) queue_copy<To, From>(a, From{}, exec);
      });
    });
  const View views[] = {{a.out, a.out_strides, 1}, {a.in, a.in_strides, 1}};
  launch_packs<kCopyUnroll>(exec, a.count,
                            CastAny{make_views(1, a.count, a.ndim, a.shape, views), a.out, a.in,
                                    a.op, a.out_dtype, a.in_dtype});
}

void fill(const FillArgs& a, Exec& exec) {
  UnaryArgs copy{};
  copy.out = a.out;
  copy.count = a.count;
  copy.ndim = a.ndim;
  std::copy_n(a.shape, kUnaryDims, copy.shape);
  std::copy_n(a.out_strides, kUnaryDims, copy.out_strides);
  visit(a.dtype, [&](auto tag) {
    const auto value = cast<typename decltype(tag)::type>(a.value);
    visit_word(sizeof value, [&](auto word) {
      typename decltype(word)::type bits{};
      if constexpr (sizeof bits == sizeof value) {
        std::memcpy(&bits, &value, sizeof bits);
        queue_copy<decltype(bits), decltype(bits)>(copy, bits, exec);
      }
    });
  });
}

void arange(const ArangeArgs& a, Exec& exec) {
  launch<kElementThreads>(exec, Grid{blocks_for(a.count, kElementThreads)}, 0,
                          Arange{a.out, a.start, a.step, a.count, a.dtype});
}

void where(const WhereArgs& a, Exec& exec) {
  std::int64_t count = 1;
  std::int32_t out_strides[kWhereDims] = {};
  for (int d = a.ndim - 1; d >= 0; --d) {
    out_strides[d] = static_cast<std::int32_t>(count);
    count *= a.shape[d];
  }
  visit_word(size_bytes(a.dtype), [&](auto word) {
    using Word = typename decltype(word)::type;
    const auto queue = [&](auto pack) {
      constexpr int n = decltype(pack)::value;
      const View views[] = {{a.out, out_strides, sizeof(Word)},
                            {a.condition, a.condition_strides, 1},
                            {a.a, a.a_strides, sizeof(Word)},
                            {a.b, a.b_strides, sizeof(Word)}};
      if (n > 1 && (count % n != 0 || !can_pack(n, a.ndim, a.shape, views))) return false;
      launch_packs<2>(
          exec, count / n,
          Where<Word, n>{make_views(n, count, a.ndim, a.shape, views), static_cast<Word*>(a.out),
                         static_cast<const bool*>(a.condition), static_cast<const Word*>(a.a),
                         static_cast<const Word*>(a.b)});
      return true;
    };
    if (!queue(std::integral_constant<int, kPack<Word>>{})) queue(std::integral_constant<int, 1>{});
  });
}

}  // namespace tessera::kernels::cuda
