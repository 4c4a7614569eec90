"""Settings that every test shares."""

from __future__ import annotations

import os
import signal

from hypothesis import Phase, settings

settings.register_profile("dev", max_examples=100, deadline=None)
settings.register_profile("ci", max_examples=500, deadline=None, derandomize=True)
settings.register_profile("soak", max_examples=100_000, deadline=None)
# Only whether a test is red matters there: no time is spent on a smaller example.
settings.register_profile(
    "mutants",
    max_examples=1_000,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# As the engine process has it, whoever imports torch first: threads that wait do not spin, which on
# a busy machine costs several times what they compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A runner in the background hands signals down ignored, and real processes under test inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
