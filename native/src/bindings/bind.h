// The parts of the Python module `_native`: each adds its names.
#pragma once

#include <nanobind/nanobind.h>

namespace trioengine {

void bind_weights(nanobind::module_& m);
void bind_model(nanobind::module_& m);
void bind_runner(nanobind::module_& m);
void bind_parts(nanobind::module_& m);

}  // namespace trioengine
