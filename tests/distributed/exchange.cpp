#include "tests/distributed/exchange.hpp"

#include <cstring>
#include <functional>

#include "tessera/distributed/collectives.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/support/values.hpp"

using namespace tessera;

namespace exchange {
namespace {

// Element i of rank r's input: small whole numbers, which every dtype and every sum of four holds
// exactly; of boolean 0 and 1.
double value(DType dtype, int rank, std::int64_t i) {
  const auto v = static_cast<double>((i * 5 + rank * 3) % 11);
  return dtype == boolean ? static_cast<double>(static_cast<int>(v) % 2) : v - (rank % 2);
}

// Rank r's input in row-major order, laid out as it is or with its dimensions swapped in memory.
Tensor input(const Shape& shape, DType dtype, const RankGroup& group, bool strided) {
  const Shape laid = strided ? Shape{shape[1], shape[0]} : shape;
  return visit(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<std::byte> bytes(static_cast<std::size_t>(shape.numel()) * sizeof(T));
    for (std::int64_t i = 0; i < shape.numel(); ++i) {
      const double v = value(dtype, group.rank(), i);
      T element{};
      if constexpr (sizeof(T) == 2)
        element = T(static_cast<float>(v));
      else
        element = static_cast<T>(v);
      const std::int64_t at = strided ? i % shape[1] * shape[0] + i / shape[1] : i;
      std::memcpy(bytes.data() + static_cast<std::size_t>(at) * sizeof(T), &element, sizeof(T));
    }
    const Tensor x = Tensor::from_bytes(bytes, laid, dtype, group.device());
    return strided ? raw::transpose(x, 0, 1) : x;
  });
}

class Check {
 public:
  explicit Check(const RankGroup& group) : group_(group) {}

  void all(const Shape& shape, DType dtype, bool strided) {
    const Tensor x = input(shape, dtype, group_, strided);
    const int size = group_.size(), rank = group_.rank(), root = size - 1;
    const std::int64_t n = shape.numel(), part = n / size;
    const auto over_ranks = [&](std::int64_t i, bool sum) {
      double out = value(dtype, 0, i);
      for (int r = 1; r < size; ++r) {
        const double v = value(dtype, r, i);
        out = sum && dtype != boolean ? out + v : std::max(out, v);
      }
      return out;
    };
    const std::string what = concat(dtype, ' ', shape, strided ? " strided" : "");
    same("all_reduce " + what, dist::all_reduce(x, group_), shape,
         [&](std::int64_t i) { return over_ranks(i, true); });
    same("all_reduce max " + what, dist::all_reduce(x, group_, ReduceOp::max), shape,
         [&](std::int64_t i) { return over_ranks(i, false); });
    const Tensor alike = Tensor::empty(shape, dtype, Device::meta());
    const auto of_root = [&](std::int64_t i) { return value(dtype, root, i); };
    same("broadcast " + what, dist::broadcast(x, root, group_), shape, of_root);
    same("broadcast of the root's " + what, dist::broadcast(rank == root ? x : alike, root, group_),
         shape, of_root);
    for (const int target : {0, size / 2, root}) {  // of a rank to itself, too
      const std::string passed = concat("send_recv to ", target, ' ', what);
      const bool is_alike = target != root && strided;
      const Tensor got =
          dist::send_recv(is_alike && rank != root ? alike : x, root, target, group_);
      if (rank == target)
        same(passed, got, shape, of_root);
      else if (got.defined())
        errors.push_back(passed + " has a result on another rank");
    }
    const Shape gathered = shape.ndim() == 0 ? Shape{size} : shape.with(0, size * shape[0]);
    same("all_gather " + what, dist::all_gather(x, group_), gathered,
         [&](std::int64_t i) { return value(dtype, static_cast<int>(i / n), i % n); });
    if (shape.ndim() == 0 || shape[0] % size != 0) return;
    same("reduce_scatter " + what, dist::reduce_scatter(x, group_), shape.with(0, shape[0] / size),
         [&](std::int64_t i) { return over_ranks(rank * part + i, true); });
    same("all_to_all " + what, dist::all_to_all(x, group_), shape, [&](std::int64_t i) {
      return value(dtype, static_cast<int>(i / part), rank * part + i % part);
    });
    same("the input " + what, x, shape,
         [&](std::int64_t i) { return value(dtype, rank, i); });  // is not changed
  }

  std::vector<std::string> errors;

 private:
  void same(const std::string& what, const Tensor& got, const Shape& shape,
            const std::function<double(std::int64_t)>& expected) {
    if (got.shape() != shape) {
      errors.push_back(concat(what, " has shape ", got.shape(), ", expected ", shape));
      return;
    }
    const std::vector<double> values = testing::to_doubles(got);
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i] != expected(static_cast<std::int64_t>(i))) {
        errors.push_back(concat(what, ": element ", i, " is ", values[i], ", expected ",
                                expected(static_cast<std::int64_t>(i))));
        return;
      }
  }

  const RankGroup& group_;
};

}  // namespace

std::vector<std::string> errors(const RankGroup& group) {
  Check check(group);
  for (const DType dtype : {f32, bf16, f16, f64, i32, i64, boolean})
    for (const bool strided : {false, true}) check.all({12, 5}, dtype, strided);
  check.all({}, f32, false);
  check.all({5}, i64, false);
  check.all({0, 3}, f32, false);
  check.all({12, 0}, f32, false);
  return check.errors;
}

// One element more than a piece of the whole, and rows that end within a piece.
std::vector<std::string> errors_of_pieces(const RankGroup& group) {
  Check check(group);
  const std::int64_t most = RankGroup::kWorkspaceBytes / 4;
  check.all({most + 1}, f32, false);
  check.all({12, most / 12 + 7}, f32, true);
  return check.errors;
}

}  // namespace exchange
