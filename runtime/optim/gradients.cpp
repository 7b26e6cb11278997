#include "runtime/optim/gradients.hpp"

#include <algorithm>

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

}  // namespace tessera::optim
