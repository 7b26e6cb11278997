// The arguments of a sample's call, and the tables of what is called with them.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/autograd/ops.hpp"

namespace op_samples {

using namespace tessera;
using Json = nlohmann::json;
using Tensors = std::vector<Tensor>;
using Sizes = std::vector<std::int64_t>;

double number_of(const Json& j);
DType dtype_of_name(const std::string& name);
Shape shape_of(const Json& j);

// The arguments of a call; those that are left out have the defaults of PyTorch.
struct Call {
  const Json& args;
  const Tensors& tensors;
  const Device& device;

  bool has(std::size_t i) const { return i < args.size() && !args[i].is_null(); }
  bool is_tensor(std::size_t i) const {
    return has(i) && args[i].is_object() && args[i].contains("tensor");
  }
  const Tensor& of(const Json& j) const {
    if (!j.is_object() || !j.contains("tensor"))
      throw ContractError("the call has a number where ours takes a tensor: expected numbers");
    return tensors.at(j.at("tensor").get<std::size_t>());
  }
  const Tensor& t(std::size_t i) const { return of(args.at(i)); }
  Tensors list(std::size_t i) const {
    Tensors out;
    for (const Json& j : args.at(i)) out.push_back(of(j));
    return out;
  }
  double number(std::size_t i, double otherwise = 0) const {
    return has(i) ? number_of(args[i]) : otherwise;
  }
  std::int64_t whole(std::size_t i, std::int64_t otherwise = 0) const {
    return has(i) ? args[i].get<std::int64_t>() : otherwise;
  }
  int dim(std::size_t i, int otherwise = 0) const { return static_cast<int>(whole(i, otherwise)); }
  bool flag(std::size_t i) const { return has(i) && args[i].get<bool>(); }
  Shape shape(std::size_t i) const { return shape_of(args.at(i)); }
  raw::KeepDim keep(std::size_t i) const { return flag(i) ? raw::KeepDim::yes : raw::KeepDim::no; }
  Dims dims(std::size_t i) const {
    const auto d = has(i) ? args[i].get<std::vector<int>>() : std::vector<int>{};
    switch (d.size()) {
      case 0:
        return {};
      case 1:
        return d[0];
      case 2:
        return {d[0], d[1]};
      case 3:
        return {d[0], d[1], d[2]};
      default:
        return {d.at(0), d.at(1), d.at(2), d.at(3)};
    }
  }
  std::optional<double> maybe(std::size_t i) const {
    return has(i) ? std::optional(number(i)) : std::nullopt;
  }
};

using Ours = std::function<Tensors(const Call&)>;

// Of one result.
template <class F>
Ours one(F f) {
  return [f](const Call& c) { return Tensors{f(c)}; };
}

const std::map<std::string, Ours>& operations();  // of elements, dimensions, shapes and places
const std::map<std::string, Ours>& layers();      // layers, losses, casts, what makes tensors

}  // namespace op_samples
