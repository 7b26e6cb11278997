// Matrices that are stored in 8 bits, a scale a row, and products of them: for frozen bases, as
// QLoRA's (Dettmers and others, "QLoRA: efficient finetuning of quantized LLMs", 2023).
//
//   value[i, j] = codes[i, j] scales[i]        codes in e4m3, scales in f32, powers of two
//
// Layers have such weights by nn::store_in_8_bits of nn/fp8.hpp.
#pragma once

#include "tessera/tensor/tensor.hpp"

namespace tessera {

struct RowsIn8Bits {
  Tensor codes;   // e4m3 [n, ...]
  Tensor scales;  // f32 [n, 1, ...]
};

// The nearest codes of x [n, ...], of any floating dtype of at most 32 bits and of two dimensions
// and more. Of a row with the largest |x| in (224 s, 448 s] a value is off by at most
// max(2^-4 |x|, 2^-10 s). s is 2^-126 or more, also for rows of smaller values. What has come from
// codes by decode_rows becomes the same values again. A row with an infinity becomes NaN.
RowsIn8Bits encode_rows(const Tensor& x);
// The values in `dtype`, floating, of at most 32 bits: exact but where f16 has no such number.
Tensor decode_rows(const Tensor& codes, const Tensor& scales, DType dtype);

// x W^T + bias with W = decode_rows(codes, scales): [..., out]. W is made for the product alone, in
// the dtype of x, and once more in backward, which gives derivatives of x and of bias; codes and
// scales have none.
//   x [..., in] of f32, bf16 or f16, codes [out, in], scales [out, 1], bias [out] or undefined.
// Throws: ContractError for other shapes and dtypes.
Tensor linear_in_8_bits(const Tensor& x, const Tensor& codes, const Tensor& scales,
                        const Tensor& bias, Caller at = Caller::current());

}  // namespace tessera
