// A step of training that a GPU repeats without the host program, as a CUDA graph of all its work.
//
//   ts::CapturedStep step(device, [&](const std::vector<ts::Tensor>& batch) {
//     const ts::Tensor loss = model.loss(batch[0], batch[1]);
//     loss.backward();
//     optimizer.step();
//     optimizer.zero_grad();
//     return std::vector{loss.detach()};
//   });
//   for (...) {
//     optimizer.set_lr(...);
//     const ts::Tensor& loss = step({tokens, targets})[0];
//   }
//
// The first calls run the function. Once two calls in a row have submitted the same operations at
// the same addresses, the next call captures what the function submits (PyTorch: torch.cuda.graph).
// From then on a call launches the graph and does not call the function.
//
//   goes on     optimizers' counts and the rate of set_lr, called before the step; draws of
//               nn::Dropout; weights, moments, gradients and buffers, whoever writes them
//   is noticed  the next call calls the function, and replays go on once it does the same twice:
//               memory of the step that changed hands (an evaluation, a new plan, a reset, a
//               tensor that was freed), a gradient or a clipping that waits or no longer does, what
//               is trained, rates of some parameters, how units reduce, modes of modules; a failure
//               of the world, which drops the graph
//   stays       all else that the function does on the host: its counters and branches, a rate that
//               it sets itself, numbers that it gives to operations, hooks registered since;
//               `forget` says that they are others
//
// Bits are those of a program without it. A device that keeps no work, such as the CPU, calls the
// function each time.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

class CapturedStep {
 public:
  using Function = std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>;

  // Objects that the function refers to, such as model and optimizer, outlive this object's last
  // call.
  CapturedStep(const Device& device, Function function);
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  // Makes one step from copies of `inputs`. What the function returns is copied into tensors of its
  // own, the same in every call, so read them before the next one. The host may be two replays
  // ahead. Work that was submitted before an exception runs, captured or not.
  //   Throws: what the function throws; ContractError
  //   - for inputs of another number, shape, dtype or device than those of the first call;
  //   - inside of another captured step's function;
  //   - for a step that four times in a row read a value on the host, ran on the host (offload), or
  //     ran on ranks that are threads;
  //   - for step_if (a GradScaler);
  //   - during the capture, where the host waits, or draws by a random key of its own.
  // CommError where the world fails while the call captures or replays, as in any call.
  const std::vector<Tensor>& operator()(const std::vector<Tensor>& inputs);

  // Calls so far that launched a graph; and why the last call did not, empty if it did.
  std::int64_t replays() const noexcept;
  const std::string& why_not() const noexcept;
  // Has the next call begin anew. It is for a function that from here on does otherwise on the
  // host.
  void forget();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
