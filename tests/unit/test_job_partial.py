"""corun.jobs.partial and corun.jobs.files: nothing is lost, nothing is half there."""

import json
import os
import subprocess
import sys
import time

import pytest

from corun.jobs.files import write_json
from corun.jobs.partial import Header, Partial, difference

HEADER = Header(job={"model": "m", "lines": 4}, base_seed=12, domain="corun1-0")


def record(index):
    return {"index": index, "outputs": [{"index": 0, "digest": f"d{index}"}]}


def started(path, *indices):
    partial = Partial(path)
    partial.begin(HEADER)
    for index in indices:
        partial.append([record(index)])
    partial.close()


def test_records_come_back_and_go_on(tmp_path):
    path = tmp_path / "out.partial"
    started(path, 2, 0)
    partial = Partial(path)
    assert partial.header == HEADER
    assert partial.done == {0, 2}
    partial.append([record(3), record(1)])
    assert [r["index"] for r in partial.records()] == [0, 1, 2, 3]
    partial.finish(tmp_path / "out")
    partial.close()
    written = (tmp_path / "out").read_text().splitlines()
    assert [json.loads(x)["index"] for x in written] == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == ["out"]


def test_every_torn_end_is_cut_off_and_only_that(tmp_path):
    path = tmp_path / "out.partial"
    started(path, 0, 1)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        partial = Partial(path)
        complete = sum(end <= size for end in ends)
        assert partial.done == set(range(max(0, complete - 1))), size
        assert (partial.header is None) == (complete == 0)
        if partial.header is None:
            partial.begin(HEADER)
        missing = sorted({0, 1} - partial.done)
        partial.append([record(i) for i in missing])
        partial.close()
        assert path.read_bytes() == whole, size


def test_damage_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "out.partial"
    started(path, 0, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{broken\n" + lines[2])
    with pytest.raises(ValueError, match=r"line 2, is damaged.*--overwrite"):
        Partial(path)
    path.write_bytes(b'{"format": 99}\n')
    with pytest.raises(ValueError, match="line 1, is damaged"):
        Partial(path)


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "out.partial"
    first = Partial(path)
    with pytest.raises(ValueError, match="another corun generate"):
        Partial(path)
    first.close()
    Partial(path).close()


def test_an_unused_file_goes_away(tmp_path):
    path = tmp_path / "out.partial"
    partial = Partial(path)
    partial.discard_if_empty()
    partial.close()
    assert not path.exists()
    started(path, 0)
    partial = Partial(path)
    partial.discard_if_empty()
    partial.close()
    assert path.exists()


WRITER = """
import sys
from pathlib import Path
from corun.jobs.partial import Header, Partial
partial = Partial(Path(sys.argv[1]))
partial.begin(Header(job={}, base_seed=1, domain=None))
for index in range(100000):
    partial.append([{"index": index, "filler": "x" * 5000}])
    print(index, flush=True)
"""


def test_kill_loses_no_record_that_was_saved(tmp_path):
    path = tmp_path / "out.partial"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        for _ in range(5):
            writer.stdout.readline()
        time.sleep(0.05)
    finally:
        writer.kill()
    said = [int(x) for x in writer.stdout.read().split()]
    writer.wait()
    partial = Partial(path)
    saved = max(said, default=4) + 1
    assert partial.done >= set(range(saved))
    assert len(partial.done) - saved in (0, 1)  # saved, but killed before it could say so
    partial.close()


def test_difference_names_what_differs():
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 2}) is None
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == "b, c"
    saved, wanted = {"flags": {"seed": 42, "n": 1}}, {"flags": {"seed": 43, "n": 1, "top_k": 5}}
    assert difference(saved, wanted) == "flags: seed is 43, was 42; top_k is 5, was None"


def test_write_json_replaces_whole_files(tmp_path):
    path = tmp_path / "r.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
