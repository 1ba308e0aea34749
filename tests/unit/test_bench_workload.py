"""corun.bench.workload: the names of workloads."""

from pathlib import Path

import pytest

from corun.bench.workload import PAPER_GRIDS, Workload, parse_workload


@pytest.mark.parametrize("name", [*PAPER_GRIDS, "burstgpt", "codeedit", "1/1"])
def test_names_come_back(name):
    assert parse_workload(f" {name} ").name == name


def test_grid():
    assert parse_workload("4096/128") == Workload("4096/128", "grid", 4096, 128)
    assert parse_workload("0064/8").name == "64/8"


def test_files_are_named_without_their_folder():
    path = Path("/data/x/BurstGPT_1.csv")
    assert parse_workload(f"burstgpt:{path}") == Workload(
        "burstgpt:BurstGPT_1.csv", "burstgpt-trace", path=path
    )
    assert parse_workload(f"burstgpt:{path}@GPT-4") == Workload(
        "burstgpt:BurstGPT_1.csv@GPT-4", "burstgpt-trace", path=path, model="GPT-4"
    )
    talk = Path("/a@b/talk.json")
    assert parse_workload(f"sharegpt:{talk}") == Workload(
        "sharegpt:talk.json", "sharegpt", path=talk
    )


def test_an_at_sign_in_a_folder_is_part_of_the_path():
    parsed = parse_workload("burstgpt:/a@b/t.csv")
    assert (parsed.path, parsed.model) == (Path("/a@b/t.csv"), None)


@pytest.mark.parametrize(
    "name",
    ["", "burst", "burstgpt:", "sharegpt", "sharegpt:", "codeedit:x", "1024", "1024/", "-1/5",
     "1024/128/3", "1e3/5", "1024x128"],
)  # fmt: skip
def test_unknown_names_list_what_there_is(name):
    with pytest.raises(ValueError, match=r"unknown workload .*1024/128.*burstgpt.*codeedit"):
        parse_workload(name)


@pytest.mark.parametrize("name", ["0/5", "5/0"])
def test_empty_prompts_and_outputs_are_refused(name):
    with pytest.raises(ValueError, match="at least 1 token in and 1 token out"):
        parse_workload(name)
