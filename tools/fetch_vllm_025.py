"""Unpacks the Python part of vLLM 0.25.0, for tests against it on a machine without a GPU.

vLLM 0.25.0 comes as a wheel for CUDA only. Its scheduler is pure Python and works beside the CPU
packages of this project; the compiled libraries (most of the wheel) are left out. Put the output
directory first on PYTHONPATH to use it. Does nothing where the directory is there already.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "vllm==0.25.0"
INFO = "vllm-0.25.0.dist-info"
SKIPPED = (".so", ".a", ".bin", ".cubin")


def fetch(output: Path) -> None:
    """Download the wheel with pip and unpack it into `output`, all or nothing."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary=:all:", "--dest", scratch, REQUIREMENT]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("vllm-*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if not n.endswith(SKIPPED)]
            archive.extractall(unpacked, members)
        if output.exists():
            shutil.rmtree(output)
        unpacked.rename(output)


def main() -> int:
    """Command line. Exit status 0: the directory is there; 2: it could not be made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory for PYTHONPATH")
    output = parser.parse_args().output
    if (output / INFO / "METADATA").is_file():
        return 0
    print(f"{REQUIREMENT}: downloading its wheel (several hundred MB) for {output}", flush=True)
    try:
        fetch(output)
    except subprocess.CalledProcessError as e:
        print(f"pip could not download {REQUIREMENT} (status {e.returncode})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
