// What operations say of operands that they can't take.
#pragma once

#include "tessera/base/dtype.hpp"
#include "tessera/base/error.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::detail {

// Throws: ContractError for a dtype that values are only stored in.
inline void expect_computed(const char* name, DType dtype) {
  TESSERA_EXPECT(!is_storage_only(dtype), name, ": the tensor is ", dtype,
                 ", which only stores values; cast it to f32 or bf16 first");
}

// Throws: ContractError for codes without their scales.
inline void expect_values(const char* name, const Tensor& x) {
  TESSERA_EXPECT(!x.storage()->are_codes, name, ": '", x.storage()->last_writer,
                 "' has rounded the tensor to 8 bits for linear_fp8, and nothing else knows its "
                 "scales; leave the recipe out where another operation reads the tensor");
}

inline void expect_operand(const char* name, const Tensor& x, bool may_be_stored) {
  expect_values(name, x);
  if (!may_be_stored) expect_computed(name, x.dtype());
}

// What a product adds to its rows of n values, or nothing.
inline void expect_bias(const char* name, const Tensor& bias, std::int64_t n, DType dtype) {
  TESSERA_EXPECT(
      !bias.defined() || (bias.ndim() == 1 && bias.size(0) == n && bias.dtype() == dtype), name,
      ": bias is ", bias.shape(), " of ", bias.dtype(), ", expected [", n, "] of ", dtype);
}

}  // namespace tessera::detail
