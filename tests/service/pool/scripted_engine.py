"""A stand-alone engine without a model: `forerun engine` around the scripted worker.

`python -m tests.service.pool.scripted_engine FOLDER FINGERPRINT [flags of forerun engine]`
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

import msgspec

from service.pool.standalone import run_engine
from service.settings import load_settings


def main() -> int:
    folder, fingerprint, *flags = sys.argv[1:]
    settings = load_settings([*flags, "--model", folder], os.environ, program="scripted engine")
    engine = msgspec.json.encode(settings.engine).decode()
    worker = [sys.executable, "-m", "tests.service.scripted_worker", "--settings", engine, "--fingerprint", fingerprint]
    return asyncio.run(run_engine(settings, partial(print, flush=True), worker))


if __name__ == "__main__":
    sys.exit(main())
