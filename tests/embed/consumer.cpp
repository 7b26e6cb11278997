// The smallest program of a user: a product on each rank and a sum over the ranks, so that kernels
// and worlds are linked.
#include <cstdio>
#include <stdexcept>
#include <tessera/tessera.hpp>

namespace ts = tessera;

int main(int argc, char** argv) {
  return ts::run(argc, argv, [](ts::World& world) {
    const ts::Tensor x = ts::Tensor::ones({1, 42}, ts::f32, world.device());
    const double sum = world.sum(ts::matmul(x, transpose(x, 0, 1)).item());
    if (sum != 42 * world.size()) throw std::runtime_error("the sum is wrong");
    if (world.rank() == 0) std::printf("tessera %s: %.0f\n", TESSERA_VERSION, sum);
  });
}
