// Where the seeds of random tests come from: all of them from one number, so that a commit is
// tested the same each time. tools/suites.py reads it from tests/seed.txt and hands it on as
// SEED_BASE; tools/soak draws others.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <source_location>
#include <string>
#include <string_view>

namespace tessera::testing {

// Number `n` of a name's seeds. 32 bits: FNV-1a of the name, mixed as splitmix64 does
// (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
inline std::uint64_t derived_seed(std::string_view name, std::uint64_t n = 0) {
  const char* const base = std::getenv("SEED_BASE");
  std::uint64_t x = 14695981039346656037u;
  for (const char c : name) x = (x ^ static_cast<unsigned char>(c)) * 1099511628211u;
  x += (base ? std::strtoull(base, nullptr, 10) : 1) * 0xd1342543de82ef95u;
  x += (n + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (x ^ (x >> 31)) >> 32;
}

// Another one at each call, for a test to print: the next of the calling file, so that a test that
// is added elsewhere changes none. With SEED=N in the environment N, so that one failure can be had
// alone: SEED=N tools/test NAME.
inline std::uint64_t fresh_seed(
    const std::source_location& where = std::source_location::current()) {
  if (const char* const text = std::getenv("SEED")) return std::strtoull(text, nullptr, 10);
  static std::mutex mutex;
  static std::map<std::string, std::uint64_t, std::less<>> drawn;
  const std::string_view path = where.file_name();
  const std::string file(path.substr(path.rfind('/') + 1));
  const std::lock_guard lock(mutex);
  return derived_seed(file, drawn[file]++);
}

}  // namespace tessera::testing
