// What Muon is made of: the iteration against double precision, and which rank is dealt which
// matrix.
#include "runtime/optim/newton_schulz.hpp"

#include "runtime/optim/matrix_owners.hpp"
#include "tests/optim/newton_schulz64.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("the iteration of Newton and Schulz is that of double precision, to rounding",
          "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Device device = Device::cpu();
  for (const int steps : {1, 2, 5})
    for (const auto& [rows, columns] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {4, 6}, {6, 4}, {3, 3}, {1, 9}, {9, 1}, {2, 40}}) {
      INFO(steps << " steps of " << rows << " x " << columns);
      const Values x = draw.values(rows * columns, 0.1f, 3);
      const optim::NewtonSchulz how{.coefficients = {kA, kB, kC}, .steps = steps, .eps = 1e-7};
      const Tensor got = optim::orthogonalised(Tensor::from(x, {rows, columns}, device), how);
      const Matrix64 expected = orthogonalised64(widened(x, rows, columns), steps);
      CHECK(distance(got.to_vector<float>(), expected.at) <= allowed_error(rows, columns, steps));
    }
}

TEST_CASE("what is orthogonalised may be huge, tiny or 0", "[optim]") {
  const Device device = Device::cpu();
  const optim::NewtonSchulz how{.coefficients = {kA, kB, kC}, .steps = 5, .eps = 1e-7};
  const Values ones{1, 2, 3, -1, 1, 2};
  const auto of = [&](float scale) {
    Values x = ones;
    for (float& v : x) v *= scale;
    return optim::orthogonalised(Tensor::from(x, {2, 3}, device), how).to_vector<float>();
  };
  // A power of two changes no bit of the norm or the quotient. No square of 3 * 2^100 is an f32.
  CHECK(of(0x1p100f) == of(1));
  CHECK(of(0x1p-20f) == of(1));  // a norm of 4e-6
  CHECK(of(0) == Values(6, 0));
  // Below eps it is a sixth and less of a unit matrix: not blown up to one.
  for (const float v : of(0x1p-60f)) CHECK(std::abs(v) < 1e-6f);
}

TEST_CASE("in bf16 the iteration rounds to bf16, and sums in f32", "[optim]") {
  const Device device = Device::cpu();
  const optim::NewtonSchulz how{
      .coefficients = {kA, kB, kC}, .steps = 5, .eps = 1e-7, .dtype = bf16};
  // 4 on the diagonal of 4 x 4: of norm 8, so that X is s I, and all is arithmetic on s.
  Values x(16, 0);
  for (std::size_t i = 0; i < 4; ++i) x[5 * i] = 4;
  const Tensor got = optim::orthogonalised(Tensor::from(x, {4, 4}, device), how);
  CHECK(got.dtype() == bf16);
  const auto rounded = [](float v) { return static_cast<float>(BFloat16(v)); };
  float s = 0.5f;
  for (int step = 0; step < 5; ++step) {
    const float gram = rounded(s * s);
    const float factor =
        rounded(std::fma(static_cast<float>(kB), gram, static_cast<float>(kC) * gram * gram));
    s = rounded(std::fma(static_cast<float>(kA), s, factor * s));
  }
  const Values found = raw::cast(got, f32).to_vector<float>();
  for (std::size_t i = 0; i < 16; ++i) CHECK(found[i] == (i % 5 == 0 ? s : 0));
}

TEST_CASE("matrices are dealt by work, and travel in turns of bounded size", "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  for (const int ranks : {1, 2, 3, 8}) {
    std::vector<optim::MatrixSize> sizes;
    for (int i = 0; i < 40; ++i)
      sizes.push_back({1 + static_cast<std::int64_t>(draw.engine() % 300),
                       1 + static_cast<std::int64_t>(draw.engine() % 300)});
    constexpr std::int64_t kMost = 1 << 19;
    const optim::MatrixPlan plan = optim::plan_matrices(sizes, ranks, kMost);
    std::vector<double> work(static_cast<std::size_t>(ranks));
    double most = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      work[static_cast<std::size_t>(plan.positions[i].owner_rank)] +=
          optim::orthogonalisation_work(sizes[i]);
      most = std::max(most, optim::orthogonalisation_work(sizes[i]));
    }
    // Who got the last matrix had least before it.
    const auto [least, largest] = std::ranges::minmax(work);
    CHECK(largest - least <= most);
    CHECK(plan.order.size() == sizes.size());
    CHECK(optim::plan_matrices(sizes, ranks, kMost).order == plan.order);

    std::vector<std::vector<int>> in_turn(plan.widths.size(),
                                          std::vector<int>(static_cast<std::size_t>(ranks)));
    const auto chunk = [&](std::size_t i) {
      return round_up(ceil_div(sizes[i].rows, ranks) * sizes[i].columns, 64);
    };
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto& position = plan.positions[i];
      ++in_turn.at(position.turn)[static_cast<std::size_t>(position.owner_rank)];
      CHECK(position.offset % 64 == 0);
      CHECK(position.offset + chunk(i) <= plan.widths[position.turn]);
      for (std::size_t j = 0; j < i; ++j) {
        const auto& other = plan.positions[j];
        if (other.owner_rank != position.owner_rank || other.turn != position.turn) continue;
        CHECK((other.offset + chunk(j) <= position.offset ||
               position.offset + chunk(i) <= other.offset));
      }
    }
    for (std::size_t t = 0; t < plan.widths.size(); ++t)
      if (plan.widths[t] * ranks * 4 > kMost)  // a matrix alone is more
        CHECK(std::ranges::max(in_turn[t]) >= 1);
    std::size_t counted = 0;
    for (int rank = 0; rank < ranks; ++rank)
      counted += optim::matrices_of(plan, sizes, rank).size();
    CHECK(counted == sizes.size());
  }
  // One that is larger than a turn has one of its own.
  const std::vector<optim::MatrixSize> large{{64, 64}, {64, 64}, {8, 8}};
  const optim::MatrixPlan plan = optim::plan_matrices(large, 1, 1);
  CHECK(plan.widths == std::vector<std::int64_t>{4096, 4096, 64});
}
