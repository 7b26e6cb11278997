#include "tessera/tensor/dlpack.hpp"

#include <array>
#include <type_traits>

#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

using dlpack::DLDataType;
using dlpack::DLManagedTensor;
using dlpack::DLManagedTensorVersioned;
using dlpack::DLTensor;
using dlpack::Owned;

constexpr std::int32_t kHostMemory = 1;
constexpr std::uint32_t kMajor = 1, kMinor = 0;
constexpr DType kDTypes[] = {f32, bf16, f16, f64, i32, i64, boolean, e4m3, e5m2, u8};

template <class Managed>
constexpr bool kVersioned = std::is_same_v<Managed, DLManagedTensorVersioned>;

constexpr DLDataType to_dl(DType dtype) {
  const int code = dtype == bf16        ? 4
                   : dtype == e4m3      ? 10  // of DLPack 1.1
                   : dtype == e5m2      ? 12
                   : is_floating(dtype) ? 2
                   : dtype == boolean   ? 6
                   : dtype == u8        ? 1
                                        : 0;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * size_bytes(dtype)), 1};
}

DType from_dl(const DLDataType& type) {
  for (const DType dtype : kDTypes) {
    const DLDataType ours = to_dl(dtype);
    if (ours.code == type.code && ours.bits == type.bits && type.lanes == 1) return dtype;
  }
  constexpr std::array<const char*, 7> kKinds{"int",    "uint",    "float", "handle",
                                              "bfloat", "complex", "bool"};
  const std::string kind = type.code < kKinds.size()
                               ? kKinds[type.code]
                               : concat("type code ", int{type.code}, " with bits: ");
  throw ContractError(
      concat("from_dlpack: there is no dtype ", kind, int{type.bits},
             type.lanes == 1 ? "" : concat(" of ", type.lanes, " lanes"),
             "; convert it to f32, bf16, f16, f64, e4m3, e5m2, i32, i64, u8 or bool"));
}

// What is lent, and the arrays that its struct points to.
template <class Managed>
struct Export {
  Tensor tensor;
  AccessMode mode;
  Shape shape, strides;
  Managed managed{};

  static void end(Managed* self) {
    const std::unique_ptr<Export> mine(static_cast<Export*>(self->manager_ctx));
    if (mine->mode == AccessMode::write && mine->tensor.numel() > 0) {
      const Access all = mine->tensor.access(AccessMode::read);
      mine->tensor.device().context().host_writes(
          all.begin, static_cast<std::size_t>(static_cast<const std::byte*>(all.end) -
                                              static_cast<const std::byte*>(all.begin)));
    }
  }
};

// Memory of somebody else, given back when this goes.
template <class Managed>
struct Loan {
  Owned<Managed> managed;
  DeviceContext& context;
  const std::byte* data;
  std::size_t bytes;
  bool is_read_only;
  LastUse use{};

  Loan(Owned<Managed> of, DeviceContext& on, const std::byte* begin, std::size_t size, bool only)
      : managed(std::move(of)), context(on), data(begin), bytes(size), is_read_only(only) {
    tell();
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() { tell(); }
  // Before and after it is here, the lender may write it.
  void tell() const {
    if (bytes > 0)
      is_read_only ? context.host_reads(data, bytes) : context.host_writes(data, bytes);
  }
};

Tensor whole_view(const Tensor& x) { return x.view(x.shape(), x.strides(), 0); }

// The same bytes and last use behind a storage that refuses writes.
Tensor read_only_view(const Tensor& x) {
  if (x.is_read_only()) return whole_view(x);
  const Storage& s = *x.storage();
  const std::shared_ptr<Storage> storage(new Storage{.device = s.device,
                                                     .data = s.data,
                                                     .bytes = s.bytes,
                                                     .use = s.use,
                                                     .is_lent = true,
                                                     .is_read_only = true},
                                         [x](Storage* gone) { delete gone; });
  return Tensor::wrap(storage, x.shape(), x.dtype(), x.data() - s.data)
      .view(x.shape(), x.strides(), 0);
}

struct Strided {
  Shape shape, strides;
  std::int64_t extent = 0;  // elements from the first to behind the last
};

Strided layout_of(const DLTensor& t) {
  TESSERA_EXPECT(t.ndim >= 0 && t.ndim <= kMaxDims, "from_dlpack: ", t.ndim,
                 " dimensions; a tensor has at most ", kMaxDims);
  TESSERA_EXPECT(t.ndim == 0 || t.shape, "from_dlpack: the shape is null");
  Strided out;
  out.shape = Shape(std::span(t.shape, static_cast<std::size_t>(t.ndim)));
  for (const std::int64_t size : out.shape)
    TESSERA_EXPECT(size >= 0, "from_dlpack: the shape ", out.shape, " has a negative size");
  out.strides = out.shape.strides();
  if (t.strides && t.ndim > 0)
    out.strides = Shape(std::span(t.strides, static_cast<std::size_t>(t.ndim)));
  if (out.shape.numel() == 0) return {out.shape, out.shape.strides(), 0};
  out.extent = 1;
  for (int d = 0; d < t.ndim; ++d) {
    if (out.shape[d] == 1) out.strides[d] = 0;  // never taken; may be anything
    TESSERA_EXPECT(out.strides[d] >= 0, "from_dlpack: the strides ", out.strides,
                   " go backwards; copy the array first");
    out.extent = checked_add(out.extent, checked_mul(out.shape[d] - 1, out.strides[d]));
  }
  return out;
}

}  // namespace

template <class Managed>
Owned<Managed> to_dlpack(const Tensor& x, AccessMode mode) {
  TESSERA_EXPECT(
      !x.requires_grad(),
      "to_dlpack: the tensor requires a gradient, which no other library records; detach it");
  TESSERA_EXPECT(
      kVersioned<Managed> || mode == AccessMode::write,
      "to_dlpack: DLManagedTensor cannot say that memory is read-only; lend it to write, "
      "or as DLManagedTensorVersioned");
  std::byte* const data = x.host_data(mode);
  auto lent = std::make_unique<Export<Managed>>(x, mode, x.shape(), x.strides());
  Managed& managed = lent->managed;
  managed.dl_tensor = {.data = data,
                       .device = {kHostMemory, 0},
                       .ndim = x.ndim(),
                       .dtype = to_dl(x.dtype()),
                       .shape = x.ndim() > 0 ? &lent->shape[0] : nullptr,
                       .strides = x.ndim() > 0 ? &lent->strides[0] : nullptr,
                       .byte_offset = 0};
  managed.manager_ctx = lent.get();
  managed.deleter = &Export<Managed>::end;
  if constexpr (kVersioned<Managed>) {
    managed.version = {kMajor, kMinor};
    managed.flags = mode == AccessMode::read ? dlpack::kReadOnly : 0;
  }
  return Owned<Managed>(&lent.release()->managed);
}

template <class Managed>
Tensor from_dlpack(Owned<Managed> managed, const Device& device) {
  TESSERA_EXPECT(managed != nullptr, "from_dlpack: the pointer is null");
  bool is_read_only = false;
  if constexpr (kVersioned<Managed>) {
    TESSERA_EXPECT(managed->version.major == kMajor, "from_dlpack: version ",
                   managed->version.major, ".", managed->version.minor,
                   " of DLPack; ask the lender for ", kMajor, ".", kMinor);
    is_read_only = managed->flags & dlpack::kReadOnly;
  }
  TESSERA_EXPECT(
      device.kind() == DeviceKind::cpu && device.runs_bodies(),
      "from_dlpack: the device is not a CPU that runs operations; import on such a CPU and copy");
  if (managed->deleter == &Export<Managed>::end) {
    const Tensor& own = static_cast<const Export<Managed>*>(managed->manager_ctx)->tensor;
    if (own.device() == device) return is_read_only ? read_only_view(own) : whole_view(own);
  }
  const DLTensor& t = managed->dl_tensor;
  TESSERA_EXPECT(t.device.device_type == kHostMemory, "from_dlpack: device type ",
                 t.device.device_type, ", not host memory; copy it to the CPU first");
  const DType dtype = from_dl(t.dtype);
  const Strided layout = layout_of(t);
  const auto width = static_cast<std::int64_t>(size_bytes(dtype));
  const std::int64_t bytes = checked_mul(layout.extent, width);
  TESSERA_EXPECT(bytes == 0 || t.data, "from_dlpack: the data of shape ", layout.shape, " is null");
  std::byte* const data = bytes == 0 ? nullptr : static_cast<std::byte*>(t.data) + t.byte_offset;
  TESSERA_EXPECT(reinterpret_cast<std::uintptr_t>(data) % size_bytes(dtype) == 0,
                 "from_dlpack: the address ", static_cast<const void*>(data),
                 " is no multiple of the ", width, " bytes of ", dtype, "; copy the array first");
  auto loan = std::make_shared<Loan<Managed>>(std::move(managed), device.context(), data,
                                              static_cast<std::size_t>(bytes), is_read_only);
  LastUse* const use = &loan->use;
  std::shared_ptr<void> held = std::move(loan);
  const std::shared_ptr<Storage> storage(
      new Storage{.device = device,
                  .data = data,
                  .bytes = bytes,
                  .use = use,
                  .is_lent = true,
                  .is_read_only = is_read_only},
      [held = std::move(held)](Storage* gone) mutable {
        const Device on = gone->device;  // perhaps its last handle: the loan ends before it
        delete gone;
        on.context().keep(std::move(held));
      });
  return Tensor::wrap(storage, {layout.extent}, dtype).view(layout.shape, layout.strides, 0);
}

template Owned<DLManagedTensor> to_dlpack(const Tensor&, AccessMode);
template Owned<DLManagedTensorVersioned> to_dlpack(const Tensor&, AccessMode);
template Tensor from_dlpack(Owned<DLManagedTensor>, const Device&);
template Tensor from_dlpack(Owned<DLManagedTensorVersioned>, const Device&);

}  // namespace tessera
