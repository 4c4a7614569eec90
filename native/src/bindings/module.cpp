// The Python module `_native`. Everything that comes from Python is checked in this directory or
// right behind it.
#include "bind.h"

NB_MODULE(_native, m) {
  trioengine::bind_weights(m);
  trioengine::bind_model(m);
  trioengine::bind_runner(m);
  trioengine::bind_parts(m);
}
