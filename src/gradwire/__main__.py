"""``python -m gradwire`` is the command ``gradwire``."""

from __future__ import annotations

import sys

from gradwire._cli import main

if __name__ == "__main__":
    sys.exit(main())
