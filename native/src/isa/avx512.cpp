// x86-64 with AVX-512 F, BW, VL, DQ (Skylake server and later).
#if defined(__x86_64__)

#include "../kernels.h"
#include "vec_avx512.h"
// The kernels are templates over the vectors above: the order of these includes matters.
#include "math.h"
#include "gemm.h"
#include "table.h"

namespace trioengine {

const KernelTable* avx512_kernels() {
  static constexpr KernelTable table = make_table("avx512", 512 << 10);
  return &table;
}

}  // namespace trioengine

#else
#include "../kernels.h"

namespace trioengine {

const KernelTable* avx512_kernels() { return nullptr; }

}  // namespace trioengine

#endif
