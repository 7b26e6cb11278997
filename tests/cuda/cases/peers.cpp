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
          k.reduce_peers(args, exec);
          if (peers == 0) return;
          at.back() = args.out = inside.at(side);
          k.reduce_peers(args, exec);
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
      k.copy({.out = out.at<std::byte>(side) + 3, .in = in.at<std::byte>(side) + 5, .bytes = bytes},
             exec);
    });
    c.equal(out);
    c.next();
  }
}

TESSERA_CASE("peers", "copies that go out together, of all lengths and alignments") {
  for (const std::int32_t count : {0, 1, 5, kMostCopies}) {
    struct Place {
      std::int64_t out, in, bytes;
    };
    const std::int64_t room = 128 * 1024;
    std::vector<Place> places;
    std::int64_t end = 0;
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int64_t unit = std::int64_t{1}
                                << c.integer(0, 4);  // both sides are multiples of it
      const std::int64_t bytes = i == 2 ? 32 * 1024 + c.integer(0, 99) : c.integer(0, 300);
      end = (end + unit - 1) / unit * unit;
      places.push_back({end, c.integer(0, 300) * unit, bytes});
      end += bytes;
    }
    Operand &in = c.input(i64, room / 8, -1e9, 1e9), &out = c.updated(i64, room / 8);
    c.run([&](const Kernels& k, Side side, Exec& exec) {
      std::vector<CopyArgs> copies;
      for (const Place& p : places)
        copies.push_back({out.at<std::byte>(side) + p.out, in.at<std::byte>(side) + p.in, p.bytes});
      k.copies({copies.data(), count}, exec);
    });
    c.equal(out);
    c.next();
  }
}

}  // namespace cuda_test
