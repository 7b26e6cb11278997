// One sample of PyTorch's database of operations, as tests/parity/op_samples.py writes it: called
// here on contiguous tensors and on strided ones, forward and backward, and compared.
#pragma once

#include <string>

#include "tessera/device/device.hpp"

namespace op_samples {

enum class Verdict {
  agreed,
  refused,   // by design: nothing is promoted, and a few limits; `why` is our message
  differed,  // values, shapes, dtypes or gradients; refused without such a reason; or not refused
};
struct Outcome {
  std::string theirs;
  Verdict verdict = Verdict::agreed;
  std::string why;
};

// `line`: one line of JSON.
Outcome call(const std::string& line, const tessera::Device& device);

}  // namespace op_samples
