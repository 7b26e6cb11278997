// The safetensors format: what is written is read back, and what is hostile is named and refused.
#include "tessera/checkpoint/safetensors.hpp"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::checkpoint;
using tessera::testing::has;
using tessera::testing::TemporaryFolder;

namespace {

std::string file_bytes(std::uint64_t header_length, const std::string& rest) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header_length >> (8 * i) & 0xffu);
  return bytes + rest;
}
std::string file_with(const std::string& json, std::size_t data_bytes) {
  return file_bytes(json.size(), json + std::string(data_bytes, '\1'));
}

// What the reader says about a file of these bytes.
std::string verdict(const TemporaryFolder& folder, const std::string& bytes) {
  const std::string path = folder.write("hostile.safetensors", bytes);
  try {
    const SafetensorsReader reader(path);
  } catch (const DataError& error) {
    CHECK(std::string(error.what()).find(path) != std::string::npos);
    return error.what();
  }
  return "accepted";
}

std::string fault_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const ContractError& error) {
    return std::string("contract: ") + error.what();
  } catch (const DeviceError& error) {
    return std::string("device: ") + error.what();
  } catch (const DataError& error) {
    return std::string("data: ") + error.what();
  }
  return "no error";
}
std::vector<std::byte> random_bytes(std::mt19937& random, std::int64_t count) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 0xffu);
  return bytes;
}

const std::string kGood = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                          R"("b":{"dtype":"I64","shape":[1,1],"data_offsets":[8,16]}})";

}  // namespace

TEST_CASE("what is written in chunks is read back") {
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const TemporaryFolder folder;
  const std::string path = folder / "model.safetensors";
  const DType dtypes[] = {f32, bf16, f16, f64, i32, i64, boolean};
  const std::map<std::string, std::string> metadata = {{"format", "pt"},
                                                       {"note\n\"é\"", "back\\slash\t\x01"}};

  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::vector<std::byte>> contents;
  for (int i = 0; i < 40; ++i) {
    SafetensorsEntry entry{.name = concat("layer.", i, i % 3 ? "" : ".\"ü\\"),
                           .dtype = dtypes[random() % 7]};
    std::int64_t count = static_cast<std::int64_t>(size_bytes(entry.dtype));
    for (unsigned d = random() % 4; d > 0; --d) {
      entry.shape.push_back(static_cast<std::int64_t>(random() % 6));
      count *= entry.shape.back();
    }
    contents[entry.name] = random_bytes(random, count);
    entries.push_back(entry);
  }

  SafetensorsWriter writer(path, entries, metadata);
  for (const SafetensorsEntry& entry : entries) {
    std::span<const std::byte> rest = contents[entry.name];
    while (!rest.empty()) {
      const std::size_t chunk = std::min<std::size_t>(rest.size(), 1 + random() % 100);
      writer.write(entry.name, rest.first(chunk));
      rest = rest.subspan(chunk);
    }
  }
  CHECK(folder.entries() == folder.entries_of_unfinished());
  CHECK_FALSE(std::filesystem::exists(path));  // nothing of that name before commit
  writer.commit();
  CHECK(folder.entries() == 1);

  const SafetensorsReader reader(path);
  CHECK(reader.metadata() == metadata);
  REQUIRE(reader.entries().size() == entries.size());
  for (const SafetensorsEntry& entry : entries) {
    const SafetensorsEntry* found = reader.find(entry.name);
    REQUIRE(found);
    CHECK(found->dtype == entry.dtype);
    CHECK(found->shape == entry.shape);
    const auto bytes = reader.bytes(*found);
    CHECK(std::equal(bytes.begin(), bytes.end(), contents[entry.name].begin(),
                     contents[entry.name].end()));
  }
  CHECK(reader.find("layer.40") == nullptr);
  CHECK(folder.read("model.safetensors").find('{') == 8);
  CHECK((folder.read("model.safetensors").find("}") != std::string::npos));
}

TEST_CASE("a file written by hand is read, whatever its spaces and its order") {
  const TemporaryFolder folder;
  const std::string json =
      "{ \"b\" : {\"data_offsets\":[ 4 , 8 ],\n\"shape\":[ ],\"dtype\":\"I32\"},"
      "\t\"\\u0061\\ud83d\\ude00\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}   ";
  const SafetensorsReader reader(folder.write("m", file_with(json, 8)));
  REQUIRE(reader.entries().size() == 2);
  CHECK(reader.entries()[0].name == "a\xf0\x9f\x98\x80");
  CHECK(reader.entries()[1].name == "b");
  CHECK(reader.entries()[1].shape.empty());
  CHECK(reader.bytes(reader.entries()[1]).size() == 4);
}

TEST_CASE("every hostile header is refused with its fault") {
  const TemporaryFolder folder;
  REQUIRE(verdict(folder, file_with(kGood, 16)) == "accepted");
  const auto tensor = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  std::string ones;
  for (int i = 0; i < 64; ++i) ones += ",1";
  const struct {
    const char* expected;
    std::string bytes;
  } cases[] = {
      {"has 0 bytes, too few for a header", ""},
      {"has 7 bytes, too few for a header", "1234567"},
      {"claims a header of 1000 bytes, but has 2", file_bytes(1000, "{}")},
      {"claims a header of 18446744073709551615 bytes", file_bytes(~std::uint64_t{0}, "{}")},
      {"claims a header of 100000001 bytes", file_bytes(100'000'001, "{}")},
      {"does not begin with '{'", file_bytes(0, "")},
      {"does not begin with '{'", file_with(" {}", 0)},
      {"does not begin with '{'", file_with("[]", 0)},
      {"goes on after its end", file_with("{}x", 0)},
      {"lacks '}'", file_with(kGood.substr(0, kGood.size() - 1), 16)},
      {"lacks '\"'", file_with("{,}", 0)},
      {"lacks '\"'", file_with("{\"a\":{\"dtype\":1,\"shape\":[],\"data_offsets\":[0,4]}}", 4)},
      {"lacks '{'", file_with("{\"a\":1}", 0)},
      {"lacks '{'", file_with("{\"a\":" + std::string(100000, '['), 0)},
      {"lacks ':'", file_with("{\"a\" {}}", 0)},
      {"names 'a' twice",
       file_with(tensor(R"("dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{)"
                        R"("dtype":"F32","shape":[0],"data_offsets":[0,0])"),
                 0)},
      {"names 'shape' twice",
       file_with(tensor(R"("shape":[1],"shape":[1],"dtype":"F32","data_offsets":[0,4])"), 4)},
      {"names 'x' twice", file_with(R"({"__metadata__":{"x":"1","x":"2"}})", 0)},
      {"lacks '\"'", file_with(R"({"__metadata__":{"x":1}})", 0)},
      {"is not UTF-8", file_with("{\"\xff\":{}}", 0)},
      {"is not UTF-8", file_with("{\"\xc0\xaf\":{}}", 0)},
      {"is not UTF-8", file_with("{\"\xed\xa0\x80\":{}}", 0)},
      {"has a control character", file_with("{\"a\nb\":{}}", 0)},
      {"has an unknown escape", file_with("{\"\\x41\":{}}", 0)},
      {"has half a surrogate pair", file_with("{\"\\ud800\":{}}", 0)},
      {"four hexadecimal digits", file_with("{\"\\u00g0\":{}}", 0)},
      {"has a string without an end", file_with("{\"a", 0)},
      {"tensor 'a' lacks dtype", file_with(tensor(R"("shape":[1],"data_offsets":[0,4])"), 4)},
      {"tensor 'a' lacks shape", file_with(tensor(R"("dtype":"F32","data_offsets":[0,4])"), 4)},
      {"tensor 'a' lacks data_offsets", file_with(tensor(R"("dtype":"F32","shape":[1])"), 4)},
      {"has the unknown key 'stride'", file_with(tensor(R"("stride":[1])"), 0)},
      {"has dtype 'F4'", file_with(tensor(R"("dtype":"F4","shape":[1],"data_offsets":[0,1])"), 1)},
      {"2 bytes, but its shape and dtype need 1",
       file_with(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,2])"), 2)},
      {"is no non-negative integer",
       file_with(tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4)},
      {"is no non-negative integer",
       file_with(tensor(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), 4)},
      {"is no non-negative integer",
       file_with(tensor(R"("dtype":"F32","shape":[1e0],"data_offsets":[0,4])"), 4)},
      {"is no non-negative integer",
       file_with(tensor(R"("dtype":"F32","shape":[01],"data_offsets":[0,4])"), 4)},
      {"is no non-negative integer",
       file_with(tensor(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])"), 4)},
      {"has a number beyond 64 bits",
       file_with(tensor(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4])"), 4)},
      {"has a shape whose product overflows",
       file_with(tensor(R"("dtype":"F32","shape":[4611686018427387904,4,0],"data_offsets":[0,0])"),
                 0)},
      {"has a shape or offsets of more than 64 numbers",
       file_with(tensor(R"("dtype":"F32","data_offsets":[0,4],"shape":[1)" + ones + "]"), 4)},
      {"has a shape whose product overflows",
       file_with(tensor(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])"),
                 0)},
      {"has 3 data_offsets",
       file_with(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])"), 4)},
      {"ends at 0, before it begins at 4",
       file_with(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), 4)},
      {"8 bytes, but its shape and dtype need 4",
       file_with(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"), 8)},
      {"tensor 'a' begins at 4, which leaves a hole after the header that ends at 0",
       file_with(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), 8)},
      {"tensor 'b' begins at 4, inside 'a' that ends at 8",
       file_with(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                 R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                 12)},
      {"tensor 'b' begins at 12, which leaves a hole after 'a' that ends at 8",
       file_with(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                 R"("b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})",
                 16)},
      {"has 15 bytes of data, its header describes 16; the file is cut off", file_with(kGood, 15)},
      {"has 17 bytes of data, its header describes 16; something follows", file_with(kGood, 17)},
  };
  for (const auto& hostile : cases) {
    const std::string found = verdict(folder, hostile.bytes);
    INFO(found);
    CHECK(has(found, hostile.expected));
    CHECK_FALSE(has(found, "\n"));
  }
}

TEST_CASE("no cut and no flipped byte is read out of bounds") {
  // Under the sanitizers a read past the file is caught; here every variant must be accepted or
  // refused as DataError.
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const TemporaryFolder folder;
  const std::string good = file_with(kGood, 16);
  for (std::size_t cut = 0; cut < good.size(); ++cut) {
    CHECK(verdict(folder, good.substr(0, cut)) != "accepted");
  }
  int refused = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    std::string bytes = good;
    for (unsigned flips = 1 + random() % 3; flips > 0; --flips) {
      bytes[random() % (good.size() - 16)] = static_cast<char>(random() & 0xffu);
    }
    refused += verdict(folder, bytes) != "accepted";
  }
  CHECK(refused > 1000);  // most bytes of the header carry structure
}

TEST_CASE("a missing file and a folder are named") {
  const TemporaryFolder folder;
  CHECK(has(fault_of([&] { SafetensorsReader reader(folder / "none"); }), "does not exist"));
  CHECK(has(fault_of([&] { SafetensorsReader reader(folder.path().string()); }), "is a folder"));
}

TEST_CASE("files beyond those that stay open are read as well, unless they change") {
  const TemporaryFolder folder;
  const auto make = [&](const std::string& name, int first) {
    SafetensorsWriter writer(folder / name, {{.name = "a", .dtype = i32, .shape = {2}}});
    const int values[] = {first, first + 1};
    writer.write("a", std::as_bytes(std::span(values)));
    writer.commit();
  };
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = open_files();
  std::vector<std::unique_ptr<SafetensorsReader>> readers;
  for (int i = 0; i < 2 * SafetensorsReader::kMostKept; ++i) {
    const std::string name = "m" + std::to_string(i);
    make(name, 10 * i);
    readers.push_back(std::make_unique<SafetensorsReader>(folder / name));
  }
  CHECK(open_files() == before + SafetensorsReader::kMostKept);
  for (int i = 0; i < std::ssize(readers); ++i) {
    const auto& reader = *readers[static_cast<std::size_t>(i)];
    int second = 0;
    reader.read(*reader.find("a"), 4, std::as_writable_bytes(std::span(&second, 1)));
    CHECK(second == 10 * i + 1);
  }
  const std::string last = folder / ("m" + std::to_string(readers.size() - 1));
  std::filesystem::last_write_time(
      last, std::filesystem::file_time_type::clock::now() + std::chrono::seconds(1));
  CHECK(has(fault_of([&] { (void)readers.back()->bytes(*readers.back()->find("a")); }),
            "data: safetensors file '" + last + "' was changed while it was in use"));
  readers.clear();
  CHECK(open_files() == before);
}

TEST_CASE("an abandoned writer leaves the old file and nothing else") {
  const TemporaryFolder folder;
  const std::string path = folder.write("model", "the old one");
  const std::vector<SafetensorsEntry> entries = {{.name = "a", .dtype = f32, .shape = {2}}};
  const std::byte half[4] = {};
  {
    SafetensorsWriter writer(path, entries);
    writer.write("a", half);
    CHECK(folder.entries() == 1 + folder.entries_of_unfinished());
    CHECK(has(fault_of([&] { writer.commit(); }),
              "contract: SafetensorsWriter::commit: 'a' has 4 of its 8 bytes"));
    CHECK(folder.read("model") == "the old one");
  }
  CHECK(folder.entries() == 1);
  CHECK(folder.read("model") == "the old one");

  SafetensorsWriter writer(path, entries);
  writer.write("a", half);
  writer.write("a", half);
  writer.commit();
  CHECK(SafetensorsReader(path).entries().size() == 1);
  CHECK(has(fault_of([&] { writer.write("a", half); }), "is committed already"));
  CHECK(folder.entries() == 1);
}

TEST_CASE("a writer takes the entries in their order and at their size") {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "m", {{.name = "a", .dtype = i32, .shape = {1}},
                                          {.name = "none", .dtype = f32, .shape = {0, 3}},
                                          {.name = "b", .dtype = i32, .shape = {1}}});
  const std::byte bytes[8] = {};
  CHECK(has(fault_of([&] { writer.write("b", std::span(bytes).first(4)); }),
            "got 'b', expected 'a'"));
  CHECK(has(fault_of([&] { writer.write("a", bytes); }),
            "8 bytes are given for 'a', which lacks only 4"));
  writer.write("a", std::span(bytes).first(4));
  writer.write("none", {});
  writer.write("b", std::span(bytes).first(4));
  CHECK(has(fault_of([&] { writer.write("b", std::span(bytes).first(1)); }),
            "expected no more data"));
  writer.commit();

  const auto writer_of = [&](std::vector<SafetensorsEntry> entries) {
    return fault_of([&] { SafetensorsWriter never(folder / "n", std::move(entries)); });
  };
  CHECK(has(writer_of({{.name = "a"}, {.name = "a"}}),
            "contract: SafetensorsWriter: the name 'a' is given twice"));
  CHECK(has(writer_of({{.name = "__metadata__"}}), "reserved"));
  CHECK(has(writer_of({{.name = "a", .shape = {-1}}}), "contract: a size is -1"));
  CHECK(has(writer_of({{.name = "\xff"}}), "is not UTF-8"));
  CHECK(folder.entries() == 1);
  CHECK(has(fault_of([&] { SafetensorsWriter writer(folder / "none/m", {}); }), "data: "));
}

TEST_CASE("a disk that fills up is a device error and leaves nothing") {
  const TemporaryFolder folder;
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  // A limit on the size of files stands in for the full disk; ignored, its signal becomes the error
  // EFBIG.
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  const std::string fault = fault_of([&] {
    SafetensorsWriter writer(folder / "m", {{.name = "a", .dtype = f32, .shape = {2048}}});
    writer.write("a", std::vector<std::byte>(8192));
  });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK(has(fault, "device: '"));
  CHECK(has(fault, "could not be written"));
  CHECK(folder.entries() == 0);
}
