// x86-64 with AMX-BF16 tiles (Sapphire Rapids and later), besides AVX-512 BF16 and VNNI.
#if defined(__x86_64__)

#define TRIO_AMX
#define TRIO_BF16
#define TRIO_VNNI
#include "../kernels.h"
#include "vec_avx512.h"
// The kernels are templates over the vectors above: the order of these includes matters.
#include "math.h"
#include "gemm_amx.h"
#include "gemm.h"

namespace trioengine {
namespace {

// Tile state left in use would be saved at every context switch, and keeps the core awake.
void release_tiles() { _tile_release(); }

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
