// cuDNN's descriptors as RAII types, and a graph of operations built from them. Called by
// cudnn_attention.cpp. All here throws std::runtime_error; callers at the module's border catch.
//
// Source: NVIDIA cuDNN, "Backend API: backend descriptor types".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cudnn_library.hpp"

namespace tessera::kernels::cuda::cudnn {

class Descriptor {
 public:
  Descriptor(const Library& library, cudnnBackendDescriptorType_t type) : library_(&library) {
    library.check(library.make(type, &native_), "cuDNN makes no descriptor");
  }
  Descriptor(Descriptor&& other) noexcept
      : library_(other.library_), native_(std::exchange(other.native_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(library_, other.library_);
    std::swap(native_, other.native_);
    return *this;
  }
  ~Descriptor() {
    if (native_) library_->end(native_);
  }

  cudnnBackendDescriptor_t native() const noexcept { return native_; }

  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                  const T* values, std::size_t count = 1) {
    library_->check(library_->set(native_, name, type, static_cast<std::int64_t>(count),
                                  static_cast<const void*>(values)),
                    "cuDNN takes no attribute");
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t name, std::int64_t value) {
    return set(name, CUDNN_TYPE_INT64, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, bool value) {
    return set(name, CUDNN_TYPE_BOOLEAN, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnDataType_t value) {
    return set(name, CUDNN_TYPE_DATA_TYPE, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, &value.native_);
  }
  void finalize(const char* what) { library_->check(library_->finalize(native_), what); }

  std::int64_t integer(cudnnBackendAttributeName_t name) const {
    std::int64_t value = 0, count = 0;
    library_->check(library_->get(native_, name, CUDNN_TYPE_INT64, 1, &count, &value),
                    "cuDNN tells no attribute");
    return value;
  }

 private:
  const Library* library_;
  cudnnBackendDescriptor_t native_ = nullptr;
};

using Four = std::array<std::int64_t, 4>;

constexpr Four packed(const Four& dims) {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}
constexpr Four transposed(const Four& x) { return {x[0], x[1], x[3], x[2]}; }

// Operations over tensors of four dimensions. A tensor is known by its number: those in memory by
// what an execution binds, the others, which exist in registers only, by numbers of the graph's
// own.
class Graph {
 public:
  struct Value {
    std::size_t at;  // in tensors_
    Four dims;
  };

  explicit Graph(const Library& library) : library_(library) {}

  // In memory, aligned to 16 bytes, or f32 to its own size.
  Value bound(std::int64_t number, const Four& dims, const Four& strides, cudnnDataType_t type) {
    return tensor(number, dims, strides, type, false, false);
  }
  // One f32 of the host's memory.
  Value number(std::int64_t number) {
    return tensor(number, {1, 1, 1, 1}, {1, 1, 1, 1}, CUDNN_DATA_FLOAT, false, true);
  }
  Value inner(const Four& dims, const Four& strides, cudnnDataType_t type) {
    return tensor(next_++, dims, strides, type, true, false);
  }
  Value inner(const Four& dims, cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    return inner(dims, packed(dims), type);
  }

  // to = a b, summed in f32.
  void product(Value a, Value b, Value to) {
    Descriptor kind(library_, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    kind.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT).finalize("matmul");
    Descriptor op(library_, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, tensors_[a.at])
        .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, tensors_[b.at])
        .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, tensors_[to.at])
        .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, kind);
    keep(std::move(kind), std::move(op), "operation matmul");
  }
  // Elementwise, of one operand or of two; `b` may be repeated along a dimension.
  void pointwise(cudnnPointwiseMode_t mode, Value a, Value to) {
    apply(mode, a, nullptr, nullptr, to, CUDNN_DATA_FLOAT, -1);
  }
  void pointwise(cudnnPointwiseMode_t mode, Value a, Value b, Value to,
                 cudnnDataType_t computed_in = CUDNN_DATA_FLOAT) {
    apply(mode, a, &b, nullptr, to, computed_in, -1);
  }
  // to = where ? a : b
  void select(Value where, Value a, Value b, Value to) {
    apply(CUDNN_POINTWISE_BINARY_SELECT, a, &b, &where, to, CUDNN_DATA_FLOAT, -1);
  }
  // The index along dimension `axis` at each element of `like`.
  void index(Value like, std::int64_t axis, Value to) {
    apply(CUDNN_POINTWISE_GEN_INDEX, like, nullptr, nullptr, to, CUDNN_DATA_INT32, axis);
  }
  // Over the dimensions that are 1, or a divisor, in `to`.
  void reduce(cudnnReduceTensorOp_t with, Value a, Value to) {
    Descriptor kind(library_, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    kind.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &with)
        .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT)
        .finalize("reduction");
    Descriptor op(library_, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, tensors_[a.at])
        .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, tensors_[to.at])
        .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind);
    keep(std::move(kind), std::move(op), "operation reduction");
  }
  // The same elements by other dimensions and strides.
  void reshape(Value a, Value to) {
    Descriptor op(library_, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, tensors_[a.at])
        .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, tensors_[to.at]);
    op.finalize("operation reshape");
    operations_.push_back(std::move(op));
  }

  // For a handle's device; without a handle for whatever device is told to the heuristic.
  Descriptor finished(cudnnHandle_t handle) const {
    std::vector<cudnnBackendDescriptor_t> all;
    for (const Descriptor& op : operations_) all.push_back(op.native());
    Descriptor graph(library_, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    if (handle) graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &handle);
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, all.data(), all.size());
    graph.finalize("operation graph");
    return graph;
  }

 private:
  Value tensor(std::int64_t number, const Four& dims, const Four& strides, cudnnDataType_t type,
               bool inner, bool by_value) {
    Descriptor tensor(library_, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, type)
        .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims.data(), dims.size())
        .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), strides.size())
        .set(CUDNN_ATTR_TENSOR_UNIQUE_ID, number)
        .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT,
             std::int64_t{type == CUDNN_DATA_FLOAT && !inner ? 4 : 16})
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, inner)
        .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, by_value)
        .finalize("tensor");
    tensors_.push_back(std::move(tensor));
    return {tensors_.size() - 1, dims};
  }

  void apply(cudnnPointwiseMode_t mode, Value a, const Value* b, const Value* where, Value to,
             cudnnDataType_t computed_in, std::int64_t axis) {
    Descriptor kind(library_, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    kind.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, &mode)
        .set(CUDNN_ATTR_POINTWISE_MATH_PREC, computed_in);
    if (axis >= 0) kind.set(CUDNN_ATTR_POINTWISE_AXIS, axis);
    kind.finalize("pointwise");
    Descriptor op(library_, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, tensors_[a.at])
        .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, tensors_[to.at]);
    if (b) op.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, tensors_[b->at]);
    if (where) op.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, tensors_[where->at]);
    keep(std::move(kind), std::move(op), "operation pointwise");
  }

  void keep(Descriptor kind, Descriptor op, const char* what) {
    op.finalize(what);
    kinds_.push_back(std::move(kind));
    operations_.push_back(std::move(op));
  }

  const Library& library_;
  std::int64_t next_ = 1000;
  std::vector<Descriptor> tensors_, kinds_, operations_;
};

}  // namespace tessera::kernels::cuda::cudnn
