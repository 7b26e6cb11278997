#include "runtime/checkpoint/safetensors_header.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "runtime/base/json_reader.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::checkpoint {
namespace {

constexpr std::pair<std::string_view, DType> kDtypes[] = {
    {"F32", f32}, {"BF16", bf16},    {"F16", f16},      {"F64", f64},      {"I32", i32},
    {"I64", i64}, {"BOOL", boolean}, {"F8_E4M3", e4m3}, {"F8_E5M2", e5m2}, {"U8", u8}};
// What other programs write beside, with the bytes of an element.
constexpr std::pair<std::string_view, std::int64_t> kForeign[] = {
    {"I8", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2}, {"U32", 4}, {"U64", 8}, {"C64", 8}};
constexpr std::string_view kMetadata = "__metadata__";
constexpr std::size_t kMostDims = 64;  // PyTorch's and NumPy's, and far more than ours

// {"weight_map": {name: file}}, and what else stands beside it.
class IndexReader final : public json::Reader {
 public:
  std::map<std::string, std::string> files;
  bool has_map = false;

  void begin_object() override {
    if (is_map_ && level_ == 2) other();
    ++level_;
  }
  void end_object() override { --level_; }
  void begin_array() override {
    other();
    ++level_;
  }
  void end_array() override { --level_; }
  void key(std::string name) override {
    if (level_ == 1) has_map |= is_map_ = name == "weight_map";
    if (level_ == 2) name_ = std::move(name);
  }
  void string(std::string text) override {
    if (!is_map_ || level_ != 2) return other();
    files[std::move(name_)] = std::move(text);
  }
  void count(std::int64_t) override { other(); }
  void other() override {
    if (level_ == 0 || (is_map_ && level_ == 1)) refuse("lacks '{'");
    if (is_map_ && level_ == 2) refuse("lacks '\"'");
  }

 private:
  int level_ = 0;
  bool is_map_ = false;  // what is read at level 2
  std::string name_;
};

// {name: {"dtype": .., "shape": [..], "data_offsets": [begin, end]}}, and "__metadata__", whose
// values are strings.
class HeaderReader final : public json::Reader {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  SafetensorsHeader header;

  void begin_object() override {
    if (at_ == At::outside) {
      at_ = At::header;
    } else if (at_ == At::header) {
      at_ = key_ == kMetadata ? At::metadata : At::tensor;
      tensor_ = {};
      tensor_.entry.name = key_;
    } else {
      other();
    }
  }
  void end_object() override {
    if (at_ == At::tensor) finish_tensor();
    at_ = at_ == At::header ? At::outside : At::header;
  }
  void begin_array() override {
    if (at_ != At::tensor || key_ == "dtype") return other();
    at_ = At::integers;
  }
  void end_array() override { at_ = At::tensor; }
  void key(std::string name) override {
    key_ = std::move(name);
    if (at_ != At::tensor) return;
    if (key_ == "dtype")
      tensor_.has_dtype = true;
    else if (key_ == "shape")
      tensor_.has_shape = true;
    else if (key_ == "data_offsets")
      tensor_.has_offsets = true;
    else
      fail(concat("has the unknown key ", shown(key_)));
  }
  void string(std::string text) override {
    if (at_ == At::metadata) {
      header.metadata[std::move(key_)] = std::move(text);
    } else if (at_ == At::tensor && key_ == "dtype") {
      read_dtype(text);
    } else {
      other();
    }
  }
  void count(std::int64_t value) override {
    if (at_ != At::integers) return other();
    std::vector<std::int64_t>& all = key_ == "shape" ? tensor_.entry.shape : tensor_.offsets;
    if (all.size() == kMostDims)
      fail(concat("has a shape or offsets of more than ", kMostDims, " numbers"));
    all.push_back(value);
  }
  // Not what stands here.
  void other() override {
    if (at_ == At::integers) fail("has a shape or offset that is no non-negative integer");
    refuse(at_ == At::header                        ? "lacks '{'"
           : at_ == At::metadata || key_ == "dtype" ? "lacks '\"'"
                                                    : "lacks '['");
  }

 private:
  enum class At { outside, header, metadata, tensor, integers };
  struct Tensor {
    SafetensorsEntry entry;
    std::vector<std::int64_t> offsets;
    bool has_dtype = false, has_shape = false, has_offsets = false;
  };

  [[noreturn]] void fail(const std::string& what,
                         const char* remedy = "write the file again") const {
    throw DataError(concat(file_, ": tensor ", shown(tensor_.entry.name), " ", what, "; ", remedy));
  }

  void finish_tensor() {
    const auto& [entry, offsets, has_dtype, has_shape, has_offsets] = tensor_;
    if (!has_dtype || !has_shape || !has_offsets)
      fail(concat("lacks ", !has_dtype ? "dtype" : !has_shape ? "shape" : "data_offsets"));
    if (offsets.size() != 2)
      fail(concat("has ", offsets.size(), " data_offsets, expected begin and end"));
    set_extent(offsets[0], offsets[1]);
    header.entries.push_back(std::move(tensor_.entry));
  }

  void set_extent(std::int64_t begin, std::int64_t end) {
    SafetensorsEntry& entry = tensor_.entry;
    if (begin > end) fail(concat("ends at ", end, ", before it begins at ", begin));
    std::int64_t expected = static_cast<std::int64_t>(size_bytes(entry.dtype));
    for (const auto& [name, bytes] : kForeign)
      if (name == entry.foreign) expected = bytes;
    // Strides of an empty tensor are products, too: of the sizes that are not 0.
    try {
      for (const std::int64_t extent : entry.shape)
        if (extent != 0) expected = checked_mul(expected, extent);
    } catch (const ContractError&) {
      fail("has a shape whose product overflows 64 bits");
    }
    if (std::ranges::find(entry.shape, 0) != entry.shape.end()) expected = 0;
    if (end - begin != expected) {
      fail(concat("has data_offsets [", begin, ", ", end, "], ", end - begin,
                  " bytes, but its shape and dtype need ", expected));
    }
    entry.begin_bytes = begin;
    entry.size_bytes = expected;
  }

  void read_dtype(const std::string& text) {
    for (const auto& [name, dtype] : kDtypes) {
      if (name == text) {
        tensor_.entry.dtype = dtype;
        return;
      }
    }
    for (const auto& [name, bytes] : kForeign) {
      if (name == text) {
        tensor_.entry.foreign = text;
        return;
      }
    }
    fail(concat("has dtype ", shown(text), ", whose size is not known"), "write it as F32 or BF16");
  }

  const std::string& file_;
  At at_ = At::outside;
  std::string key_;
  Tensor tensor_;
};

// Not called `quoted`, which std has for strings.
std::string json_string(std::string_view text) {
  TESSERA_EXPECT(is_utf8(text), "SafetensorsWriter: ", shown(text), " is not UTF-8");
  return json::quote(text);
}

std::string_view safetensors_name(DType dtype) {
  for (const auto& [name, value] : kDtypes) {
    if (value == dtype) return name;
  }
  TESSERA_EXPECT(false, "SafetensorsWriter: no name for dtype ", dtype);
  return {};
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file) {
  const std::string document = file + " has a header";
  if (!json.starts_with('{'))
    throw DataError(document +
                    " that does not begin with '{' (byte 0 of the JSON); write the file again");
  HeaderReader reader(file);
  json::read(json, document, reader);
  return std::move(reader.header);
}

std::map<std::string, std::string> parse_safetensors_index(std::string_view json,
                                                           const std::string& file) {
  const std::string document = file + " has a text";
  IndexReader reader;
  json::read(json, document, reader);
  if (!reader.has_map)
    throw DataError(concat(document, " that lacks \"weight_map\" (byte ", json.size(),
                           " of the JSON); write the file again"));
  return std::move(reader.files);
}

std::string five_digits(std::int64_t number) {
  const std::string digits = concat(number);
  return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
}

std::string format_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata) {
  std::string out = "{";
  const auto separate = [&] {
    if (out.size() > 1) out += ',';
  };
  if (!metadata.empty()) {
    out += concat(json_string(kMetadata), ":{");
    bool first = true;
    for (const auto& [key, value] : metadata) {
      out +=
          concat(std::exchange(first, false) ? "" : ",", json_string(key), ":", json_string(value));
    }
    out += '}';
  }
  for (const SafetensorsEntry& entry : entries) {
    separate();
    std::string shape;
    for (const std::int64_t extent : entry.shape) shape += concat(shape.empty() ? "" : ",", extent);
    out += concat(json_string(entry.name), ":{\"dtype\":\"", safetensors_name(entry.dtype),
                  "\",\"shape\":[", shape, "],\"data_offsets\":[", entry.begin_bytes, ",",
                  entry.begin_bytes + entry.size_bytes, "]}");
  }
  out += '}';
  out.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(out.size()), 8)), ' ');
  TESSERA_EXPECT(out.size() <= kMaxHeaderBytes, "a safetensors file of ", entries.size(),
                 " tensors would have a header of ", out.size(), " bytes, and readers take ",
                 kMaxHeaderBytes, "; put fewer tensors, or shorter names, into a file");
  return out;
}

}  // namespace tessera::checkpoint
