// x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__)

#include "../kernels.h"
#include "vec_avx2.h"
// The kernels are templates over the vectors above: the order of these includes matters.
#include "math.h"
#include "gemm.h"
#include "table.h"

namespace trioengine {

const KernelTable* avx2_kernels() {
  static constexpr KernelTable table = make_table("avx2", 512 << 10);
  return &table;
}

}  // namespace trioengine

#else
#include "../kernels.h"

namespace trioengine {

const KernelTable* avx2_kernels() { return nullptr; }

}  // namespace trioengine

#endif
