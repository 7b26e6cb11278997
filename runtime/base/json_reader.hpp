// JSON from outside, which is told to a reader in the order of the document. What is read is
// strict: RFC 8259 and no more, and within limits that keep a hostile document small. The library
// that reads it is nlohmann-json, of which no header and no name leaves the body.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::json {

constexpr std::size_t kMostLevels = 64;

// What a document says, one call for each thing. Keys come once in each object. A reader refuses
// what it does not expect.
class Reader {
 public:
  virtual ~Reader() = default;
  virtual void begin_object() = 0;
  virtual void end_object() = 0;
  virtual void begin_array() = 0;
  virtual void end_array() = 0;
  virtual void key(std::string name) = 0;
  virtual void string(std::string text) = 0;
  virtual void count(std::int64_t value) = 0;  // a whole number that is not negative
  // What few documents have; where they should not, it is as any other thing.
  virtual void negative(std::int64_t /*value*/) { other(); }  // a whole number
  virtual void number(double /*value*/) { other(); }          // any other one
  virtual void boolean(bool /*value*/) { other(); }
  virtual void other() = 0;  // null, and text that is no value

 protected:
  // Ends the reading: the document "that <fault>" is in error here.
  [[noreturn]] static void refuse(std::string fault);
};

// Tells `reader` all of `text`. `document` begins an error: "file 'x' has a header".
// Throws: DataError, "<document> that <fault> (byte N of the JSON); write the file again", for what
// the reader refuses and for what is no JSON in UTF-8, for a byte order mark, a NUL byte, a key
// that an object has twice, a whole number beyond 64 bits, and for more than kMostLevels levels;
// and what the reader throws.
void read(std::string_view text, std::string_view document, Reader& reader);

}  // namespace tessera::json
