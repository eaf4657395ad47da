"""What the interpreter accepts, the compiler must accept too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """All kernels become machine code of compute capability 9.0, in the precisions and shapes of an 8B model."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.target.triton.compile_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 12
