// Sums, maxima and copies over peers' memory: the same bits on every device, since ranks on
// different ones must agree.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/peer_memory.hpp"
#include "tests/kernels/case.hpp"

namespace kernel_test {
namespace {

// In the order of the inputs: in f32 for 16-bit floats, each addition rounded, and the end once.
double combined(PeersOp op, DType dtype, const std::vector<double>& inputs) {
  if (inputs.empty()) return 0;
  double all = inputs[0];
  for (std::size_t p = 1; p < inputs.size(); ++p) {
    if (op == PeersOp::max)
      all = std::isnan(all) || std::isnan(inputs[p]) ? NAN : std::max(all, inputs[p]);
    else if (dtype == boolean)
      all = std::max(all, inputs[p]);
    else if (dtype == f64 || !is_floating(dtype))
      all += inputs[p];
    else
      all = static_cast<double>(static_cast<float>(all) + static_cast<float>(inputs[p]));
  }
  return rounded_to(dtype, all);
}

}  // namespace

TESSERA_CASE("peers", "sums and maxima over any number of peers, in order, in place too") {
  for (const DType dtype : {f32, bf16, f16, f64, i32, i64, boolean})
    for (const int peers : {0, 1, 2, 5, 7, 17})
      for (const PeersOp op : {PeersOp::sum, PeersOp::max}) {
        if (peers == 0 && op == PeersOp::max) continue;
        const auto size = static_cast<std::int64_t>(size_bytes(dtype));
        const std::int64_t sizes[] = {0, 1, 31, 32, 33, 1030},
                           n = peers == 5 ? sizes[c.integer(0, 5)] : c.integer(500, 530);
        std::vector<Operand*> inputs;
        for (int p = 0; p < peers; ++p) {
          inputs.push_back(&c.input(dtype, n, -9, 9, peers == 7 && p == 6 ? size : 0));
          if (!is_floating(dtype) || peers == 5) continue;
          inputs.back()->set(p, std::numeric_limits<double>::quiet_NaN());
          inputs.back()->set(20 + p % 2, p % 2 == 0 ? 1e30 : -1e30);
        }
        // Elsewhere, and into what is the last input of a second sum.
        Operand &inside = c.updated(dtype, n, -9, 9), &out = c.output(dtype, n);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
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
        for (std::int64_t i = 0; i < n; ++i) {
          std::vector<double> values;
          for (const Operand* input : inputs) values.push_back(input->get(i));
          c.near(out, i, combined(op, dtype, values), 0);
          if (peers > 0) values.back() = inside.get(i);
          c.near(inside, i, peers > 0 ? combined(op, dtype, values) : inside.get(i), 0);
        }
        c.next();
      }
}

TESSERA_CASE("peers", "copies, alone and together, of all lengths and alignments") {
  for (const std::int32_t count : {0, 1, 5, kMostCopies}) {
    const std::int64_t room = 128 * 1024;
    std::vector<CopyArgs> offsets;  // as addresses from 0
    std::int64_t end = 3;
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int64_t unit = std::int64_t{1} << c.integer(0, 4);  // both sides are multiples
      const std::int64_t bytes = i == 2 ? 32 * 1024 + c.integer(0, 99) : c.integer(0, 300);
      end = (end + unit - 1) / unit * unit;
      offsets.push_back(
          {reinterpret_cast<void*>(end), reinterpret_cast<void*>(c.integer(0, 300) * unit), bytes});
      end += bytes;
    }
    // Bytes as booleans would be: numbers that are exact, and one element each.
    Operand &in = c.input(boolean, room), &alone = c.updated(boolean, room),
            &together = c.updated(boolean, room);
    const auto moved = [&](const CopyArgs& o, const Operand& to, Side side) {
      return CopyArgs{to.at<std::byte>(side) + reinterpret_cast<std::intptr_t>(o.out),
                      in.at<std::byte>(side) + reinterpret_cast<std::intptr_t>(o.in), o.bytes};
    };
    c.compute([&](const Kernels& k, Side side, Exec& exec) {
      std::vector<CopyArgs> copies;
      for (const CopyArgs& o : offsets) {
        k.copy(moved(o, alone, side), exec);
        copies.push_back(moved(o, together, side));
      }
      k.copies({copies.data(), count}, exec);
    });
    for (const Operand* out : {&alone, &together}) {
      std::int64_t at = 0;
      for (const CopyArgs& o : offsets) {
        const auto to = reinterpret_cast<std::intptr_t>(o.out),
                   from = reinterpret_cast<std::intptr_t>(o.in);
        for (; at < to; ++at) c.near(*out, at, out->get(at), 0);
        for (; at < to + o.bytes; ++at) c.near(*out, at, in.get(from + at - to), 0);
      }
      for (; at < room; ++at) c.near(*out, at, out->get(at), 0);
    }
    c.next();
  }
}

}  // namespace kernel_test
