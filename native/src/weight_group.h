// Groups of 32 weights that share a scale: read from the blocks of a GGUF file, or quantised here.
//
// Source of the blocks: ggml's ggml-common.h, block_q4_0, block_q4_1 and block_q8_0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"
#include "packing.h"

namespace trioengine {

// One group of 32 weights of one output: what the bytes are, and what they mean.
struct Group {
  uint8_t codes[kGroup];
  uint16_t scale;    // half
  uint16_t minimum;  // half
};

// Whether the source holds blocks of quantised weights.
bool is_blocks(SourceType type);

// Bytes of one block.
std::size_t block_bytes(SourceType type);

// The packed format that holds what the source holds, exactly.
Format native_format(SourceType type);

// Zeros.
Group zero_group(Format format);

// The group that a block holds, as it is.
Group read_block(SourceType type, const uint8_t* block);

// The 32 floats at `x` as kQ8: largest magnitude to 127.
Group quantise_to_q8(const float* x);

// The 32 floats at `x` as kQ4Min: of a few ranges, the one with the least squared error.
Group quantise_to_q4(const float* x);

}  // namespace trioengine
