#include "runtime/optim/gradients.hpp"

#include <algorithm>

#include "runtime/tensor/launch.hpp"

namespace tessera::optim {

std::vector<Communicator*> communicators_of(const std::vector<GroupPart>& parts,
                                            CommunicatorOf of) {
  std::vector<Communicator*> comms;
  for (const GroupPart& part : parts)
    if (Communicator* const comm = ((*part.group).*of).get();
        std::ranges::find(comms, comm) == comms.end())
      comms.push_back(comm);
  return comms;
}

void all_reduce(const char* name, const Tensor& value, Communicator* comm, ReduceOp op) {
  if (comm == nullptr || comm->size() == 1) return;
  const Device& device = value.device();
  const Stream compute = device.compute(), wire = device.stream(comm->stream());
  wire.wait(compute.record());
  const Access accesses[] = {value.access(AccessMode::write)};
  comm->submit(Collective{.send = value.data(),
                          .recv = value.data(),
                          .count = value.numel(),
                          .kind = CollectiveKind::all_reduce,
                          .dtype = value.dtype(),
                          .reduce = op},
               name, accesses);
  compute.wait(wire.record());
}

void multiply(const char* name, const Tensor& values, const Tensor& factor) {
  const kernels::ScaleFlatArgs args{reinterpret_cast<float*>(values.data()),
                                    reinterpret_cast<const float*>(factor.data()), values.numel()};
  detail::launch(name, values.device(), detail::table(values.device()).scale_flat, args,
                 {detail::reads(factor), detail::updates(values)});
}

}  // namespace tessera::optim
