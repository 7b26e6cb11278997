#include <limits>
#include <vector>

#include "tests/cuda/case.hpp"

namespace cuda_test {

TESSERA_CASE("peers", "sums and maxima over any number of peers have the CPU's bits") {
  for (const DType dtype : {f32, bf16, f16, f64, i32, i64, boolean})
    for (const int peers : {0, 1, 2, 7, 17})
      for (const PeersOp op : {PeersOp::sum, PeersOp::max}) {
        if (peers == 0 && op == PeersOp::max) continue;
        const auto size = static_cast<std::int64_t>(size_bytes(dtype));
        const std::int64_t n = c.integer(500, 530);
        std::vector<Operand*> inputs;
        for (int p = 0; p < peers; ++p) {
          inputs.push_back(&c.input(dtype, n, -9, 9, peers == 7 && p == 6 ? size : 0));
          if (is_floating(dtype)) {
            inputs[static_cast<std::size_t>(p)]->set(p, std::numeric_limits<double>::quiet_NaN());
            inputs[static_cast<std::size_t>(p)]->set(20 + p % 2, p % 2 == 0 ? 1e30 : -1e30);
          }
        }
        // Into one of the inputs, and elsewhere.
        Operand &inside = c.updated(dtype, n, -9, 9), &out = c.output(dtype, n);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          std::vector<const void*> at;
          for (const Operand* input : inputs) at.push_back(input->at(side));
          PeersArgs args{.out = out.at(side),
                         .inputs = at.data(),
                         .count = n,
                         .n_inputs = peers,
                         .dtype = dtype,
                         .op = op};
          k.peers.reduce(args, exec);
          if (peers == 0) return;
          at.back() = args.out = inside.at(side);
          k.peers.reduce(args, exec);
        });
        c.equal(out);
        c.equal(inside);
        c.next();
      }
}

TESSERA_CASE("peers", "copies") {
  for (const std::int64_t bytes : {0, 1, 16, 1009}) {
    Operand &in = c.input(i64, 256, -1e9, 1e9), &out = c.updated(i64, 256);
    c.run([&](const Kernels& k, Side side, Exec& exec) {
      k.peers.copy(
          {.out = out.at<std::byte>(side) + 3, .in = in.at<std::byte>(side) + 5, .bytes = bytes},
          exec);
    });
    c.equal(out);
    c.next();
  }
}

}  // namespace cuda_test
