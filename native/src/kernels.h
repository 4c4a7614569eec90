// The table of kernels that each instruction set fills in.
//
// Every function works on one unit of a phase, on one thread, and touches nothing but what its
// arguments point to. A row's result depends on that row alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace trioengine {

// Memory that the same thread will probably read next: kernels ask for it a little at a time while
// they compute, so that the memory is never idle. Nothing depends on whether they do.
struct Ahead {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;
};

// Rows [row0, row0 + rows) times panels [panel0, panel0 + panels) of one matrix.
struct GemmUnit {
  const Linear* weight;
  const Acts* input;
  int row0;
  int rows;
  int panel0;
  int panels;
  float* scratch;  // gemm_scratch_floats(panels, inputs if quantised) floats
  Ahead ahead{};   // weights of the next unit
};

constexpr int kMaxRowTile = 32;
constexpr int kMostUnitPanels = 8;  // of a unit that is not a head

constexpr size_t kUnpackedFloats = 160;  // memory of an unpacked group: bytes, scales and minima

// `quant_inputs` is the most inputs of a quantised matrix, 0 if there is none.
static inline size_t gemm_scratch_floats(int panels, int quant_inputs) {
  const size_t count = static_cast<size_t>(panels);
  const size_t tiles = 2 * static_cast<size_t>(kMaxRowTile) * count * kLanes;
  if (quant_inputs == 0) return tiles;
  const size_t groups = static_cast<size_t>(quant_inputs / kGroup);
  const size_t sums = 4 * kLanes * kLanes;
  return tiles + sums + (count * groups + 1) * kUnpackedFloats;
}

enum class HeadKind : int { kQuery, kKey, kValue };

// What happens to one head of the attention input once its panels are computed. Queries and keys
// have their dimensions split in two halves, each padded to half of head_dim (see packing).
struct HeadTask {
  HeadKind kind;
  int head;                 // within its kind
  int real_dim;             // dimensions that count in the norm
  const float* norm;        // [head_dim] weights of a per-head RMS norm, or null
  float eps;
  const float* cos;         // [positions][head_dim / 2]; null for a layer without rotation
  const float* sin;
  const int32_t* positions;  // [tokens]
  const int32_t* tiles;      // [tokens] KV tile that takes the token
  void* queries;             // [tokens][query_width], same type as Acts::plain
  int query_width;
  KvLayer kv;
};

// Consecutive tokens of one sequence.
struct AttentionMember {
  const int32_t* block_table;
  int token;     // the first, in the step
  int tokens;
  int position;  // of the first
};

// Tokens [begin, end) of one sequence and one KV head, in the cache.
struct Stretch {
  const int32_t* block_table;  // null for nothing
  int kv_head;
  int begin;
  int end;
};

// Attention of the members' queries, one KV head. Several members have one token each, and no more
// rows than a tile.
struct AttentionTask {
  const void* queries;  // [tokens of the step][query_width]
  int query_width;
  Acts output;
  const AttentionMember* members;
  int num_members;
  int shared;           // leading tokens, whole chunks, that all members have in the same blocks
  int kv_head;
  int group;            // query heads per KV head
  int window;           // tokens that a query sees, itself included; 0 means all
  float scale;
  int tiles_per_block;
  Stretch next;         // what the same thread probably attends to next, to be asked for in time
  KvLayer kv;
  void* scratch;        // attention_scratch_bytes(head_dim) bytes, 64-byte aligned
};

constexpr int kAttentionRows = 32;    // most query rows handled at once
constexpr int kMaxHeadDim = 512;
constexpr int kAttentionChunk = 128;  // tokens per softmax chunk, counted from position 0

static inline size_t attention_scratch_bytes(int head_dim) {
  // queries and two P at up to 4 bytes, scores, the chunk's product and the running sum as float
  const size_t per_row = static_cast<size_t>(head_dim) * 3 + kAttentionChunk * 3;
  return (per_row * kAttentionRows + 256) * sizeof(float);
}

struct Peak {
  float value;
  int32_t index;
};

constexpr int kHeadUnitPanels = 4;  // vocabulary columns per peak: 64

// Which tokens of a row may come: all where there are no words.
struct AllowedTokens {
  const uint32_t* words = nullptr;  // token t's is bit t % 32 of word t / 32
  int width = 0;                    // words
};

// The 64 tokens of a unit, a bit for each that may come; none behind the vocabulary.
static inline uint64_t allowed_bits(const AllowedTokens& allowed, int unit, int vocab_size) {
  const int left = vocab_size - unit * kHeadUnitPanels * kLanes;
  const uint64_t real = left < 64 ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
  if (allowed.words == nullptr) return real;
  const int low = 2 * unit, high = low + 1;
  uint64_t bits = low < allowed.width ? allowed.words[low] : 0;
  if (high < allowed.width) bits |= static_cast<uint64_t>(allowed.words[high]) << 32;
  return bits & real;
}

// What is wanted of the logits of one row. Where its mask leaves nothing of a unit, the peak is
// -inf. The sum of a unit is that of exp((logit - peak) * factor), so that no unit's underflows.
struct LogitsLine {
  AllowedTokens allowed;      // the peaks and sums are of these tokens
  Peak* peaks = nullptr;      // [units]: the likeliest token of each 64 columns
  float* sums = nullptr;      // [units]; null: not wanted
  float factor = 0.0f;
  Peak* own_peaks = nullptr;  // [units], whatever is allowed; null: not wanted
  float* own_sums = nullptr;  // [units], likewise, of factor 1; without own_peaks all is allowed
  float* logits = nullptr;    // of the first unit, whatever is allowed; null: not wanted
  bool allowed_only = false;  // but no logits of a unit that has no such token, and no own_sums
  std::ptrdiff_t stride = 0;  // from a unit's logits to the next one's
};

// Some units of a row whose logits lie in memory.
struct StoredUnits {
  const float* logits;    // of the row's first unit
  std::ptrdiff_t stride;  // from a unit's logits to the next one's
  AllowedTokens allowed;
  int vocab_size;
  const int32_t* units;  // which of them
  int count;
  int ahead;  // more that follow these in `units`, and will probably be read next
};

// A token in the order of likelihood, in which equals stand by id.
struct RankedToken {
  float logit;
  int32_t id;

  bool ranks_before(const RankedToken& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

struct KernelTable {
  const char* name;
  size_t plain_bytes;  // of one element of Acts::plain: 2 (bf16) or 4 (float)
  size_t row_block_bytes;  // activations of one row block that may stay in the L2 cache
  int most_block_rows;     // of a row block, so that what is made of it stays there, too
  int row_multiple;        // of the row tiles
  int attention_rows;  // query rows of one attention tile

  // Called by each thread before and after the kernels of a step; `leave` gets what `enter` gave.
  unsigned (*enter)();
  void (*leave)(unsigned before);

  // hidden[i] = embedding[token[i]] as float
  void (*embed)(const uint16_t* embedding, int width, const int32_t* tokens, int rows,
                float* hidden, int hidden_width);
  // out row = hidden row / rms * weight; `width` real columns of `hidden_width`
  void (*norm)(const float* hidden, int hidden_width, int width, const float* weight, float eps,
               int rows, const Acts& out, int out_row);

  void (*gemm_store)(const GemmUnit&, float* out, int out_width);
  void (*gemm_add)(const GemmUnit&, float* hidden, int hidden_width);
  void (*gemm_swiglu)(const GemmUnit&, const Acts& out);  // panels alternate gate, up
  void (*gemm_head)(const GemmUnit&, const HeadTask&);    // the panels of one head
  void (*gemm_logits)(const GemmUnit&, const LogitsLine* rows);  // the panels of one unit

  void (*attention)(const AttentionTask&);

  // out = exp((logits - shift) * factor)
  void (*exp_row)(const float* logits, int count, float shift, float factor, float* out);
  // The same of the tokens of a unit that have a bit, 0 for the others.
  void (*exp_unit)(const float* logits, uint64_t bits, float shift, float factor, float* out);
  // The sums of the same of some units, of those tokens alone that rank before `end`.
  void (*masses_before)(const StoredUnits&, const RankedToken& end, float shift, float factor,
                        float* masses);
  // The sum of a unit as gemm_logits gives it, to the bit.
  float (*sum_unit)(const float* logits, uint64_t bits, float peak, float factor);
  // A bit for each token of a unit that has one in `bits` and whose logit reaches a threshold.
  uint64_t (*reaching)(const float* logits, uint64_t bits, float threshold);
};

// Each is null where it was not compiled for this architecture.
const KernelTable* portable_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* avx512_bf16_kernels();
const KernelTable* amx_kernels();

}  // namespace trioengine
