// Values in from vectors, spans and Eigen and out again, DLPack both ways, safetensors.
#include <Eigen/Core>
#include <cstdio>
#include <numeric>
#include <tessera/tensor/eigen.hpp>
#include <tessera/tessera.hpp>

namespace ts = tessera;
using ts::Tensor;

static void check(bool holds, const char* what) {
  std::printf("%s: %s\n", what, holds ? "equal" : "DIFFERENT");
  if (!holds) throw std::runtime_error(what);
}

int main() {
  const ts::World world = ts::World::single();
  const ts::Device& device = world.device();
  std::vector<float> values(12);
  std::iota(values.begin(), values.end(), 0.5f);

  const Tensor from_vector = Tensor::from(values, {3, 4}, device);
  check(from_vector.to_vector<float>() == values, "vector");

  const Tensor from_span = Tensor::from(std::span(values).subspan(4), {2, 4}, device);
  check(std::ranges::equal(from_span.to_span<float>(), std::span(values).subspan(4)), "span");

  const Eigen::MatrixXf matrix = Eigen::MatrixXf::Random(3, 4);
  const Tensor from_eigen = Tensor::empty({3, 4}, ts::f32, device);
  ts::writable_eigen_matrix<float>(from_eigen) = matrix;
  check(ts::eigen_matrix<float>(from_eigen) == matrix, "Eigen");
  const Tensor product = matmul(from_eigen, transpose(from_eigen, 0, 1));
  check(ts::eigen_matrix<float>(product).isApprox(matrix * matrix.transpose()), "product");

  auto lent = ts::to_dlpack(from_vector);
  check(static_cast<const float*>(lent->dl_tensor.data)[5] == values[5], "DLPack out");
  const Tensor back = ts::from_dlpack(std::move(lent), device);
  check(back.data() == from_vector.data() && back.to_vector<float>() == values, "DLPack in");

  const std::string path = "exchange.safetensors";
  const ts::StateDict tensors{{"a", from_vector}, {"b", from_eigen}};
  ts::checkpoint::save_state(path, tensors, world);
  const ts::checkpoint::SafetensorsReader reader(path);
  for (const ts::checkpoint::SafetensorsEntry& entry : reader.entries()) {
    const Tensor read =
        Tensor::from_bytes(reader.bytes(entry), ts::Shape(entry.shape), entry.dtype, device);
    check(read.to_vector<float>() == tensors.at(entry.name).values.to_vector<float>(),
          "safetensors");
  }
}
