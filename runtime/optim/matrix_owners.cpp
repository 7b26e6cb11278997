#include "runtime/optim/matrix_owners.hpp"

#include <algorithm>
#include <numeric>

#include "tessera/detail/base/checked.hpp"

namespace tessera::optim {

namespace {

constexpr std::int64_t kAlign = 64;  // elements: 256 bytes, as flat groups have it

}  // namespace

double orthogonalisation_work(const MatrixSize& size) {
  double work = 0;
  for (const RowPart& part : size.parts) work += orthogonalisation_work({part.rows, size.columns});
  if (!size.parts.empty()) return work;
  const auto low = static_cast<double>(std::min(size.rows, size.columns)),
             high = static_cast<double>(std::max(size.rows, size.columns));
  return low * low * high;
}

MatrixPlan plan_matrices(std::span<const MatrixSize> sizes, int ranks, std::int64_t most_bytes) {
  MatrixPlan plan;
  plan.positions.resize(sizes.size());
  plan.order.resize(sizes.size());
  std::iota(plan.order.begin(), plan.order.end(), std::size_t{0});
  std::ranges::stable_sort(plan.order, [&](std::size_t a, std::size_t b) {
    return orthogonalisation_work(sizes[a]) > orthogonalisation_work(sizes[b]);
  });
  struct Owner {
    double work = 0;
    std::size_t turn = 0;
    std::int64_t used = 0;  // elements of its share of that turn
  };
  std::vector<Owner> owners(static_cast<std::size_t>(ranks));
  const std::int64_t share = most_bytes / 4 / ranks;
  for (const std::size_t i : plan.order) {
    const auto least = std::ranges::min_element(owners, {}, &Owner::work);  // the first of them
    const std::int64_t chunk = round_up(
        checked_mul(sizes[i].most_rows > 0 ? sizes[i].most_rows : ceil_div(sizes[i].rows, ranks),
                    sizes[i].columns),
        kAlign);
    if (least->used > 0 && checked_add(least->used, chunk) > share) {
      ++least->turn;
      least->used = 0;
    }
    plan.positions[i] = {static_cast<int>(least - owners.begin()), least->turn, least->used};
    least->used += chunk;
    least->work += orthogonalisation_work(sizes[i]);
    plan.widths.resize(std::max(plan.widths.size(), least->turn + 1));
    std::int64_t& width = plan.widths[least->turn];
    width = std::max(width, least->used);
  }
  return plan;
}

std::int64_t sent_bytes(const MatrixPlan& plan, int ranks) {
  const std::int64_t elements =
      std::accumulate(plan.widths.begin(), plan.widths.end(), std::int64_t{0});
  return 2 * 4 * (ranks - 1) * elements;
}

std::vector<MatrixSize> matrices_of(const MatrixPlan& plan, std::span<const MatrixSize> sizes,
                                    int rank) {
  std::vector<MatrixSize> own;
  for (const std::size_t i : plan.order)
    if (plan.positions[i].owner_rank == rank) own.push_back(sizes[i]);
  return own;
}

}  // namespace tessera::optim
