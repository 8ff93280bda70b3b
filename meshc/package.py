"""Version of meshc, the same as in `pyproject.toml`, and the folder of its files."""

from pathlib import Path
from typing import Final

__version__ = "0.1.0"

FOLDER: Final = Path(__file__).parent.absolute()
"""Not resolved: `meshc/passes` and `meshc/runtime` may be links, and modules are known by the path they were found at."""
