// Values in from vectors, spans and Eigen and out again, DLPack both ways, safetensors.
#include <ATen/DLConvertor.h>
#include <torch/torch.h>

#include <Eigen/Core>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <span>

using torch::Tensor;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

static void check(bool holds, const char* what) {
  std::printf("%s: %s\n", what, holds ? "equal" : "DIFFERENT");
  if (!holds) throw std::runtime_error(what);
}

static void save(const std::string& path, const std::map<std::string, Tensor>& tensors) {
  std::ostringstream header;
  std::size_t at = 0;
  for (const auto& [name, x] : tensors) {
    TORCH_CHECK(x.dtype() == torch::kFloat && x.is_contiguous());
    header << (at ? "," : "{") << '"' << name << R"(":{"dtype":"F32","shape":[)"
           << c10::Join(",", x.sizes()) << R"(],"data_offsets":[)" << at << ',' << at + x.nbytes()
           << "]}";
    at += x.nbytes();
  }
  header << '}';
  const std::uint64_t size = header.str().size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), 8) << header.str();
  for (const auto& [name, x] : tensors)
    file.write(static_cast<const char*>(x.const_data_ptr()), x.nbytes());
  TORCH_CHECK(file.flush(), "cannot write ", path);
}

static std::vector<std::int64_t> numbers(const std::string& text, std::size_t at) {  // [1,2,..]
  std::istringstream in(text.substr(text.find('[', at) + 1));
  std::vector<std::int64_t> list;
  std::int64_t number;
  for (char next = ','; next == ',' && in >> number; in >> next) list.push_back(number);
  return list;
}

static std::map<std::string, Tensor> load(const std::string& path) {  // what `save` wrote
  std::ifstream file(path, std::ios::binary);
  std::uint64_t size = 0;
  file.read(reinterpret_cast<char*>(&size), 8);
  std::string header(size, ' ');
  file.read(header.data(), size);
  std::map<std::string, Tensor> tensors;
  for (std::size_t at = 1; at < size; at = header.find('}', at) + 2) {
    const std::string name = header.substr(at + 1, header.find('"', at + 1) - at - 1);
    const Tensor x = torch::empty(numbers(header, header.find("\"shape\"", at)));
    file.seekg(8 + size + numbers(header, header.find("\"data_offsets\"", at))[0]);
    file.read(static_cast<char*>(x.data_ptr()), x.nbytes());
    tensors[name] = x;
  }
  TORCH_CHECK(file, "cannot read ", path);
  return tensors;
}

int main() {
  std::vector<float> values(12);
  std::iota(values.begin(), values.end(), 0.5f);

  const Tensor from_vector = torch::tensor(values).view({3, 4});
  const float* data = from_vector.const_data_ptr<float>();
  check(std::vector(data, data + from_vector.numel()) == values, "vector");

  const std::span part = std::span(values).subspan(4);
  const Tensor from_span = torch::from_blob(part.data(), {2, 4}).clone();
  check(std::ranges::equal(std::span(from_span.const_data_ptr<float>(), 8), part), "span");

  const Eigen::MatrixXf matrix = Eigen::MatrixXf::Random(3, 4);
  const Tensor from_eigen = torch::empty({3, 4});
  Eigen::Map<RowMajor>(from_eigen.data_ptr<float>(), 3, 4) = matrix;
  check(Eigen::Map<const RowMajor>(from_eigen.const_data_ptr<float>(), 3, 4) == matrix, "Eigen");
  const Tensor product = from_eigen.mm(from_eigen.t());
  check(Eigen::Map<const RowMajor>(product.const_data_ptr<float>(), 3, 3)
            .isApprox(matrix * matrix.transpose()),
        "product");

  DLManagedTensor* lent = torch::toDLPack(from_vector);
  check(static_cast<const float*>(lent->dl_tensor.data)[5] == values[5], "DLPack out");
  const Tensor back = torch::fromDLPack(lent);
  check(back.data_ptr() == from_vector.data_ptr() && equal(back, from_vector), "DLPack in");

  const std::map<std::string, Tensor> tensors{{"a", from_vector}, {"b", from_eigen}};
  save("exchange.safetensors", tensors);
  for (const auto& [name, x] : load("exchange.safetensors"))
    check(equal(x, tensors.at(name)), "safetensors");
}
