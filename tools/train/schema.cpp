#include "tools/train/schema.hpp"

#include "tools/train/key_of.hpp"

namespace tessera::train {

const std::vector<Key>& schema() {
  static const std::vector<Key> rows = [] {
    std::vector<Key> all = flag_keys();
    for (const auto& keys : {training_keys(), running_keys()})
      all.insert(all.end(), keys.begin(), keys.end());
    return all;
  }();
  return rows;
}

}  // namespace tessera::train
