// Launching a kernel on tensors: the device's table, the accesses, the meta short-cut. For the .cpp
// files of operations.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>

#include "kernels/kernel_table.hpp"
#include "runtime/tensor/expect_operand.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::detail {

// The kernels of a device; of a host's side the CPU's.
inline const kernels::Kernels& table(const Device& device) {
  return kernels::kernels_of(device.is_meta() || device.is_host() ? nullptr
                                                                  : device.context().driver());
}

// `passes`: how often the operation goes over the whole tensor, for its cost.
struct Use {
  const Tensor* tensor;
  AccessMode mode;
  double passes = 1;
};
inline Use reads(const Tensor& t) { return {&t, AccessMode::read}; }
inline Use writes(const Tensor& t) { return {&t, AccessMode::write}; }
// Read and written, or, unless `if_also_read`, only written.
inline Use updates(const Tensor& t, bool if_also_read = true) {
  return {&t, AccessMode::write, if_also_read ? 2. : 1.};
}
// `of`: the tensor whose elements say how many of t's are read, or read and written.
inline Use reads_some(const Tensor& t, const Tensor& of) {
  return {
      &t, AccessMode::read,
      static_cast<double>(of.numel()) / static_cast<double>(std::max<std::int64_t>(t.numel(), 1))};
}
inline Use updates_some(const Tensor& t, const Tensor& of) {
  return {&t, AccessMode::write, 2 * reads_some(t, of).passes};
}

// Launches `body` on the compute stream, declaring `uses` (undefined tensors are skipped). Nothing
// on meta. The cost in bytes is what the uses pass over.
template <class F>
void launch_body(const char* name, const Device& device, const F& body,
                 std::initializer_list<Use> uses, double flops = 0, const Products& products = {},
                 int kernels = 1) {
  if (device.is_meta()) return;
  std::array<Access, 12> accesses;
  std::size_t count = 0;
  Cost cost{.flops = flops, .products = products, .kernels = kernels};
  for (const Use& use : uses) {
    if (!use.tensor->defined() || use.tensor->numel() == 0) continue;
    TESSERA_EXPECT(use.tensor->device() == device, name,
                   ": operands lie on different devices; move them to one");
    accesses[count] = use.tensor->access(use.mode);
    Storage& storage = *use.tensor->storage();
    (use.mode == AccessMode::read ? storage.last_op : storage.last_writer) = name;
    cost.bytes += use.passes * static_cast<double>(use.tensor->numel()) *
                  static_cast<double>(size_bytes(use.tensor->dtype()));
    ++count;
  }
  const Op op{.name = name, .cost = cost, .accesses = {accesses.data(), count}};
  if (!device.context().holds() || device.compute_id() != StreamId::compute)
    return device.compute().launch(op, body);
  std::array<std::shared_ptr<const void>, 12> storages;
  count = 0;
  for (const Use& use : uses)
    if (use.tensor->defined() && use.tensor->numel() > 0) storages[count++] = use.tensor->storage();
  device.context().hold(op, Body(body), {storages.data(), count});
}
// The same with the body `kernel(args)`.
template <kernels::KernelArgs Args>
void launch(const char* name, const Device& device, kernels::Kernel<Args> kernel, const Args& args,
            std::initializer_list<Use> uses, double flops = 0, const Products& products = {}) {
  for (const Use& use : uses)
    if (use.tensor->defined())
      expect_operand(name, *use.tensor,
                     kernels::kTakesStored<Args> ||
                         (std::is_same_v<Args, kernels::IndexArgs> && use.tensor->dtype() == u8));
  launch_body(name, device, kernels::Call<Args>{kernel, args}, uses, flops, products,
              launches_of(args));
}

// values *= factor, f32, contiguous and []: none is touched where the factor is 1.
inline void multiply(const char* name, const Tensor& values, const Tensor& factor) {
  launch(name, values.device(), table(values.device()).scale_flat,
         kernels::ScaleFlatArgs{reinterpret_cast<float*>(values.data()),
                                reinterpret_cast<const float*>(factor.data()), values.numel()},
         {reads(factor), updates(values)});
}

// The common device of operands.  Throws: ContractError when they differ.
inline const Device& common_device(const char* name, const Tensor& a, const Tensor& b) {
  TESSERA_EXPECT(a.device() == b.device(), name,
                 ": operands lie on different devices; move them to one");
  return a.device();
}

}  // namespace tessera::detail
