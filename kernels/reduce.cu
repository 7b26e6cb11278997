// Sums in two passes where a row is long: parts of fixed lengths, then the parts. Maxima and their
// indices in one.
#include "kernels/reduce.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/rows.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kAtOnce = 4;  // loads of a thread under way together

template <class T>
using Accumulator = std::conditional_t<std::is_integral_v<T>, std::int64_t, Compute<T>>;

template <class A, class T>
TESSERA_DEVICE A term(const T& x, bool squared) {
  A value;
  if constexpr (std::is_integral_v<T>)
    value = static_cast<A>(x);
  else
    value = static_cast<A>(load_as_compute(x));
  return squared ? value * value : value;
}

// Where sums go: out[i] = scale value / divisor (below 0: undivided), added to what is there if
// wished.
struct Result {
  void* out;
  std::int64_t divisor;
  DType dtype;
  bool accumulate = false;
  double scale = 1;

  template <class A>
  TESSERA_DEVICE void put(std::int64_t i, A value) const {
    if constexpr (std::is_integral_v<A>) {
      if (dtype == DType::i64) static_cast<std::int64_t*>(out)[i] = value;
      if (dtype == DType::i32)
        static_cast<std::int32_t*>(out)[i] = static_cast<std::int32_t>(value);
      if (dtype == DType::boolean) static_cast<bool*>(out)[i] = value != 0;
    } else {
      if (divisor >= 0) value /= static_cast<A>(divisor);
      value *= static_cast<A>(scale);
      if (dtype == DType::f64) add(static_cast<double*>(out)[i], value);
      if (dtype == DType::f32) add(static_cast<float*>(out)[i], value);
      if (dtype == DType::bf16) add(static_cast<BFloat16*>(out)[i], value);
      if (dtype == DType::f16) add(static_cast<Float16*>(out)[i], value);
    }
  }
  template <class T, class A>
  TESSERA_DEVICE void add(T& to, A value) const {
    if (accumulate) value += static_cast<A>(load_as_compute(to));
    to = rounded<T>(static_cast<Compute<T>>(value));
  }
};

// What a thread of a group has of the sum over x[0, count).
template <class A, class T>
TESSERA_DEVICE A sum_of(const Group& group, const T* x, int count, bool squared) {
  constexpr int N = kPack<T>;
  const int head = elements_before_boundary(x, count), packs = (count - head) / N;
  A total = 0;
  for (int p = group.lane; p < packs; p += kAtOnce * group.size) {
    Held<T, N> some[kAtOnce] = {};
    for (int k = 0; k < kAtOnce; ++k)
      if (p + k * group.size < packs) some[k] = load_held<N>(x + head + (p + k * group.size) * N);
    for (int k = 0; k < kAtOnce; ++k) {
      const Pack<T, N> pack = some[k];
      for (int j = 0; p + k * group.size < packs && j < N; ++j)
        total += term<A>(pack.at[j], squared);
    }
  }
  if (group.lane < count - packs * N)
    total += term<A>(x[group.lane < head ? group.lane : packs * N + group.lane], squared);
  return total;
}

// A block adds up a part of an array.
struct SumArrays {
  SumsqFlatArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const float* x = nullptr;
    std::int64_t part = t.block(), left = 0;
    for (int i = 0; i < kSumsqArrays; ++i) {  // unrolled: no address of a parameter is taken
      if (i >= a.arrays || x != nullptr) continue;
      const std::int64_t parts = parts_of(a.count[i], a.part);
      if (part < parts) {
        x = a.in[i] + part * a.part;
        left = a.count[i] - part * a.part;
      } else {
        part -= parts;
      }
    }
    const Group group(t, kThreads);
    const double sum = group_reduce(
        t, group, sum_of<double>(group, x, static_cast<int>(left < a.part ? left : a.part), true),
        t.shared<double>(), Sum{});
    if (group.lane == 0) a.parts[a.parts_before + t.block()] = sum;
  }
};

// A group of threads adds up a part of a row.
template <class T, class A>
struct SumRows {
  Result result;
  const T* in;
  std::int64_t rows, n, part, parts;  // of each row
  int group_size;
  bool squared;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const Group group(t, group_size);
    const std::int64_t segment = t.block() * (kThreads / group.size) + group.index;
    const bool live = segment < rows * parts;
    const std::int64_t row = parts == 1 ? segment : segment / parts;  // a division takes its time
    const std::int64_t begin = (segment - row * parts) * part;
    const int count = live ? static_cast<int>(n - begin < part ? n - begin : part) : 0;
    const A total =
        group_reduce(t, group, sum_of<A>(group, in + (live ? row * n + begin : 0), count, squared),
                     t.shared<A>(), Sum{});
    if (live && group.lane == 0) result.put(segment, total);
  }
};

// A block adds up a part of the rows of [n, inner], in kAcross lanes of N columns; block_y is the
// part.
//
// Many rows: the whole warp across. The parts of all blocks are in flight together, and another
// launch adds them up. Fewer, as the gradients of biases have: two lanes of 16 bytes, a sector of
// memory, across, and all rows are one part. A block has 64 KiB in flight, and kSumBlocks of them
// have 3 MiB, three quarters of what 132 multiprocessors have with the 32 KiB that hide their
// latency of a microsecond. Counted, not measured: 8,192 rows of 768 in bf16 take 4 us where all
// of an H200's bandwidth is 2.9, without a second launch, which waits for the first and lasts
// longer than that difference; from kSumRowsAtOnce on the difference is the larger one.
template <class T, class A, int N, int kBlock, int kAcross, int kLoads>
struct SumColumns {
  static constexpr int kBlocks = kAcross < kWarp ? 2 : 0;
  static constexpr int kSize = kBlock, kColumns = kAcross * N, kLines = kBlock / kAcross;
  static constexpr std::size_t kShared = kBlock / kWarp * kColumns * sizeof(A);
  Result result;
  const T* in;
  std::int64_t n, inner, part, blocks_across;
  bool squared;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t outer = t.block() / blocks_across;
    const std::int64_t first = t.block() % blocks_across * kColumns;
    const std::int64_t c = first + t.lane() % kAcross * N, begin = t.block_y() * part;
    const std::int64_t end = begin + part < n ? begin + part : n;
    const std::int64_t line = begin + t.index() / kAcross, step = kLines * inner;
    std::int64_t left = c < inner ? end - line : 0;
    const T* x = left > 0 ? in + (outer * n + line) * inner + c : in;
    A total[N] = {};
    // While all loads are there none needs a question, so that they start together.
    for (; left > (kLoads - 1) * kLines; left -= kLoads * kLines, x += kLoads * step)
      add_rows<true>(x, step, left, total);
    if (left > 0) add_rows<false>(x, step, left, total);
    for (int mask = kWarp / 2; mask >= kAcross; mask /= 2)
      for (int j = 0; j < N; ++j) total[j] += t.shuffle_xor(total[j], mask);
    A* shared = t.shared<A>();  // [warps, columns]
    if (t.lane() < kAcross)
      for (int j = 0; j < N; ++j) shared[(t.warp() * kAcross + t.lane()) * N + j] = total[j];
    t.sync();
    const std::int64_t parts = n > part ? (n + part - 1) / part : 1;
    for (int j = t.index(); j < kColumns && first + j < inner; j += kBlock) {
      A all = shared[j];
      for (int w = 1; w < kBlock / kWarp; ++w) all += shared[w * kColumns + j];
      result.put((outer * parts + t.block_y()) * inner + first + j, all);
    }
  }
  // Of every kLines-th row from x on, kLoads in all or those of the `left` that are left.
  template <bool kAll>
  TESSERA_DEVICE void add_rows(const T* x, std::int64_t step, std::int64_t left,
                               A (&total)[N]) const {
    Held<T, N> held[kLoads] = {};
    for (int k = 0; k < kLoads; ++k)
      if (kAll || k * kLines < left) held[k] = load_held<N>(x + k * step);
    A of_some[N] = {};
    for (int k = 0; k < kLoads; ++k) {
      const Pack<T, N> some = held[k];
      for (int j = 0; j < N; ++j) of_some[j] += term<A>(some.at[j], squared);
    }
    for (int j = 0; j < N; ++j) total[j] += of_some[j];
  }
};

struct Sums {
  const void* in;
  std::int64_t outer, n, inner;
  bool squared;
};

template <class T, class A>
void launch_sums(const Sums& s, const Result& result, std::int64_t part, Exec& exec) {
  const T* in = static_cast<const T*>(s.in);
  const std::int64_t parts = std::max<std::int64_t>(1, blocks_for(s.n, part));
  if (s.inner == 1) {
    const int group = group_for<kThreads>(std::min(s.n, part), kAtOnce * kPack<T>);
    return launch<kThreads>(exec, {blocks_for(s.outer * parts, kThreads / group)},
                            kWarps * sizeof(A),
                            SumRows<T, A>{result, in, s.outer, s.n, part, parts, group, s.squared});
  }
  const auto columns = [&](auto body) {
    using Body = typename decltype(body)::type;
    const std::int64_t across = blocks_for(s.inner, Body::kColumns);
    launch<Body::kSize>(exec, {s.outer * across, parts}, Body::kShared,
                        Body{result, in, s.n, s.inner, part, across, s.squared});
  };
  if constexpr (!std::is_integral_v<T>)
    if (s.inner % kPack<T> == 0 && are_aligned(in)) {
      constexpr int kLoads = std::is_same_v<T, Float16> ? 6 : 8;  // its conversions take registers
      if (part >= s.n && s.n > kSumRows)
        return columns(TypeTag<SumColumns<T, A, kPack<T>, 512, 2, kLoads>>{});
      return columns(TypeTag<SumColumns<T, A, kPack<T>, kThreads, kWarp, kAtOnce>>{});
    }
  columns(TypeTag<SumColumns<T, A, 1, kThreads, kWarp, kAtOnce>>{});
}

// The length of a part: fixed, or more where the workspace has no room for so many; n where it has
// room for none.
std::int64_t part_of(const Sums& s, std::int64_t element_bytes, const Exec& exec) {
  std::int64_t part = s.inner == 1 ? kSumElements : kSumRows;
  if (exec.workspace == nullptr) return std::max<std::int64_t>(s.n, 1);
  const auto room = static_cast<std::int64_t>(exec.workspace_bytes);
  while (part < s.n && (s.outer * blocks_for(s.n, part) * s.inner * element_bytes > room ||
                        blocks_for(s.n, part) > 65535))
    part *= 2;
  return part;
}

template <class T, class A>
void sums(const Sums& s, const Result& result, bool is_one_launch, Exec& exec) {
  const std::int64_t part =
      is_one_launch ? std::max<std::int64_t>(s.n, 1) : part_of(s, sizeof(A), exec);
  if (s.inner == 1 && are_too_many(part, exec)) return;
  if (part >= s.n) return launch_sums<T, A>(s, result, part, exec);
  launch_sums<T, A>(s, {exec.workspace, -1, dtype_of<A>()}, part, exec);
  const Sums rest{exec.workspace, s.outer, blocks_for(s.n, part), s.inner, false};
  launch_sums<A, A>(rest, result, rest.n, exec);
}

// ---- maxima and minima

// Threads with an index of none have seen nothing.
template <class A>
struct Choice {
  A value;
  std::int64_t at;
};
constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

// The first NaN wins, then the best value, then the first of equal ones.
template <class A>
TESSERA_DEVICE Choice<A> better(const Choice<A>& a, const Choice<A>& b, bool largest) {
  if (a.at == kNone || b.at == kNone) return a.at == kNone ? b : a;
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  const bool equal = (a_nan && b_nan) || a.value == b.value;
  if (equal) return a.at < b.at ? a : b;
  return a_nan || (!b_nan && (largest ? a.value > b.value : a.value < b.value)) ? a : b;
}

// The choice of each column of [outer, n, inner]: by a block where inner is 1, by a thread
// elsewhere.
template <class T>
struct Choose {
  using A = Accumulator<T>;
  void* out;
  const T* in;
  std::int64_t outer, n, inner;
  bool largest, wants_index;

  TESSERA_DEVICE void operator()(Thread& t) const {
    Choice<A> best{A(0), kNone};
    if (inner > 1) {
      const std::int64_t i = t.global_index();
      if (i >= outer * inner) return;
      look(i / inner * n * inner + i % inner, 0, 1, best);
      return write(i, best);
    }
    look(t.block() * n, t.index(), kThreads, best);
    for (int mask = kWarp / 2; mask > 0; mask /= 2)
      best = better(best, Choice<A>{t.shuffle_xor(best.value, mask), t.shuffle_xor(best.at, mask)},
                    largest);
    A* values = t.shared<A>();
    auto* indices = t.shared<std::int64_t>(kWarps * sizeof(std::int64_t));
    if (t.lane() == 0) {
      values[t.warp()] = best.value;
      indices[t.warp()] = best.at;
    }
    t.sync();
    if (t.index() != 0) return;
    for (int w = 1; w < kWarps; ++w) best = better(best, Choice<A>{values[w], indices[w]}, largest);
    write(t.block(), best);
  }
  TESSERA_DEVICE void look(std::int64_t from, std::int64_t first, int step, Choice<A>& best) const {
    for (std::int64_t j = first; j < n; j += step)
      best = better(best, Choice<A>{term<A>(in[from + j * inner], false), j}, largest);
  }
  TESSERA_DEVICE void write(std::int64_t i, const Choice<A>& best) const {
    const bool none = best.at == kNone;
    if (wants_index) {
      static_cast<std::int64_t*>(out)[i] = none ? 0 : best.at;
    } else if constexpr (std::is_integral_v<T>) {
      constexpr T low = std::numeric_limits<T>::lowest(), high = std::numeric_limits<T>::max();
      static_cast<T*>(out)[i] = none ? (largest ? low : high) : static_cast<T>(best.value);
    } else {
      constexpr A inf = std::numeric_limits<A>::infinity();
      static_cast<T*>(out)[i] = rounded<T>(none ? (largest ? -inf : inf) : best.value);
    }
  }
};

}  // namespace

void reduce(const ReduceArgs& a, Exec& exec) {
  if (a.outer == 0 || a.inner == 0) return;
  visit_computed(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.op == ReduceOp::sum || a.op == ReduceOp::mean || a.op == ReduceOp::sumsq)
      return sums<T, Accumulator<T>>(
          {a.in, a.outer, a.n, a.inner, a.op == ReduceOp::sumsq},
          {a.out, a.op == ReduceOp::mean ? a.n : -1, a.out_dtype, a.accumulate, a.scale},
          is_one_launch(a), exec);
    const bool wants_index = a.op == ReduceOp::argmax || a.op == ReduceOp::argmin,
               largest = a.op == ReduceOp::argmax || a.op == ReduceOp::max;
    const std::int64_t blocks = a.inner == 1 ? a.outer : blocks_for(a.outer * a.inner, kThreads);
    launch<kThreads>(
        exec, {blocks}, 2 * kWarps * sizeof(std::int64_t),
        Choose<T>{a.out, static_cast<const T*>(a.in), a.outer, a.n, a.inner, largest, wants_index});
  });
}

void sumsq_flat(const SumsqFlatArgs& a, Exec& exec) {
  const Sums all{a.in[0], 1, a.count[0], 1, true};
  if (a.parts != nullptr) {
    launch<kThreads>(exec, {parts_of(a)}, kWarps * sizeof(double), SumArrays{a});
    if (!a.is_last) return;
    const Sums parts{a.parts, 1, a.parts_before + parts_of(a), 1, false};
    return launch_sums<double, double>(parts, {a.out, -1, a.out_dtype}, parts.n, exec);
  }
  sums<float, double>(all, {a.out, -1, a.out_dtype, a.accumulate}, false, exec);
}

}  // namespace tessera::kernels::cuda
