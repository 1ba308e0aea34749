"""corun.cli: which command runs, and with which exit status it ends."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from corun import cli
from corun.engine import violation_note
from corun.engine.audit import PlanViolationError


@pytest.fixture
def command(monkeypatch):
    """A function that installs a subcommand `probe` whose `run` it is given."""
    monkeypatch.delenv("CORUN_DEBUG", raising=False)

    def install(run, pass_through=False, quiet=False):
        def add_arguments(parser):
            parser.add_argument("--flag")
            parser.add_argument("-i")

        module = SimpleNamespace(
            add_arguments=add_arguments, run=run, PASS_THROUGH=pass_through, QUIET=quiet
        )
        monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("probe_module", "a probe"))
        monkeypatch.setitem(sys.modules, "probe_module", module)

    return install


def raising(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_commands_status_is_the_exit_status(command, status):
    command(lambda args: status)
    assert cli.main(["probe"]) == status


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("no such model"), 2, "corun probe: no such model"),
        (RuntimeError("engine failed"), 2, "corun probe: engine failed"),
        (FileNotFoundError(2, "No such file", "in"), 2, "corun probe: in: No such file"),
        (ModuleNotFoundError("x", name="vllm.config"), 2, "vLLM is not installed"),
        (KeyError("k"), 2, "KeyError: 'k' (CORUN_DEBUG=1 shows where)"),
        (KeyboardInterrupt(), 2, "interrupted"),
        (PlanViolationError("step 3 was wrong"), 1, "corun probe: step 3 was wrong"),
    ],
)
def test_errors_are_one_message_and_a_status(command, capsys, error, status, message):
    command(raising(error))
    assert cli.main(["probe"]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_debug_shows_the_traceback(command, monkeypatch):
    monkeypatch.setenv("CORUN_DEBUG", "1")
    command(raising(ValueError("no such model")))
    with pytest.raises(ValueError, match="no such model"):
        cli.main(["probe"])


def test_unknown_flags_are_errors_unless_the_command_passes_them_on(command, capsys):
    command(lambda args: 0)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["probe", "--flga", "1"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith("unrecognized arguments: --flga 1 (did you mean --flag?)\n")


@pytest.mark.parametrize("name", ["doctor", "verify", "certify", "localize"])
def test_after_an_unknown_flag_the_commands_own_usage_is_shown(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "model", "--flga"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: corun {name} ")
    assert error.endswith(f"corun {name}: error: unrecognized arguments: --flga\n")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (
            ["verify", "m", "--restart-arg", "a=1", "--restrats=3"],
            "--restrats=3 (did you mean --restarts?)",
        ),
        (["certify", "m", "--buget", "9"], "--buget 9 (did you mean --budget?)"),
        (
            ["bench", "run", "m", "--out", "x", "--one-engin"],
            "--one-engin (did you mean --one-engine?)",
        ),
        (["doctor", "m", "--zzz"], "--zzz"),
        (["doctor", "m", "-j"], "-j"),
    ],
)
def test_a_mistyped_flag_is_answered_with_the_one_it_resembles(argv, hint, capsys):
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert capsys.readouterr().err.endswith(f"error: unrecognized arguments: {hint}\n")


def leaves_a_note(then):
    """A command whose engine, in another process, found two steps outside the plan."""

    def run(args):
        program = "from corun.engine.violation_note import leave; leave('step 3'); leave('step 4')"
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
        )
        if isinstance(then, Exception):
            raise then
        return then

    return run


@pytest.mark.parametrize("then", [RuntimeError("the engine is dead"), 0, 2])
def test_a_violation_in_another_process_is_status_1(command, capsys, then):
    command(leaves_a_note(then))
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr().err == "corun probe: step 3\n"
    assert violation_note.FILE_VARIABLE not in os.environ
    command(raising(RuntimeError("the engine is dead")))  # an old note tells nothing
    assert cli.main(["probe"]) == 2


def test_a_command_that_wants_it_is_quiet(command, monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    seen = []

    def run(args):
        seen.append("VLLM_LOGGING_CONFIG_PATH" in os.environ)
        return 0

    command(run)
    cli.main(["probe"])
    command(run, quiet=True)
    cli.main(["probe"])
    monkeypatch.setenv("CORUN_DEBUG", "1")
    cli.main(["probe"])
    assert seen == [False, True, False]


def test_passed_on_arguments_keep_their_order(command):
    seen = {}

    def run(args):
        seen.update(vars(args))
        return 0

    command(run, pass_through=True)
    line = "probe M --dtype float32 -i in -tp 2 --help=all --flag 1 --kv.a 3 -- --flag 2 -O3"
    assert cli.main(line.split()) == 0
    passed = "M --dtype float32 -tp 2 --kv.a 3 --flag 2 -O3 --help=all"
    assert seen["rest"] == passed.split()
    assert (seen["flag"], seen["i"]) == ("1", "in")


NO_VLLM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from corun.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_vllm(*argv, cwd=None):
    root = str(Path(cli.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", NO_VLLM, *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "0", "CORUN_DEBUG": "0"},
        check=False,
    )


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)]
)
def test_help_and_version_need_no_vllm(argv):
    done = without_vllm(*argv)
    assert done.returncode == 0, done.stderr
    assert "corun" in done.stdout


def test_help_lists_every_command():
    text = without_vllm("--help").stdout
    assert all(name in text for name in cli.COMMANDS)


def test_commands_without_vllm_say_what_to_install(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    generate = ["generate", "model", "-i", "in.jsonl", "-o", "out.jsonl"]
    for argv in (generate, ["serve", "model"]):
        done = without_vllm(*argv, cwd=tmp_path)
        assert done.returncode == 2
        assert "corun-vllm[gpu]" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [[], ["nothing"], ["--nothing"]])
def test_no_command_is_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: corun" in capsys.readouterr().err
