// A product and GELU as separate kernels, for devices and shapes without a fused one; see
// GemmGeluArgs.
#pragma once

#include "kernels/elementwise.hpp"
#include "kernels/gemm.hpp"

namespace tessera::kernels {

// The product alone, to rows of C that lie `ldc` apart.
inline GemmArgs product_of(const GemmGeluArgs& args, void* c, std::int32_t ldc) {
  GemmArgs product{};
  product.c = c;
  product.a = args.a;
  product.b = args.b;
  product.bias = args.bias;
  product.alpha = 1;
  product.batch = 1;
  product.m = args.m;
  product.n = args.n;
  product.k = args.k;
  product.lda = args.lda;
  product.ldb = args.ldb;
  product.ldc = ldc;
  product.dtype = product.c_dtype = args.dtype;
  product.trans_a = args.trans_a;
  product.trans_b = args.trans_b;
  return product;
}

// The product, then the function or its derivative over it.
inline void gemm_then_gelu(const GemmGeluArgs& args, Exec& exec, Kernel<GemmArgs> gemm,
                           Kernel<UnaryArgs> unary, Kernel<BinaryArgs> binary) {
  gemm(args.backward ? product_of(args, args.c, args.ldc) : product_of(args, args.aux, args.ld_aux),
       exec);
  if (exec.error) return;
  const std::int64_t count = std::int64_t{args.m} * args.n;
  const std::uint8_t ndim = args.ldc == args.n && args.ld_aux == args.n ? 0 : 2;
  if (args.backward)
    binary({.out = args.c,
            .a = args.aux,
            .b = args.c,
            .count = count,
            .shape = {args.m, args.n},
            .out_strides = {args.ldc, 1},
            .a_strides = {args.ld_aux, 1},
            .b_strides = {args.ldc, 1},
            .op = BinaryOp::gelu_backward,
            .dtype = args.dtype,
            .ndim = ndim},
           exec);
  else
    unary({.out = args.c,
           .in = args.aux,
           .count = count,
           .shape = {args.m, args.n},
           .out_strides = {args.ldc, 1},
           .in_strides = {args.ld_aux, 1},
           .op = UnaryOp::gelu,
           .out_dtype = args.dtype,
           .in_dtype = args.dtype,
           .ndim = ndim},
          exec);
}

}  // namespace tessera::kernels
