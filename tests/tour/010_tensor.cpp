// Lesson 10: tensors.
//
// A tensor is a shape, a dtype, a device, and a view of storage: where the first element lies and
// how far one step along each dimension goes. Several tensors may view the same bytes.
//
//   storage   0  1  2  3  4  5
//   x         [2, 3], strides [3, 1]     0 1 2      a step along dimension 0 skips 3 elements
//                                        3 4 5
//   x^T       [3, 2], strides [1, 3]     0 3        the same bytes, walked the other way
//                                        1 4
//                                        2 5
//
// Work on tensors is queued on the device and done while the program goes on; only a call that
// reads values blocks until it is done.
//
// PyTorch: views, strides, broadcasting and the device `meta` are the same, and a GPU's work is
// queued there, too. On the CPU, though, PyTorch ends each operation before the call returns.
#include <iostream>

#include "tessera/autograd/ops.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

static void a_tensor_is_a_view(const ts::Device& device) {
  const ts::Tensor x = reshape(ts::Tensor::arange(6, ts::f32, device), {2, 3});
  const ts::Tensor t = transpose(x, 0, 1);
  const ts::Tensor column = slice(x, 1, 1, 2);
  std::cout << "1. x, of strides " << x.strides() << ", its transpose, of strides " << t.strides()
            << ", and its middle column:\n"
            << x << '\n'
            << t << '\n'
            << column << '\n';
  CHECK(t.strides() == (ts::Shape{1, 3}) && !t.is_contiguous());
  CHECK(t.storage() == x.storage() && column.storage() == x.storage());  // nothing was copied
  CHECK(t.to_vector<float>() == (std::vector<float>{0, 3, 1, 4, 2, 5}));
  // A view where the layout allows it, else a copy: the rows of t do not lie one after the other.
  CHECK(reshape(x, {6}).storage() == x.storage());
  CHECK(reshape(t, {6}).storage() != x.storage());
}

static void shapes_broadcast(const ts::Device& device) {
  const ts::Tensor row = ts::Tensor::from({1, 2, 3}, {3}, device);
  const ts::Tensor column = ts::Tensor::from({10, 20}, {2, 1}, device);
  const ts::Tensor sum = row + column;  // sizes of 1 are repeated, by strides of 0
  std::cout << "2. " << row.shape() << " + " << column.shape() << " = " << sum.shape() << ":\n"
            << sum << '\n';
  CHECK(sum.shape() == (ts::Shape{2, 3}));
  CHECK(expand(row, {2, 3}).strides() == (ts::Shape{0, 1}));
}

// bf16 keeps the range of f32 and 8 bits of its digits. Sums of 16-bit numbers are made in f32 and
// rounded once, at the end.
static void dtypes_round(const ts::Device& device) {
  const ts::Tensor tenth = ts::Tensor::full({1000}, 0.1, ts::bf16, device);
  const double held = slice(cast(tenth, ts::f64), 0, 0, 1).item();
  const double total = sum(tenth).item();
  std::cout << "3. bf16 holds 0.1 as " << held << ", and a thousand of them sum to " << total
            << '\n';
  CHECK(held == 0.10009765625);
  CHECK(total == 100);  // 100.098 rounded once; added one by one in bf16 they would stop at 32
}

static void values_are_read_late(const ts::Device& device) {
  ts::Tensor x = ts::Tensor::normal({64, 64}, 0, 1, /*key=*/7, ts::f32, device);
  const auto given = [&] { return device.compute().clock()[ts::StreamId::compute]; };
  const ts::Tick before = given();  // a stream counts what it has been given: lesson 20
  for (int i = 0; i < 10; ++i) x = tanh(matmul(x, x));
  const ts::Tick queued = given() - before;
  const double largest = max(reshape(x, {-1}), 0).item();  // the program blocks here, not before
  std::cout << "4. " << queued << " operations were queued; then their largest value, " << largest
            << ", was waited for\n";
  CHECK(queued == 20);
  CHECK(largest > 0 && largest <= 1);
}

// On `meta` there are shapes and no memory: how large models are built before they are sharded.
static void meta_has_no_memory() {
  const ts::Tensor weight = ts::Tensor::empty({1 << 20, 1 << 20}, ts::f32, ts::Device::meta());
  std::cout << "5. " << weight << " would take " << weight.numel() * 4 / (1ll << 40) << " TiB\n";
  CHECK(matmul(weight, weight).shape() == weight.shape());
  CHECK(weight.data() == nullptr);
}

int main() {
  const ts::Device device = ts::Device::cpu();
  a_tensor_is_a_view(device);
  shapes_broadcast(device);
  dtypes_round(device);
  values_are_read_late(device);
  meta_has_no_memory();
}
