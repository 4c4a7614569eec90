// Any processor: the compiler's own vectors.
#include "../kernels.h"
#include "vec_portable.h"
// The kernels are templates over the vectors above: the order of these includes matters.
#include "math.h"
#include "gemm.h"
#include "table.h"

namespace trioengine {

const KernelTable* portable_kernels() {
  static constexpr KernelTable table = make_table("portable", 512 << 10);
  return &table;
}

}  // namespace trioengine
