// The sizes of a launch on a GPU; see kernels/cuda/gpu.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels::cuda {

// Threads that run in step and can shuffle.
inline constexpr int kWarp = 32;
// Shared memory that every GPU gives a block without being asked.
inline constexpr std::size_t kSharedBytes = 48 * 1024;

// Blocks of a launch: x up to 2^31 - 1, y and z up to 65,535.
struct Grid {
  std::int64_t x = 1;
  std::int64_t y = 1, z = 1;
};

constexpr std::int64_t blocks_for(std::int64_t count, std::int64_t per_block) {
  return (count + per_block - 1) / per_block;
}

}  // namespace tessera::kernels::cuda
