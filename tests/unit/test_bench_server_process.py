import os
import signal
import sys
import time
from pathlib import Path

import pytest

from corun.bench import server_process
from corun.bench.server_process import ServerError, running

FAKE = Path(__file__).with_name("fake_server.py")


def start(tmp_path, *flags, limit_s=60):
    command = [sys.executable, str(FAKE), str(tmp_path / "record"), *flags]
    return running(command, os.environ, tmp_path / "log", start_limit_s=limit_s)


def child_of(tmp_path):
    return int((tmp_path / "record").read_text().split()[0])


def gone(pid):
    """Whether a process has ended, be it collected or not."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_it_answers_and_then_nothing_is_left(tmp_path):
    with start(tmp_path) as server:
        assert server.get("/v1/models")["data"][0]["max_model_len"] == 64
        assert 0 < server.start_s < 60
        server.check()
        assert not gone_now(child_of(tmp_path))
        with pytest.raises(ServerError, match=r"/none: .*404(.|\n)*a line of the log"):
            server.get("/none")
    assert server.process.poll() is not None
    assert gone(child_of(tmp_path))


def gone_now(pid):
    return not Path(f"/proc/{pid}").exists()


def test_a_server_that_dies_shows_its_log(tmp_path):
    with (
        pytest.raises(ServerError, match=r"status 3(.|\n)*a line of the log"),
        start(tmp_path, "--dies"),
    ):
        pytest.fail("it never answered")


def test_a_silent_server_is_stopped(tmp_path):
    with (
        pytest.raises(ServerError, match="did not answer in time"),
        start(tmp_path, "--silent", limit_s=3),
    ):
        pytest.fail("it never answered")
    assert gone(child_of(tmp_path))


def test_a_stubborn_server_is_killed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "STOP_S", 1.0)
    with start(tmp_path, "--stubborn") as server:
        pass
    assert server.process.returncode == -signal.SIGKILL
    assert "killed" in capsys.readouterr().err
    assert gone(child_of(tmp_path))


def test_a_program_in_the_background_stops_its_server_too(tmp_path):
    """A shell starts `program &` with SIGINT ignored, and the server inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with start(tmp_path) as server:
            began = time.monotonic()
        assert time.monotonic() - began < server_process.STOP_S / 4
        assert server.process.returncode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_server_that_ends_meanwhile_is_noticed(tmp_path):
    with start(tmp_path) as server:
        server.process.kill()
        server.process.wait()
        with pytest.raises(ServerError, match="status -9"):
            server.check()
    assert gone(child_of(tmp_path))


@pytest.mark.parametrize("harm", [lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGTERM)])
def test_whatever_ends_the_block_ends_the_server(tmp_path, harm):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)), start(tmp_path) as server:
        harm()
        time.sleep(5)
    assert server.process.poll() is not None and gone(child_of(tmp_path))
    assert signal.getsignal(signal.SIGTERM) == before
