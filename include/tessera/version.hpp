// The version of the library. meson.build reads it from here, so this file is its only place.
#pragma once

#define TESSERA_VERSION "0.1.0"
