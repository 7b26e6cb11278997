// Everything a training program needs, under one include.
#pragma once

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/base/log.hpp"
#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/data/batches.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/param/parameter.hpp"
#include "tessera/run/run.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/tensor/tensor.hpp"
#include "tessera/version.hpp"
