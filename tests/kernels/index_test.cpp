// Embedding and indexing kernels against plain loops.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

Array random_ids(kernel_test::Random& random, DType dtype, std::int64_t count, std::int64_t n) {
  Array ids(dtype, count);
  for (std::int64_t i = 0; i < count; ++i)
    ids.set(i, static_cast<double>(random.integer(0, n - 1)));
  if (count > 5) {
    ids.set(2, -1);
    ids.set(4, static_cast<double>(n));
  }
  return ids;
}

double missing(DType dtype) { return is_floating(dtype) ? NAN : 0; }

}  // namespace

TEST_CASE("embedding gathers rows and shows bad ids", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kAll) {
    for (const DType id_dtype : {DType::i32, DType::i64}) {
      INFO(dtype << ", ids " << id_dtype);
      const std::int64_t vocab = 11, cols = 37, count = 403;
      const Array table = random.array(dtype, vocab * cols),
                  ids = random_ids(random, id_dtype, count, vocab);
      Array out(dtype, count * cols);
      on_threads(
          [&](Exec& exec) {
            cpu_kernels().embedding({.out = out.data(),
                                     .table = table.data(),
                                     .ids = ids.data(),
                                     .count = count,
                                     .vocab = vocab,
                                     .cols = cols,
                                     .dtype = dtype,
                                     .id_dtype = id_dtype},
                                    exec);
          },
          out);
      std::vector<double> expected;
      for (std::int64_t i = 0; i < count * cols; ++i) {
        const auto id = static_cast<std::int64_t>(ids[i / cols]);
        expected.push_back(id < 0 || id >= vocab ? missing(dtype) : table[id * cols + i % cols]);
      }
      require_close(out, expected, 0);
    }
  }
}

TEST_CASE("the embedding's gradient sums over equal ids, fresh or accumulated", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (const DType grad_dtype : kFloats) {
      for (const bool accumulate : {false, true}) {
        INFO(dtype << " into " << grad_dtype << ", accumulate " << accumulate);
        const std::int64_t vocab = 70, cols = 300, count = 210;
        const Array dy = random.array(dtype, count * cols),
                    ids = random_ids(random, DType::i64, count, vocab);
        Array d = random.array(grad_dtype, vocab * cols);
        std::vector<double> expected(static_cast<std::size_t>(d.size()));
        for (std::int64_t i = 0; accumulate && i < d.size(); ++i)
          expected[static_cast<std::size_t>(i)] = d[i];
        if (!accumulate) d.fill(NAN);
        std::vector<double> hits(static_cast<std::size_t>(vocab));
        for (std::int64_t i = 0; i < count; ++i) {
          const auto id = static_cast<std::int64_t>(ids[i]);
          if (id < 0 || id >= vocab) continue;
          hits[static_cast<std::size_t>(id)] += 1;
          for (std::int64_t c = 0; c < cols; ++c)
            expected[static_cast<std::size_t>(id * cols + c)] += 0.5 * dy[i * cols + c];
        }
        on_threads(
            [&](Exec& exec) {
              cpu_kernels().embedding_backward({.d_table = d.data(),
                                                .dy = dy.data(),
                                                .ids = ids.data(),
                                                .count = count,
                                                .vocab = vocab,
                                                .cols = cols,
                                                .scale = 0.5,
                                                .dtype = dtype,
                                                .grad_dtype = grad_dtype,
                                                .id_dtype = DType::i64,
                                                .accumulate = accumulate},
                                               exec);
            },
            d);
        // One rounding, in grad_dtype, per addition of values of at most 1 to sums of at most 2 +
        // hits.
        const double most = *std::max_element(hits.begin(), hits.end());
        require_close(d, expected, 0, (most + 1) * (most + 2) * 2 * epsilon(grad_dtype));
      }
    }
  }
}

TEST_CASE("index_select, index_add, gather and scatter_add follow the contract", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kAll) {
    for (const auto& [outer, n, inner, count] :
         {std::array<std::int64_t, 4>{1, 5, 1, 7}, {3, 4, 6, 9}, {2, 9, 300, 6}, {1, 3, 2, 0}}) {
      const DType index_dtype = random.integer(0, 1) == 1 ? DType::i32 : DType::i64;
      INFO(dtype << ": " << outer << " x " << n << " x " << inner << ", count " << count);
      Array big = random.array(dtype, outer * n * inner);
      const Array rows = random_ids(random, index_dtype, count, n),
                  each = random_ids(random, index_dtype, outer * count * inner, n);
      Array selected(dtype, outer * count * inner), gathered = selected, added = big,
                                                    scattered = big;
      Array source = random.array(dtype, outer * count * inner);
      const auto args = [&](Array& b, Array& s, const Array& index) {
        return IndexArgs{.big = b.data(),
                         .small = s.data(),
                         .index = index.data(),
                         .outer = outer,
                         .n = n,
                         .inner = inner,
                         .count = count,
                         .dtype = dtype,
                         .index_dtype = index_dtype};
      };
      on_threads(
          [&](Exec& exec) {
            cpu_kernels().index_select(args(big, selected, rows), exec);
            cpu_kernels().gather(args(big, gathered, each), exec);
            if (dtype == DType::boolean) return;
            cpu_kernels().index_add(args(added, source, rows), exec);
            cpu_kernels().scatter_add(args(scattered, source, each), exec);
          },
          selected, gathered, added, scattered);
      std::vector<double> e_selected, e_gathered;
      Array e_added = big, e_scattered = big;
      for (std::int64_t i = 0; i < outer * count * inner; ++i) {
        const std::int64_t o = i / inner / count, j = i / inner % count, x = i % inner;
        const auto row = static_cast<std::int64_t>(rows[j]),
                   one = static_cast<std::int64_t>(each[i]);
        const bool row_ok = row >= 0 && row < n, one_ok = one >= 0 && one < n;
        const std::int64_t row_at = (o * n + row) * inner + x, one_at = (o * n + one) * inner + x;
        e_selected.push_back(row_ok ? big[row_at] : missing(dtype));
        e_gathered.push_back(one_ok ? big[one_at] : missing(dtype));
        // Additions in the order of the source, one rounding each: the same bits. f32 sums as f32
        // do.
        const auto add = [&](Array& to, std::int64_t at) {
          to.set(at, dtype == DType::f64 || !is_floating(dtype)
                         ? to[at] + source[i]
                         : double(float(to[at]) + float(source[i])));
        };
        if (row_ok) add(e_added, row_at);
        if (one_ok) add(e_scattered, one_at);
      }
      require_close(selected, e_selected, 0);
      require_close(gathered, e_gathered, 0);
      if (dtype == DType::boolean) continue;
      REQUIRE(added.bytes == e_added.bytes);
      REQUIRE(scattered.bytes == e_scattered.bytes);
    }
  }
}
