// Copies between a device's memory and the host's beside it; see Device::host.
#pragma once

#include "tessera/tensor/tensor.hpp"

namespace tessera {

namespace detail {
// Queues out = x on `transfer`, whose edges are the caller's: contiguous tensors of one shape and
// dtype, of which one lies on the device, the other on its host.
void launch_transfer(const char* name, const Tensor& out, const Tensor& x);
}  // namespace detail

namespace raw {
// What copy_into does where x lies beside out's device.
void transfer_into(const Tensor& out, const Tensor& x);
}  // namespace raw

}  // namespace tessera
