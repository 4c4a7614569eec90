// What the two ways of multiplying a chunk of the KV cache share.
#pragma once

#include "math.h"

namespace trioengine {
namespace {

constexpr int kChunkTiles = kAttentionChunk / kLanes;

// The working memory of one tile of rows, carved from AttentionTask::scratch.
struct AttentionScratch {
  Plain* queries;  // [rows][head_dim]
  float* scores;   // [rows][kAttentionChunk]
  Plain* weights;  // [rows][kAttentionChunk]
  Plain* other_weights;  // of the next chunk, made while these are used
  float* product;  // [rows][head_dim]
  float* sum;      // [rows][head_dim]
};

TRIO_INLINE AttentionScratch carve_scratch(void* memory, int head_dim) {
  const size_t dim = static_cast<size_t>(head_dim) * kAttentionRows;
  const size_t chunk = static_cast<size_t>(kAttentionChunk) * kAttentionRows;
  float* at = static_cast<float*>(memory);
  AttentionScratch s;
  s.sum = at;
  s.product = at + dim;
  s.scores = at + 2 * dim;
  s.queries = reinterpret_cast<Plain*>(at + 2 * dim + chunk);
  s.weights = reinterpret_cast<Plain*>(at + 3 * dim + chunk);
  s.other_weights = reinterpret_cast<Plain*>(at + 3 * dim + 2 * chunk);
  return s;
}

// KV tiles of one chunk of tokens.
struct TileList {
  const uint16_t* at[kChunkTiles];
  int count = 0;
};

// What is computed at once: some rows against one chunk after the other.
struct ChunkWork {
  AttentionScratch scratch;
  int rows;
  int head_dim;
  bool stream;  // a decode: the tiles come from memory, and each is used once
};

// Asks for the keys, or the values, of a tile that is needed soon.
TRIO_INLINE void prefetch_half(const uint16_t* half, int head_dim) {
  for (int i = 0; i < head_dim * kLanes; i += 32) prefetch(half + i);
}

}  // namespace
}  // namespace trioengine
