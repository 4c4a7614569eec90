// x86-64 with AMX-BF16 and AMX-INT8 tiles (Sapphire Rapids and later), besides AVX-512 BF16 and VNNI.
#if defined(__x86_64__)

#define TRIO_AMX
#define TRIO_BF16
#define TRIO_VNNI
#include "../kernels.h"
#include "vec_avx512.h"
// The kernels are templates over the vectors above: the order of these includes matters.
#include "math.h"
#include "gemm_amx.h"
#include "gemm_amx_quant.h"
#include "gemm.h"

namespace trioengine {
namespace {

// Tiles treat denormals as zero, so what stands in for them must, too.
unsigned enter() {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  return before;
}

// Tile state left in use would be saved at every context switch, and keeps the core awake.
void leave(unsigned before) {
  _tile_release();
  _mm_setcsr(before);
}

}  // namespace
}  // namespace trioengine

#include "table.h"

namespace trioengine {

const KernelTable* amx_kernels() {
  static constexpr KernelTable table = make_table("amx", 1024 << 10);
  return &table;
}

}  // namespace trioengine

#else
#include "../kernels.h"

namespace trioengine {

const KernelTable* amx_kernels() { return nullptr; }

}  // namespace trioengine

#endif
