// An operation of one's own, from outside the library. Dispatch on dtypes, layouts, shapes without
// values, accesses and errors are done here. What is left to write is its arithmetic:
//
//   Tensor soft_plus(const Tensor& x, std::source_location line = std::source_location::current())
//   {
//     const CustomOp op("soft_plus", line);
//     const Tensor y = op.map([](auto v) { return std::log1p(std::exp(v)); }, x);
//     return op.record({x}, y, [op, x = Saved(x)](const Tensor& g, Gradients& out) {
//       out.set(0, op.map([](auto v, auto d) { return d / (1 + std::exp(-v)); }, x.get(), g));
//     });
//   }
//
// The lesson tests/tour/050_your_own_op.cpp checks it. An operation with several results, or of
// several dtypes, says what each pointer of its body is:
//
//   const auto both = op.run(rows, body, CustomOp::Out<T>{{rows, n}}, CustomOp::Out<float>{{rows}},
//                            CustomOp::In<T>{x}, CustomOp::In<std::int32_t>{ids});
//   return op.record({x}, both, [](std::span<const Tensor> g, Gradients& out) { ... });
//
// The selective scan of tests/autograd/selective_scan.hpp does so. Bodies here run on the CPU. A
// body for a GPU is a kernel, launched by Stream::launch.
#pragma once

#include <array>
#include <functional>
#include <source_location>
#include <span>
#include <tuple>
#include <utility>

#include "tessera/autograd/node.hpp"
#include "tessera/device/workers.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

class CustomOp {
 public:
  // `name` is a literal, because traces and errors use it as long as the device lives. Errors name
  // `caller`; a function passes its own caller on, as above.
  explicit CustomOp(const char* name,
                    const std::source_location& caller = std::source_location::current()) noexcept
      : name_(name), caller_(caller) {}

  // Applies f to the inputs' elements; inputs broadcast. f takes one number for each input and
  // returns one. Numbers are float for 16-bit and f32 tensors, double for f64.
  // Requires, as run: inputs of one floating dtype on one CPU or meta; f is trivially copyable and
  // captures at most 48 bytes.  Throws: ContractError with the caller's line.
  template <class F, std::convertible_to<Tensor>... X>
  Tensor map(F f, const X&... inputs) const {
    std::array<Tensor, sizeof...(X)> in{Tensor(inputs)...};
    expand_all(in);
    const std::int64_t n = in[0].numel(), kGrain = 4096;  // cut by size alone: the same bits for
    return run_on(
        in[0].shape(), (n + kGrain - 1) / kGrain,  // any number of threads
        [f, n]<class T>(std::int64_t task, T* out, const auto*... from) {
          using Number = std::conditional_t<std::is_same_v<T, double>, double, float>;
          const std::int64_t end = std::min(n, (task + 1) * kGrain);
          for (std::int64_t i = task * kGrain; i < end; ++i)
            out[i] = T(static_cast<Number>(f(static_cast<Number>(from[i])...)));
        },
        in);
  }

  // A new tensor of `shape`, written by f(task, out, inputs...) for each task in [0, tasks). Tasks
  // run in any order and on several threads, so each writes elements of its own. out is T*, and
  // each input is const T*: its first element, in row-major order. T is float, double, BFloat16 or
  // Float16.
  template <class F, std::convertible_to<Tensor>... X>
  Tensor run(const Shape& shape, std::int64_t tasks, F f, const X&... inputs) const {
    return run_on(shape, tasks, f, std::array<Tensor, sizeof...(X)>{Tensor(inputs)...});
  }

  // Operands of a body of several dtypes. In is a tensor of T: the body gets a const T* to its
  // first element, null for an undefined one. Out is a new tensor of T: the body gets a T*.
  template <class T>
  struct In;
  template <class T>
  struct Out;
  // The tensors of all Out, in their order, written by f(task, pointers...). It gets a pointer for
  // each operand, of which there may be any number. Otherwise as above.
  // Requires: at least one In; inputs on one CPU or meta, each of the dtype of its T.
  template <class F, class... Operands>
  auto run(std::int64_t tasks, F f, const Operands&... operands) const {
    std::array<Operand, sizeof...(Operands)> all{operands.operand()...};
    prepare(all);
    std::array<Tensor, (std::size_t{Operands::kIsOut} + ...)> made;
    std::size_t count = 0;
    for (const Operand& each : all)
      if (each.is_out) made[count++] = each.tensor;
    if (made[0].device().is_meta() || tasks <= 0) return made;
    const auto call = [f, tasks](Exec& exec, std::byte* const* at) {
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        parallel_for(exec, tasks, [&](std::int64_t task) {
          f(task, reinterpret_cast<typename Operands::Pointer>(at[I])...);
        });
      }(std::index_sequence_for<Operands...>());
    };
    std::array<std::byte*, sizeof...(Operands)> at;
    for (std::size_t i = 0; i < at.size(); ++i)
      at[i] = all[i].tensor.defined() ? all[i].tensor.data() : nullptr;
    if constexpr (sizeof(call) + sizeof(at) <= kBodyBytes) {
      launch(all, {}, Body([call, at](Exec& exec) { call(exec, at.data()); }));
    } else {  // beside the body
      const Tensor table = table_of(at, made[0].device());
      const auto* const from = reinterpret_cast<std::byte* const*>(table.data());
      launch(all, table, Body([call, from](Exec& exec) { call(exec, from); }));
    }
    return made;
  }

  // Gives `out` its history, as autograd::record does. In backward a gradient has to have its
  // input's shape, also where another one would broadcast to it.
  Tensor record(std::initializer_list<Tensor> inputs, Tensor out,
                autograd::Backward backward) const;
  // Gives several results their history. `backward` gets the gradient of each: zeros for a result
  // that nobody has used. A result that is not floating has no history, and an undefined gradient.
  using BackwardOfAll =
      std::function<void(std::span<const Tensor> gradients, autograd::Gradients&)>;
  template <std::size_t N>
  std::array<Tensor, N> record(std::initializer_list<Tensor> inputs, std::array<Tensor, N> out,
                               BackwardOfAll backward) const {
    record_all({inputs.begin(), inputs.size()}, out, std::move(backward));
    return out;
  }

  // Throws ContractError "name: parts (file:line)", with the caller's line, unless `condition`
  // holds.
  template <class... Parts>
  void expect(bool condition, const Parts&... parts) const {
    if (!condition) [[unlikely]]
      fail(concat(parts...));
  }

 private:
  static constexpr std::size_t kMostInputs = 6;
  struct Operand {
    Tensor tensor;
    Shape shape;  // of a new tensor
    DType dtype;
    bool is_out;
  };

  template <class F, std::size_t N>
  Tensor run_on(const Shape& shape, std::int64_t tasks, const F& f,
                const std::array<Tensor, N>& given) const {
    static_assert(N >= 1 && N <= kMostInputs, "an operation has 1 to 6 inputs");
    std::array<Tensor, N> in = given;
    Tensor out = prepare(shape, in);
    if (out.numel() == 0 || out.device().is_meta()) return out;
    visit(out.dtype(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (is_floating(dtype_of<T>()) && !is_storage_only(dtype_of<T>())) {
        std::array<const T*, N> from;
        for (std::size_t i = 0; i < N; ++i) from[i] = reinterpret_cast<const T*>(in[i].data());
        launch(out, in, Body([f, tasks, from, to = reinterpret_cast<T*>(out.data())](Exec& exec) {
                 parallel_for(exec, tasks, [&](std::int64_t task) {
                   std::apply([&](auto*... x) { f(task, to, x...); }, from);
                 });
               }));
      }
    });
    return out;
  }

  // Checks the inputs and makes them contiguous; allocates the result.
  Tensor prepare(const Shape& shape, std::span<Tensor> inputs) const;
  // Checks that the inputs broadcast, and expands each to the common shape.
  void expand_all(std::span<Tensor> inputs) const;
  void launch(const Tensor& out, std::span<const Tensor> inputs, const Body& body) const;
  // The same for operands: prepare checks the inputs and allocates the others; launch takes the
  // table of their addresses, undefined for none.
  void prepare(std::span<Operand> operands) const;
  void launch(std::span<const Operand> operands, const Tensor& table, const Body& body) const;
  static Tensor table_of(std::span<std::byte* const> addresses, const Device& device);
  void record_all(std::span<const Tensor> inputs, std::span<Tensor> out,
                  BackwardOfAll backward) const;
  [[noreturn]] void fail(const std::string& what) const;

  const char* name_;
  std::source_location caller_;
};

template <class T>
struct CustomOp::In {
  static constexpr bool kIsOut = false;
  using Pointer = const T*;
  Tensor tensor;
  Operand operand() const { return {tensor, {}, dtype_of<T>(), false}; }
};
template <class T>
struct CustomOp::Out {
  static constexpr bool kIsOut = true;
  using Pointer = T*;
  Shape shape;
  Operand operand() const { return {{}, shape, dtype_of<T>(), true}; }
};

}  // namespace tessera
