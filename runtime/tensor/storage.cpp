#include "tessera/tensor/storage.hpp"

#include "tessera/memory/memory.hpp"

namespace tessera {

std::shared_ptr<Storage> Storage::owned(const Device& device, std::int64_t bytes) {
  return owned(device, bytes, device.compute_id());
}
std::shared_ptr<Storage> Storage::owned(const Device& device, std::int64_t bytes, StreamId stream) {
  auto storage = std::make_shared<Storage>(Storage{.device = device, .bytes = bytes});
  if (bytes == 0 || device.is_meta()) return storage;
  storage->buffer = Memory::of(device).allocate(bytes, stream);
  storage->data = storage->buffer.data();
  storage->use = &storage->buffer.use();
  return storage;
}

std::shared_ptr<Storage> Storage::window(const Device& device, std::int64_t bytes,
                                         const std::string& unit) {
  return std::make_shared<Storage>(Storage{.device = device, .bytes = bytes, .unit = &unit});
}

std::shared_ptr<Storage> Storage::borrowed(const Device& device, std::byte* data,
                                           std::int64_t bytes, LastUse& use) {
  return std::make_shared<Storage>(
      Storage{.device = device, .data = data, .bytes = bytes, .use = &use});
}

}  // namespace tessera
