"""Damaged inputs for everything that reads what others sent; see README.md.

python -m tests.fuzz --inputs 1000000                     fresh seed, all targets
python -m tests.fuzz --inputs 5000 --seed 7 --target frames
python -m tests.fuzz --seed 7 --target frames --block 3   one block again
"""

from __future__ import annotations

import sys
from pathlib import Path

# The modules are known under the names that tests see.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from fuzz.command import main

    sys.exit(main())
