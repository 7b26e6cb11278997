// Catch2, compiled once for most tests (tests/meson.build). No test relies on it: where ccache
// compiles it is not there.
#include "tests/support/catch.hpp"
