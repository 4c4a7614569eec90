// Which kernels this processor, and this operating system, can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace trioengine {

// Usable here, best first. The last is always "portable".
std::vector<const KernelTable*> usable_kernels();

// The named table, or the best for an empty name. Throws std::invalid_argument, naming what is
// usable, where the name is unknown or cannot run here.
const KernelTable& choose_kernels(const std::string& name);

}  // namespace trioengine
