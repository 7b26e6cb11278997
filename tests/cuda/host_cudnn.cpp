// A libcudnn.so.9 for tests: as much of the backend API as kernels/cuda/cudnn*.cpp call, over a
// host that computes a graph operation by operation, in double precision, rounding each tensor to
// its type. It proposes one engine, which wants as much workspace as the test says.
#include <cudnn_graph.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "tessera/base/dtype.hpp"

#define SHOWN extern "C" [[gnu::visibility("default")]]

using Enqueue = void (*)(void* stream, std::function<void()> work);

namespace {

using namespace tessera;

struct Descriptor {
  cudnnBackendDescriptorType_t type;
  std::map<int, std::vector<std::byte>> attributes;

  template <class T>
  std::vector<T> all(int name) const {
    const std::vector<std::byte>& bytes = attributes.at(name);
    std::vector<T> out(bytes.size() / sizeof(T));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  template <class T>
  T one(int name) const {
    T out;
    std::memcpy(&out, attributes.at(name).data(), sizeof out);
    return out;
  }
  const Descriptor& at(int name) const {
    return *reinterpret_cast<Descriptor*>(one<std::uintptr_t>(name));
  }
  bool has(int name) const { return attributes.contains(name); }
};

std::deque<Descriptor> g_descriptors;  // none goes away: a plan refers to what its caller has ended
Enqueue g_enqueue = nullptr;
std::int64_t g_workspace_bytes = 0;
int g_executions = 0;
void* g_stream = nullptr;

std::size_t bytes_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    case CUDNN_TYPE_DATA_TYPE:
    case CUDNN_TYPE_POINTWISE_MODE:
    case CUDNN_TYPE_REDUCTION_OPERATOR_TYPE:
    case CUDNN_TYPE_HEUR_MODE:
      return 4;
    default:
      return 8;
  }
}

DType dtype_of(const Descriptor& tensor) {
  switch (tensor.one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE)) {
    case CUDNN_DATA_BFLOAT16:
      return bf16;
    case CUDNN_DATA_HALF:
      return f16;
    case CUDNN_DATA_FLOAT:
      return f32;
    default:
      return f64;  // indices and masks, which are exact
  }
}

using Index = std::vector<std::int64_t>;

// A tensor's elements, last dimension fastest.
struct Values {
  Index dims, strides;
  std::vector<double> data;

  explicit Values(const Descriptor& tensor)
      : dims(tensor.all<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS)),
        strides(tensor.all<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES)) {
    std::int64_t count = 1;
    for (const std::int64_t d : dims) count *= d;
    data.resize(static_cast<std::size_t>(count));
  }
  // Calls f(index, element).
  template <class F>
  void each(const F& f) {
    Index i(4);
    for (double& x : data) {
      f(i, x);
      for (std::size_t d = 3;; --d) {
        ++i[d];
        if (i[d] < dims[d] || d == 0) break;
        i[d] = 0;
      }
    }
  }
  std::int64_t offset(const Index& i) const {
    std::int64_t at = 0;
    for (std::size_t d = 0; d < 4; ++d) at += i[d] * strides[d];
    return at;
  }
};

// The elements of a tensor for the indices of a larger one: each serves several, as heads of keys
// do.
class Shared {
 public:
  Shared(Values& values, const Index& dims) : data_(values.data.data()) {
    std::int64_t step = 1;
    for (std::size_t d = 4; d-- > 0; step *= values.dims[d])
      for (std::int64_t i = 0; i < dims[d]; ++i)
        offsets_[d].push_back(i * values.dims[d] / dims[d] * step);
  }
  double& at(const Index& i) const {
    std::int64_t sum = 0;
    for (std::size_t d = 0; d < 4; ++d) sum += offsets_[d][static_cast<std::size_t>(i[d])];
    return data_[sum];
  }

 private:
  double* data_;
  std::array<Index, 4> offsets_;
};

class Run {
 public:
  Run(const Descriptor& pack) {
    const auto numbers = pack.all<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const auto data = pack.all<std::uintptr_t>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    for (std::size_t i = 0; i < numbers.size(); ++i)
      bound_[numbers[i]] = reinterpret_cast<std::byte*>(data[i]);
  }
  // A number of the host's memory is read when the call is made.
  void keep_numbers(const std::vector<Descriptor*>& operations) {
    for (const Descriptor* op : operations)
      for (const auto& [name, bytes] : op->attributes)
        if (name == CUDNN_ATTR_OPERATION_POINTWISE_BDESC)
          if (const Descriptor& t = op->at(name); t.one<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE))
            values_.insert_or_assign(&t, loaded(t));
  }
  void run(const Descriptor& op) {
    switch (op.type) {
      case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
        return multiply(op);
      case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        return reduce(op);
      case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
        return reshape(op);
      default:
        return apply(op);
    }
  }

 private:
  std::byte* memory(const Descriptor& tensor) const {
    return bound_.at(tensor.one<std::int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID));
  }
  Values loaded(const Descriptor& tensor) const {
    Values out(tensor);
    visit(dtype_of(tensor), [&](auto tag) {
      using T = typename decltype(tag)::type;
      out.each([&](const Index& i, double& x) {
        T element;
        std::memcpy(&element, memory(tensor) + out.offset(i) * static_cast<std::int64_t>(sizeof(T)),
                    sizeof element);
        x = static_cast<double>(element);
      });
    });
    return out;
  }
  Values& value(const Descriptor& tensor) {
    const auto found = values_.find(&tensor);
    if (found != values_.end()) return found->second;
    return values_.emplace(&tensor, loaded(tensor)).first->second;
  }
  // Rounded to its type, and written where it lies in memory.
  void give(const Descriptor& tensor, Values out) {
    const bool inner = tensor.one<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    visit(dtype_of(tensor), [&](auto tag) {
      using T = typename decltype(tag)::type;
      out.each([&](const Index& i, double& x) {
        T element;
        if constexpr (std::is_class_v<T>)
          element = T(static_cast<float>(x));
        else
          element = static_cast<T>(x);
        x = static_cast<double>(element);
        if (!inner)
          std::memcpy(memory(tensor) + out.offset(i) * static_cast<std::int64_t>(sizeof(T)),
                      &element, sizeof element);
      });
    });
    values_.insert_or_assign(&tensor, std::move(out));
  }

  // What a product adds to: the memory of an f32 result, as atomics do; else nothing.
  Values begun(const Descriptor& result) const {
    const bool adds = !result.one<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL) && dtype_of(result) == f32;
    return adds ? loaded(result) : Values(result);
  }

  void multiply(const Descriptor& op) {
    Values &a = value(op.at(CUDNN_ATTR_OPERATION_MATMUL_ADESC)),
           &b = value(op.at(CUDNN_ATTR_OPERATION_MATMUL_BDESC));
    Values c = begun(op.at(CUDNN_ATTR_OPERATION_MATMUL_CDESC));
    const std::int64_t depth = a.dims[3];
    const Shared left(a, {c.dims[0], c.dims[1], c.dims[2], depth}),
        right(b, {c.dims[0], c.dims[1], depth, c.dims[3]});
    c.each([&](const Index& i, double& x) {
      Index row{i[0], i[1], i[2], 0}, column{i[0], i[1], 0, i[3]};
      for (std::int64_t k = 0; k < depth; ++k, ++row[3], ++column[2])
        x += left.at(row) * right.at(column);
    });
    give(op.at(CUDNN_ATTR_OPERATION_MATMUL_CDESC), std::move(c));
  }

  void reduce(const Descriptor& op) {
    const auto with = op.at(CUDNN_ATTR_OPERATION_REDUCTION_DESC)
                          .one<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR);
    const bool largest = with == CUDNN_REDUCE_TENSOR_MAX;
    Values& x = value(op.at(CUDNN_ATTR_OPERATION_REDUCTION_XDESC));
    Values y(op.at(CUDNN_ATTR_OPERATION_REDUCTION_YDESC));
    if (largest) std::ranges::fill(y.data, -INFINITY);
    const Shared into(y, x.dims);
    x.each([&](const Index& i, double& element) {
      double& to = into.at(i);
      to = largest ? std::max(to, element) : to + element;
    });
    give(op.at(CUDNN_ATTR_OPERATION_REDUCTION_YDESC), std::move(y));
  }

  void reshape(const Descriptor& op) {
    Values& x = value(op.at(CUDNN_ATTR_OPERATION_RESHAPE_XDESC));
    std::map<std::int64_t, double> memory;
    x.each([&](const Index& i, double& element) { memory[x.offset(i)] = element; });
    Values y(op.at(CUDNN_ATTR_OPERATION_RESHAPE_YDESC));
    y.each([&](const Index& i, double& element) { element = memory.at(y.offset(i)); });
    give(op.at(CUDNN_ATTR_OPERATION_RESHAPE_YDESC), std::move(y));
  }

  void apply(const Descriptor& op) {
    const Descriptor& kind = op.at(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const auto mode = kind.one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
    Values y(op.at(CUDNN_ATTR_OPERATION_POINTWISE_YDESC));
    const auto operand = [&](int name) {
      return op.has(name) ? std::optional<Shared>(std::in_place, value(op.at(name)), y.dims)
                          : std::nullopt;
    };
    if (mode == CUDNN_POINTWISE_GEN_INDEX) {
      const auto axis = static_cast<std::size_t>(kind.one<std::int64_t>(CUDNN_ATTR_POINTWISE_AXIS));
      y.each([&](const Index& i, double& x) { x = static_cast<double>(i[axis]); });
    } else {
      const auto a = operand(CUDNN_ATTR_OPERATION_POINTWISE_XDESC),
                 b = operand(CUDNN_ATTR_OPERATION_POINTWISE_BDESC),
                 where = operand(CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
      y.each([&](const Index& i, double& x) {
        x = computed(mode, a->at(i), b ? b->at(i) : 0, where ? where->at(i) : 0);
      });
    }
    give(op.at(CUDNN_ATTR_OPERATION_POINTWISE_YDESC), std::move(y));
  }

  static double computed(cudnnPointwiseMode_t mode, double a, double b, double where) {
    switch (mode) {
      case CUDNN_POINTWISE_ADD:
        return a + b;
      case CUDNN_POINTWISE_SUB:
        return a - b;
      case CUDNN_POINTWISE_MUL:
        return a * b;
      case CUDNN_POINTWISE_DIV:
        return a / b;
      case CUDNN_POINTWISE_EXP:
        return std::exp(a);
      case CUDNN_POINTWISE_IDENTITY:
        return a;
      case CUDNN_POINTWISE_LOG:
        return std::log(a);
      case CUDNN_POINTWISE_CMP_GE:
        return a >= b ? 1 : 0;
      case CUDNN_POINTWISE_BINARY_SELECT:
        return where != 0 ? a : b;
      default:
        return NAN;
    }
  }

  std::map<std::int64_t, std::byte*> bound_;
  std::map<const Descriptor*, Values> values_;
};

}  // namespace

SHOWN void host_cudnn(Enqueue enqueue, std::int64_t workspace_bytes) {
  g_enqueue = enqueue;
  g_workspace_bytes = workspace_bytes;
}
SHOWN int host_cudnn_executions() { return g_executions; }

SHOWN std::size_t cudnnGetVersion() { return 91900; }
SHOWN const char* cudnnGetErrorString(cudnnStatus_t) { return "refused"; }
SHOWN void cudnnGetLastErrorString(char* text, std::size_t size) {
  if (size > 0) *text = 0;
}
SHOWN cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = reinterpret_cast<cudnnHandle_t>(&g_stream);
  return CUDNN_STATUS_SUCCESS;
}
SHOWN cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t stream) {
  g_stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
SHOWN cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                 cudnnBackendDescriptor_t* out) {
  *out = &g_descriptors.emplace_back(type);
  return CUDNN_STATUS_SUCCESS;
}
SHOWN cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t) {
  return CUDNN_STATUS_SUCCESS;
}
SHOWN cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
SHOWN cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t to,
                                             cudnnBackendAttributeName_t name,
                                             cudnnBackendAttributeType_t type, std::int64_t count,
                                             const void* values) {
  std::vector<std::byte> bytes(bytes_of(type) * static_cast<std::size_t>(count));
  std::memcpy(bytes.data(), values, bytes.size());
  static_cast<Descriptor*>(to)->attributes[name] = std::move(bytes);
  return CUDNN_STATUS_SUCCESS;
}
SHOWN cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t from,
                                             cudnnBackendAttributeName_t name,
                                             cudnnBackendAttributeType_t, std::int64_t room,
                                             std::int64_t* count, void* values) {
  *count = 1;
  if (room > 0 && name == CUDNN_ATTR_ENGINEHEUR_RESULTS)
    (*static_cast<Descriptor**>(values))->attributes[name] =
        static_cast<Descriptor*>(from)->attributes[CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH];
  if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
    std::memcpy(values, &g_workspace_bytes, sizeof g_workspace_bytes);
  return CUDNN_STATUS_SUCCESS;
}
SHOWN cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t plan,
                                        cudnnBackendDescriptor_t pack) {
  const Descriptor& graph = static_cast<Descriptor*>(plan)
                                ->at(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)
                                .at(CUDNN_ATTR_ENGINEHEUR_RESULTS);
  std::vector<Descriptor*> operations;
  for (const std::uintptr_t op : graph.all<std::uintptr_t>(CUDNN_ATTR_OPERATIONGRAPH_OPS))
    operations.push_back(reinterpret_cast<Descriptor*>(op));
  Run run(*static_cast<Descriptor*>(pack));
  run.keep_numbers(operations);
  ++g_executions;
  g_enqueue(g_stream, [run, operations]() mutable {
    for (const Descriptor* op : operations) run.run(*op);
  });
  return CUDNN_STATUS_SUCCESS;
}
