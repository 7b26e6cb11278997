// A step of training that a GPU runs again without the host program: a CUDA graph of all its work.
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
// The first calls run the function. Once two in a row have submitted the same operations at the
// same addresses, the next call keeps what the function submits (PyTorch: torch.cuda.graph), and
// from then on a call launches that and the function is not called: what it does on the host stays
// as it was, but for the optimizers' counts and rates and the draws of nn::Dropout, which go on. A
// call calls the function again where since the last one memory of the step changed hands, as by an
// evaluation of the model, a new plan or a reset, or the program has decided anew what is trained,
// another rate of some parameters, how units reduce, or a mode of a module; replays go on once it
// does the same twice.
// Bits are those of a program without it. On a device that keeps no work, as the CPU, every call
// calls the function.
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

  // The function outlives its tensors' device no longer than this object.
  CapturedStep(const Device& device, Function function);
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  // One step from copies of `inputs`. What the function returns is copied into tensors of its own,
  // the same in every call: read them before the next one. The host may be two replays ahead.
  // Throws: ContractError for inputs of another number, shape, dtype or device than the first;
  // before it begins, for a step that has done four times what can't be captured: read a value on
  // the host, made a tensor of values of the host, ran on the host (offload) or on ranks that are
  // threads;
  // while it is captured, for step_if (a GradScaler) and random numbers of a key of the program's
  // own; what the function throws. What was being captured then has not run: reset the model.
  const std::vector<Tensor>& operator()(const std::vector<Tensor>& inputs);

  // Calls so far that launched a graph, and why the last one did not; empty where it did.
  std::int64_t replays() const noexcept;
  const std::string& why_not() const noexcept;
  // The next call begins anew: for what the function does otherwise from here on, on the host.
  void forget();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
