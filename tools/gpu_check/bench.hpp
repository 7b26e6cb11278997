// Measures kernels and products of a driver module; see bench.cpp for what is printed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "tessera/detail/device/machine.hpp"
#include "tests/kernels/target.hpp"
#include "tools/gpu_check/module.hpp"

namespace tessera::gpu_check {

class Bench {
 public:
  using Work = std::function<void(Exec&)>;

  // `scale` of the real shapes; kernels by name, all when there is none. Beside what is measured
  // stands what `machine` predicts, unless it is null.
  Bench(const kernel_test::Target& target, double scale, std::vector<std::string> names,
        const Machine* machine);

  const kernels::Kernels& k() const { return kernels::kernels_of(target_.driver); }
  // `rows` of the real shape, at least one here.
  std::int64_t scaled(std::int64_t rows) const;
  bool wanted(const std::string& name) const;
  // What runs only where somebody asks for it.
  bool named(const std::string& name) const;

  // Zeros, which are finite in every dtype. Lives until the end of the next measurement.
  //
  // Throws: DeviceError, OutOfMemory.
  template <class T = void>
  T* array(DType dtype, std::int64_t size) {
    return static_cast<T*>(zeros(size * static_cast<std::int64_t>(size_bytes(dtype))));
  }
  // Of normal ones: products of zeros take less power, and so less time, than those of training.
  void* random_array(DType dtype, std::int64_t size);
  // One value.
  template <class T>
  T* constant(const T& value) {
    void* const at = zeros(sizeof value);
    prepare([&](Exec& e) {
      expect(e.driver->copy(at, &value, sizeof value, e.native_stream), "copy");
    });
    return static_cast<T*>(at);
  }
  // Runs `work` to its end, which nobody measures.
  void prepare(const Work& work) { run(work, 1); }

  // The bandwidth that the others are held against: the first to be measured.
  void copy();
  // `work` queues one kernel, of which the contract reads and writes `bytes` once. A refusal is
  // printed in place of the result.
  void measure(const std::string& name, const std::string& shape, double bytes, const Work& work);
  struct Arithmetic {
    std::string name, shape;
    double flops;
    std::int64_t workspace_bytes;
    Work work;
    Products products;
  };
  // The same of what waits for arithmetic, over the same arrays; with what the module has to say,
  // as that a library refuses the shape.
  void measure_arithmetic(const std::vector<Arithmetic>& works);
  // Ours is the library's first guess; beside it the best of all that it offers.
  void product(const std::string& name, const kernels::GemmArgs& args);

 private:
  void* zeros(std::int64_t bytes);
  void release();
  double run(const Work& work, int calls);  // seconds of all
  double time(const Work& work);            // seconds of one call
  void print(const std::string& name, const std::string& shape, double bytes, double seconds);
  std::string predicted(const Cost& cost) const;  // a field of a line

  const kernel_test::Target& target_;
  double scale_;
  std::vector<std::string> names_;
  const Machine* machine_;
  std::vector<void*> arrays_;
  double copy_bytes_per_second_ = 1;
  std::string note_;  // the last that a kernel had for the log
};

// The wanted ones of all kernels that wait for memory.
void measure_kernels(Bench& bench);  // bench_kernels.cpp
void measure_rows(Bench& bench);     // of these, those by rows: bench_rows.cpp
void measure_float8(Bench& bench);   // and those that make 8-bit floats: bench_fp8.cpp
// Those that wait for arithmetic: bench_products.cpp.
void measure_products(Bench& bench);
void measure_attentions(Bench& bench);
void measure_fp8_products(Bench& bench);  // bench_fp8.cpp

}  // namespace tessera::gpu_check
