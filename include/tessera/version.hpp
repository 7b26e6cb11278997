// The version of the library. meson.build reads it from here, and it stands nowhere else.
#pragma once

#define TESSERA_VERSION "0.1.0"
