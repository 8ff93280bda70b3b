"""Models of ten libraries (`command.py`), with stubs for what does not load beside a torch for CPUs.

    python -m tests.zoo.libraries [--only timm,"monai UNet"] [--limit-seconds T] [--fresh] [--write]
"""

from __future__ import annotations

import sys

from tests.zoo.libraries.stubs import put_stubs

if __name__ == "__main__":
    put_stubs()
    from tests.zoo.libraries.command import main  # transformers, which the zoo imports, looks for torchvision

    sys.exit(main())
