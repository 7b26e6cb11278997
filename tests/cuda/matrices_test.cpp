// What a warp does together with matrices, on the emulated GPU: every element where PTX's layouts
// have it, and products as plain loops have them.
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/gpu.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::kernels::cuda;

namespace {

constexpr int kPitch = 24;  // of a row, 48 bytes

// Four matrices of 8 x 8 whole numbers, one beside another below it, into registers.
struct Loads {
  std::uint32_t* out;  // [2, 32, 4]: plain, transposed

  void operator()(Thread& t) const {
    auto* const tile = t.shared<std::uint16_t>();
    for (int i = t.lane(); i < 32 * kPitch; i += kWarp) tile[i] = static_cast<std::uint16_t>(i);
    t.sync_warp();
    std::uint32_t plain[4], transposed[4];
    t.load_matrices(plain, tile + t.lane() * kPitch);
    t.load_transposed(transposed, tile + t.lane() * kPitch);
    for (int i = 0; i < 4; ++i) {
      out[t.lane() * 4 + i] = plain[i];
      out[(kWarp + t.lane()) * 4 + i] = transposed[i];
    }
  }
};

// d [16, 8] += a [16, 16] b [16, 8], loaded as kernels do: b from its transpose and from itself.
template <class T>
struct Product {
  const T *a, *b;  // by rows
  float* d;
  bool transposed;

  void operator()(Thread& t) const {
    T *const left = t.shared<T>(), *const right = left + 16 * kPitch;
    for (int i = t.lane(); i < 256; i += kWarp) left[i / 16 * kPitch + i % 16] = a[i];
    for (int i = t.lane(); i < 128; i += kWarp)
      right[transposed ? i % 8 * kPitch + i / 8 : i / 8 * kPitch + i % 8] = b[i];
    t.sync_warp();
    const int lane = t.lane(), row = lane / 4, column = lane % 4 * 2;
    std::uint32_t x[4], y[4];
    t.load_matrices(x, left + lane % 16 * kPitch + lane / 16 * 8);
    if (transposed)
      t.load_matrices(y, right + lane % 8 * kPitch + lane / 8 % 2 * 8);
    else
      t.load_transposed(y, right + lane % 16 * kPitch);
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = d[(row + i / 2 * 8) * 8 + column + i % 2];
    t.multiply<T>(sums, x, y[0], y[1]);
    for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + column + i % 2] = sums[i];
  }
};

// d [64, 64] of a warpgroup: a b^T and a b, of tiles that asynchronous copies have brought, a from
// there and from registers, and what d is before it is waited for.
template <class T>
struct GroupProduct {
  const T *a, *b;  // [64, 64] by rows
  float* d;        // [4, 64, 64]: a b^T, twice that, a b, and that before waiting

  void operator()(Thread& t) const {
    T *const left = t.shared<T>(), *const right = left + 64 * 64;
    for (int i = t.index(); i < 64 * 8; i += t.threads()) {
      t.copy_async(swizzled(left + i * 8), a + i * 8, true);
      t.copy_async(swizzled(right + i * 8), b + i * 8, true);
    }
    t.wait_copies_for_products();
    t.sync();
    std::uint32_t x[4][4];
    for (int k = 0; k < 4; ++k)
      t.load_matrices(
          x[k], swizzled(left + (t.warp() * 16 + t.lane() % 16) * 64 + k * 16 + t.lane() / 16 * 8));
    float sums[3][8][4] = {}, before[8][4];
    t.fence_products();
    for (int k = 0; k < 4; ++k) {
      t.multiply_columns<T>(sums[0], t.matrix(left) + k * 16, t.matrix(right) + k * 16, k > 0);
      for (int twice = 0; twice < 2; ++twice)
        t.multiply_columns<T>(sums[1], t.matrix(left) + k * 16, t.matrix(right) + k * 16);
    }
    t.commit_products();
    for (int k = 0; k < 4; ++k) t.multiply_rows<T>(sums[2], x[k], t.matrix(right) + k * 16 * 64);
    t.commit_products();
    t.wait_products<1>(sums[0], sums[1]);
    std::memcpy(before, sums[2], sizeof before);
    t.wait_products<0>(sums[2]);
    for (int which = 0; which < 4; ++which)
      for (int i = 0; i < 32; ++i) {
        const int row = t.warp() * 16 + t.lane() / 4 + i % 4 / 2 * 8;
        d[(which * 64 + row) * 64 + i / 4 * 8 + t.lane() % 4 * 2 + i % 2] =
            which < 3 ? sums[which][i / 4][i % 4] : before[i / 4][i % 4];
      }
  }
};

// What an H100 would compute something with, and the emulated GPU refuses.
enum class Fault { none, no_fence, unnamed_sums, no_wait };
struct Faulty {
  Fault fault;

  void operator()(Thread& t) const {
    auto* const tile = t.shared<BFloat16>();
    float sums[8][4] = {}, other[8][4] = {};
    if (fault != Fault::no_fence) t.fence_products();
    t.multiply_columns<BFloat16>(sums, t.matrix(tile), t.matrix(tile));
    t.commit_products();
    if (fault == Fault::no_wait) return;
    fault == Fault::unnamed_sums ? t.wait_products<0>(other) : t.wait_products<0>(sums);
  }
};
bool is_refused(Fault fault) {
  const pid_t child = fork();
  if (child == 0) {
    static_cast<void>(std::freopen("/dev/null", "w", stderr));
    std::signal(SIGILL, SIG_DFL);  // not Catch's
    std::signal(SIGTRAP, SIG_DFL);
    Exec exec;
    launch<128>(exec, {}, 64 * 64 * 2, Faulty{fault});
    std::raise(SIGKILL);  // without what ends at an exit
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

struct Copies {
  const float* from;  // [32, 4]
  float* out;         // [3, 32]: before waiting, after, and what was not there

  void operator()(Thread& t) const {
    auto* const to = t.shared<float>();
    const int i = t.lane();
    t.copy_async(to + i * 4, from + i * 4, true);
    t.copy_async(to + (kWarp + i) * 4, from + i * 4, false);
    out[i] = to[i * 4 + 1];
    t.wait_copies();
    out[kWarp + i] = to[i * 4 + 1];
    out[2 * kWarp + i] = to[(kWarp + i) * 4 + 1];
  }
};

template <class T>
void check_product(bool transposed, std::mt19937& engine) {
  std::uniform_int_distribution<int> whole(-8, 8);
  std::vector<T> a(256), b(128);
  std::vector<float> d(128), expected;
  for (T& x : a) x = T(static_cast<float>(whole(engine)));
  for (T& x : b) x = T(static_cast<float>(whole(engine)));
  for (float& x : d) x = static_cast<float>(whole(engine));
  for (std::size_t i = 0; i < 16; ++i)
    for (std::size_t j = 0; j < 8; ++j) {
      float sum = d[i * 8 + j];  // whole numbers below 2^24, so exact in any order
      for (std::size_t k = 0; k < 16; ++k) sum += float{a[i * 16 + k]} * float{b[k * 8 + j]};
      expected.push_back(sum);
    }
  Exec exec;
  launch<kWarp>(exec, {}, 32 * kPitch * sizeof(T),
                Product<T>{a.data(), b.data(), d.data(), transposed});
  REQUIRE(exec.error == nullptr);
  CHECK(d == expected);
}

template <class T>
void check_group_product(std::mt19937& engine) {
  std::uniform_int_distribution<int> whole(-8, 8);
  constexpr std::size_t n = 64;
  std::vector<T> a(n * n), b(n * n);
  for (T& x : a) x = T(static_cast<float>(whole(engine)));
  for (T& x : b) x = T(static_cast<float>(whole(engine)));
  std::vector<float> d(4 * n * n), expected(4 * n * n);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j) {
      float by_columns = 0, by_rows = 0;
      for (std::size_t k = 0; k < n; ++k) {
        by_columns += float{a[i * n + k]} * float{b[j * n + k]};
        by_rows += float{a[i * n + k]} * float{b[k * n + j]};
      }
      const std::size_t at = i * n + j;
      expected[at] = by_columns;
      expected[n * n + at] = 2 * by_columns;
      expected[2 * n * n + at] = by_rows;
    }
  Exec exec;
  launch<128>(exec, {}, 2 * n * n * sizeof(T), GroupProduct<T>{a.data(), b.data(), d.data()});
  REQUIRE(exec.error == nullptr);
  CHECK(d == expected);
}

}  // namespace

TEST_CASE("matrices lie in a warp's registers as PTX has them") {
  std::vector<std::uint32_t> out(2 * 32 * 4);
  Exec exec;
  launch<kWarp>(exec, {}, 32 * kPitch * 2, Loads{out.data()});
  REQUIRE(exec.error == nullptr);
  const auto element = [](int matrix, int row, int column) {
    return static_cast<std::uint32_t>((matrix * 8 + row) * kPitch + column);
  };
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int r = lane / 4, c = lane % 4 * 2;
      CHECK(out[static_cast<std::size_t>(lane * 4 + i)] ==
            (element(i, r, c) | element(i, r, c + 1) << 16));
      CHECK(out[static_cast<std::size_t>((32 + lane) * 4 + i)] ==
            (element(i, c, r) | element(i, c + 1, r) << 16));
    }
}

TEST_CASE("a warp multiplies matrices as plain loops do") {
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937 engine(seed);
  for (const bool transposed : {false, true}) {
    check_product<BFloat16>(transposed, engine);
    check_product<Float16>(transposed, engine);
  }
}

TEST_CASE("a warpgroup multiplies swizzled matrices as plain loops do, when it is waited for") {
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937 engine(seed);
  check_group_product<BFloat16>(engine);
  check_group_product<Float16>(engine);
}

TEST_CASE(
    "products of a warpgroup without fence or wait, or of sums that nobody names, are refused") {
  CHECK_FALSE(is_refused(Fault::none));
  CHECK(is_refused(Fault::no_fence));
  CHECK(is_refused(Fault::unnamed_sums));
  CHECK(is_refused(Fault::no_wait));
}

TEST_CASE("asynchronous copies are there when they are waited for, not before") {
  std::vector<float> from(32 * 4), out(3 * 32);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i);
  Exec exec;
  launch<kWarp>(exec, {}, 2 * 32 * 16, Copies{from.data(), out.data()});
  REQUIRE(exec.error == nullptr);
  for (std::size_t i = 0; i < 32; ++i) {
    CHECK(out[i] != out[i]);
    CHECK(out[32 + i] == from[i * 4 + 1]);
    CHECK(out[64 + i] == 0);
  }
}
