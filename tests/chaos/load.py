"""Many workers, many calls, and readers that do not read.

python -m tests.chaos.load                        all three, in full: some minutes
python -m tests.chaos.load --workers 64 --seconds 60
python -m tests.chaos.load --calls 1000000
python -m tests.chaos.load --slow-mib 512
"""

from __future__ import annotations

import sys
from pathlib import Path

# Workers and tests know these modules under the names they have seen from tests/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from chaos.loads import main

    sys.exit(main())
