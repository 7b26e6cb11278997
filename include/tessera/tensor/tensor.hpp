// The one type that users see. It has a shape, a dtype, a device, a view of storage, and room for
// what autograd keeps.
//
// Work on tensors is queued on the device. Only calls by which the host reads or writes values
// block it: `item`, `to_vector`, `to_bytes`, `to_span`, `to_writable_span`, `host_data` and
// `to_string`.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/device/device.hpp"
#include "tessera/tensor/shape.hpp"
#include "tessera/tensor/storage.hpp"

namespace tessera {

// What autograd keeps of a tensor; see autograd/node.hpp. It is the operation that made the tensor,
// or the leaf where its gradient accumulates. A tensor that needs no gradient has neither. A node's
// inputs are edges, too.
namespace autograd {
struct Node;
class Leaf;
struct Edge {
  std::shared_ptr<Node> node{};
  std::shared_ptr<Leaf> leaf{};
  explicit operator bool() const noexcept { return node != nullptr || leaf != nullptr; }
};
}  // namespace autograd

// A handle; copies share the same tensor, gradient included. Values stay as the operation that made
// them left them. Only raw::fill, raw::axpby, raw::..._into and a host with to_writable_span change
// them. A parameter's values are changed by its edit only.
class Tensor {
 public:
  Tensor() = default;  // undefined

  // Uninitialised memory, for the device's compute stream. `shape` may have sizes of 0.
  //   Throws: OutOfMemory, as all functions that follow.
  static Tensor empty(const Shape& shape, DType dtype, const Device& device,
                      Caller at = Caller::current());
  static Tensor full(const Shape& shape, double value, DType dtype, const Device& device,
                     Caller at = Caller::current());
  static Tensor zeros(const Shape& shape, DType dtype, const Device& device,
                      Caller at = Caller::current());
  static Tensor ones(const Shape& shape, DType dtype, const Device& device,
                     Caller at = Caller::current());
  // 0, 1, ..., n - 1: [n].
  static Tensor arange(std::int64_t n, DType dtype, const Device& device,
                       Caller at = Caller::current());
  // Copies host values, row-major. On meta it takes their shape only.
  // Requires: values.size() == shape.numel(); T is the C++ type of a DType.
  template <class T>
  static Tensor from(std::span<const T> values, const Shape& shape, const Device& device,
                     Caller at = Caller::current()) {
    return from_bytes(std::as_bytes(values), shape, dtype_of<T>(), device, at);
  }
  template <class T, std::size_t N>
    requires(!std::is_const_v<T> || N != std::dynamic_extent)
  static Tensor from(std::span<T, N> values, const Shape& shape, const Device& device,
                     Caller at = Caller::current()) {
    return from(std::span<const std::remove_const_t<T>>(values), shape, device, at);
  }
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape, const Device& device,
                     Caller at = Caller::current()) {
    return from(std::span<const T>(values), shape, device, at);
  }
  // Numbers in braces become f32. For another dtype name it: std::vector<std::int64_t>{..}.
  static Tensor from(std::initializer_list<float> values, const Shape& shape, const Device& device,
                     Caller at = Caller::current()) {
    return from(std::span<const float>(values.begin(), values.size()), shape, device, at);
  }
  static Tensor from_bytes(std::span<const std::byte> bytes, const Shape& shape, DType dtype,
                           const Device& device, Caller at = Caller::current());
  // Random values by Philox, which depend on (key, index) only: normal with the given mean and
  // deviation, or uniform in [low, high). kernels/random.hpp has the formulas. Requires: a floating
  // dtype.
  static Tensor normal(const Shape& shape, double mean, double deviation, std::uint64_t key,
                       DType dtype, const Device& device, Caller at = Caller::current());
  static Tensor uniform(const Shape& shape, double low, double high, std::uint64_t key, DType dtype,
                        const Device& device, Caller at = Caller::current());

  bool defined() const noexcept { return impl_ != nullptr; }
  const Shape& shape() const { return impl().shape; }
  const Shape& strides() const { return impl().strides; }
  int ndim() const { return impl().shape.ndim(); }
  std::int64_t size(int dim) const { return shape()[normalize_dim(dim, ndim())]; }
  std::int64_t numel() const { return shape().numel(); }
  DType dtype() const { return impl().dtype; }
  const Device& device() const { return impl().storage->device; }
  bool is_contiguous() const;

  // The value of a tensor of one element. The host blocks. On a device that runs nothing
  // (`virtual`) it is the stand-in.
  // Throws: ContractError for any other number of elements, on meta, and without a stand-in.
  double item(std::optional<double> stand_in = std::nullopt, Caller at = Caller::current()) const;
  // All values, row-major. The host blocks. On a device that runs nothing (`virtual`) each is the
  // stand-in.
  //   Requires: T is the C++ type of dtype(), not bool.
  // Throws: ContractError on meta, and where nothing runs without a stand-in.
  template <class T>
  std::vector<T> to_vector(std::optional<double> stand_in = std::nullopt,
                           Caller at = Caller::current()) const {
    const CallSite site("to_vector", at);
    TESSERA_EXPECT(dtype() == dtype_of<T>(), "the tensor is ", dtype(), " and is read as ",
                   dtype_of<T>(), "; cast it first");
    std::vector<T> out(static_cast<std::size_t>(numel()), static_cast<T>(stand_in.value_or(0)));
    const auto bytes = std::as_writable_bytes(std::span<T>(out));
    stand_in ? copy_to_host(bytes) : to_bytes(bytes);
    return out;
  }
  // All values as raw bytes, row-major, for any dtype. Throws: likewise; ContractError for another
  // number of bytes.
  void to_bytes(std::span<std::byte> out, Caller at = Caller::current()) const;
  // The values where they lie, row-major, without a copy. The host blocks until the work submitted
  // on them is done. Valid while this tensor lives, until the next operation that writes it.
  // Requires: a contiguous tensor on a CPU that runs bodies; T is the C++ type of dtype().
  template <class T>
  std::span<const T> to_span(Caller at = Caller::current()) const& {
    const CallSite site("to_span", at);
    return span_of<const T>(AccessMode::read);
  }
  // The values where they lie, for the host to write, until the next operation that uses them.
  // Every view of these bytes sees what it writes. Throws: ContractError, too, for a parameter and
  // for memory lent read-only.
  template <class T>
  std::span<T> to_writable_span(Caller at = Caller::current()) const& {
    const CallSite site("to_writable_span", at);
    return span_of<T>(AccessMode::write);
  }
  template <class T>
  std::span<const T> to_span(Caller at = Caller::current()) && = delete;  // keep the tensor
  template <class T>
  std::span<T> to_writable_span(Caller at = Caller::current()) && = delete;
  // Blocks until the work submitted on these bytes is done, so that the host may read or write
  // them, in any layout. Returns the first element; null without elements. Throws: as `to_span`.
  std::byte* host_data(AccessMode mode) const;
  // Plans the memory that `to_bytes` would use, on a device that only plans.
  // Requires: the device runs no bodies.
  void plan_to_bytes() const;
  // The values as NumPy prints them, with long dimensions shortened. The host blocks.
  std::string to_string() const;

  // --- autograd (bodies in runtime/autograd) ---
  // Makes this a leaf, whose gradient `backward` accumulates. Returns *this.
  // Throws: ContractError for a dtype that is not floating, and for a tensor with history.
  Tensor& require_grad(Caller at = Caller::current());
  bool requires_grad() const;
  // The gradient of a leaf so far; undefined if there is none. It is the accumulator itself, to
  // which a later backward adds. `grad() * 1.0` is a copy that stays.
  Tensor grad() const;
  void zero_grad();
  // Runs the graph behind this tensor backwards, and frees it. `retain_graph` keeps it, for another
  // backward through a part of it. `gradient` has this shape; for a single element it defaults to
  // 1.
  //   Throws: ContractError without history, for a graph that has run already, and without a
  // gradient if there are several elements; what a backward function throws.
  void backward(const Tensor& gradient = {}, bool retain_graph = false,
                Caller at = Caller::current()) const;
  // The same values without history.
  Tensor detach() const;

  // --- for the library and for those who write operations ---
  // A view whose first element is `offset` elements behind this tensor's first.
  Tensor view(const Shape& shape, const Shape& strides, std::int64_t offset) const;
  static Tensor wrap(std::shared_ptr<Storage> storage, const Shape& shape, DType dtype,
                     std::int64_t offset_bytes = 0);
  // The first element; null on meta and for no bytes.
  // Throws: ContractError that names the unit if the tensor is a parameter and its unit is closed.
  std::byte* data() const;
  const std::shared_ptr<Storage>& storage() const { return impl().storage; }
  // The same bytes as the parameter of that name has them: operations may only read them.
  Tensor read_only(std::shared_ptr<const std::string> parameter) &&;
  bool is_read_only() const { return impl().parameter || impl().storage->is_read_only; }
  // The bytes that this view may touch, as an access of an operation. With `first` and `numel`:
  // those of so many elements of a contiguous tensor.
  // Throws: ContractError for a write to bytes that may only be read, and as `data`.
  Access access(AccessMode mode) const;
  Access access(AccessMode mode, std::int64_t first, std::int64_t numel) const;

  // How many handles share this tensor; a view is another tensor.
  long handles() const noexcept { return impl_.use_count(); }
  // Whether nobody but this handle sees these bytes, so that they may be overwritten in place.
  bool is_exclusive() const;

  // Requires: a defined tensor.
  autograd::Edge& history() const { return impl_->history; }

 private:
  struct Impl {
    std::shared_ptr<Storage> storage;
    std::int64_t offset_bytes = 0;
    Shape shape;
    Shape strides;
    DType dtype = DType::f32;
    autograd::Edge history{};
    std::shared_ptr<const std::string> parameter{};  // if set, its bytes may only be read
  };
  const Impl& impl() const {
    TESSERA_EXPECT(impl_ != nullptr, "an undefined tensor was used");
    return *impl_;
  }
  template <class T>
  std::span<T> span_of(AccessMode mode) const {
    constexpr DType kAsked = dtype_of<std::remove_const_t<T>>();
    TESSERA_EXPECT(dtype() == kAsked, "the tensor is ", dtype(), " and is read as ", kAsked,
                   "; cast it first");
    TESSERA_EXPECT(is_contiguous(), "the tensor of ", shape(), " has strides ", strides(),
                   "; make it contiguous first");
    return {reinterpret_cast<T*>(host_data(mode)), static_cast<std::size_t>(numel())};
  }
  // Submits the copy and blocks. A device that only plans does the same, and leaves `out` as it is.
  void copy_to_host(std::span<std::byte> out) const;

  std::shared_ptr<Impl> impl_;
};

std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

}  // namespace tessera
