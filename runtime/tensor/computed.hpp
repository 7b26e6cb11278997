// What an operation says of a dtype that nothing computes in.
#pragma once

#include "tessera/base/dtype.hpp"
#include "tessera/base/error.hpp"

namespace tessera::detail {

// Throws: ContractError for a dtype that values are only stored in.
inline void expect_computed(const char* name, DType dtype) {
  TESSERA_EXPECT(!is_storage_only(dtype), name, ": the tensor is ", dtype,
                 ", in which values are stored and nothing is computed; cast it to f32 or bf16 "
                 "first");
}

}  // namespace tessera::detail
