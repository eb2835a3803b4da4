"""setuptools' build backend; from a checkout, `pip install .` takes ones-db and ones-wrapper from its own folders.

Only what pip reads before it installs names the folders: a wheel requires both by version, whatever it is built from.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

TOP = Path(__file__).resolve().parent


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Write the metadata, with addresses of the folders that are there: an sdist has none."""
    info = build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    file = Path(metadata_directory, info, "METADATA")
    text = file.read_text()
    for name in ("db", "wrapper"):
        if (folder := TOP / name).is_dir():
            text = re.sub(
                rf"^(Requires-Dist: ones-{name}(?:\[\w+\])?)==\S+$", rf"\1 @ {folder.as_uri()}", text, flags=re.M
            )
    file.write_text(text)
    return info


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel, with metadata of its own."""
    return build_meta.build_wheel(wheel_directory, config_settings)
