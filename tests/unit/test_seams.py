import pytest

from corun.engine import seams


def test_found_moved_and_changed():
    ok = seams._check("x", ("json", "dumps", ("indent",)))
    assert ok.found
    moved = seams._check("x", ("json", "dump_all"))
    assert not moved.found and "dump_all" in moved.detail
    gone = seams._check("x", ("no_such_module_at_all", "f"))
    assert not gone.found
    changed = seams._check("x", ("json", "dumps", ("indentation",)))
    assert not changed.found and "indentation" in changed.detail


def test_every_seam_of_the_installed_vllm_is_there():
    pytest.importorskip("vllm")
    statuses = seams.check_all()
    missing = [s for s in statuses if not s.found]
    assert not missing
    assert {s.holder for s in statuses} == set(seams.HOLDERS)
    print(f"checked {len(statuses)} seams")


def test_an_untested_version_is_refused(monkeypatch):
    monkeypatch.delenv(seams.UNTESTED_VARIABLE, raising=False)
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.99.0")
    with pytest.raises(seams.SeamError, match=r"this is 0\.99\.0"):
        seams.require(())
    monkeypatch.setenv(seams.UNTESTED_VARIABLE, "1")
    seams.require(())


def test_no_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(seams, "vllm_version", lambda: "")
    with pytest.raises(seams.SeamError, match="corun-vllm"):
        seams.require(())


def test_a_missing_seam_stops_the_start(monkeypatch):
    monkeypatch.setattr(seams, "vllm_version", lambda: seams.TESTED_VERSIONS[0])
    lost = seams.SeamStatus("corun.engine.x", "vllm.y", "Z.run", False, "no attribute")
    monkeypatch.setattr(seams, "check_all", lambda holders: [lost])
    with pytest.raises(seams.SeamError, match=r"vllm\.y Z\.run"):
        seams.require(("corun.engine.x",))
