"""``python -m trioengine`` is ``trioengine``."""

from __future__ import annotations

import sys

from trioengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
