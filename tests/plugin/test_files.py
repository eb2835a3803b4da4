"""What is compiled and written, and what is said where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ones.plugin import build
from slurm_ones.plugin.build import PluginError, compile_spank
from slurm_ones.plugin.install import PluginSite, write_own, write_site

SITE = PluginSite("/etc/slurm/slurm.conf", "all_partitions", "", "/etc/slurm/plugstack.conf")
VERSION = "#define SLURM_VERSION_NUMBER 0x{:02x}{:02x}03\n"


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A folder that says to be the headers of a Slurm."""
    folder = tmp_path / "include"
    (folder / "slurm").mkdir(parents=True)
    (folder / "slurm/slurm_version.h").write_text(VERSION.format(26, 5))
    (folder / "slurm/spank.h").write_text("#include <slurm/slurm_version.h>\n")
    return folder


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch of 22.05."""
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_missing_headers_are_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"slurm/spank.h is not found in .*: install it .*libslurm-dev"):
        build.headers(tmp_path)


def test_headers_of_another_release_are_refused(tmp_path: Path, headers: Path, sbatch: None) -> None:
    """Slurm would not load what is compiled with them."""
    assert build.headers(headers) == "26.05"
    with pytest.raises(PluginError, match=r"headers are of 26.05, and sbatch here is of 22.05"):
        compile_spank(tmp_path / "to", headers)
    assert not (tmp_path / "to").exists()


def test_what_the_compiler_refuses_leaves_nothing(tmp_path: Path, headers: Path, sbatch: None) -> None:
    (headers / "slurm/slurm_version.h").write_text(VERSION.format(22, 5))
    with pytest.raises(PluginError, match="the compiler refuses the SPANK plugin"):
        compile_spank(tmp_path / "to", headers)
    assert list((tmp_path / "to").iterdir()) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PluginError, match="there is no C compiler"):
        build.headers()
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(PluginError, match="no-such-compiler is not found"):
        build.headers()


def test_a_sites_files(tmp_path: Path) -> None:
    """The rules are found where they were written, and the lines to add keep the site's other plugins."""
    written, todo = write_site(tmp_path / "slurm", None, False, SITE)
    assert {path.name for path in written} == {"slurm_ones.lua", "job_submit.lua", "cli_filter.lua"}
    assert f'dofile, "{tmp_path}/slurm/slurm_ones.lua"' in (tmp_path / "slurm/job_submit.lua").read_text()
    assert "JobSubmitPlugins=all_partitions,lua" in "\n".join(todo)
    assert sorted(path.name for path in (tmp_path / "slurm").iterdir()) == sorted(path.name for path in written)
    # Slurm takes its plugins' names with their kind, too, and would load one twice.
    named = replace(SITE, job_submit="job_submit/lua", cli_filter="cli_filter/lua")
    text = "\n".join(write_site(tmp_path / "slurm", None, False, named)[1])
    assert "JobSubmitPlugins=job_submit/lua\n" in text and "CliFilterPlugins=cli_filter/lua\n" in text


def test_a_sites_own_script_stays(tmp_path: Path) -> None:
    """It is said how it calls ours."""
    own = tmp_path / "job_submit.lua"
    own.write_text("-- our policy\n")
    written, todo = write_site(tmp_path, None, False, SITE)
    assert own.read_text() == "-- our policy\n"
    assert own not in written
    assert "return ones.submitted(job_desc)" in todo[0]
    assert write_site(tmp_path, None, False, SITE) == (written, todo)


def test_what_is_there_in_place_of_a_file(tmp_path: Path) -> None:
    """A link to what is not there now stays as it is; what cannot be read is named."""
    (tmp_path / "job_submit.lua").symlink_to(tmp_path / "managed/job_submit.lua")
    written, _ = write_site(tmp_path, None, False, SITE)
    assert (tmp_path / "job_submit.lua").is_symlink() and tmp_path / "job_submit.lua" not in written
    (tmp_path / "cli_filter.lua").unlink()
    (tmp_path / "cli_filter.lua").mkdir()
    with pytest.raises(PluginError, match=r"cli_filter.lua: Is a directory"):
        write_site(tmp_path, None, False, SITE)


def test_folders_that_slurm_cannot_name(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="choose a folder whose path"):
        write_site(tmp_path / 'a"; os.exit() --', None, False, SITE)
    (tmp_path / "file").touch()
    with pytest.raises(PluginError, match="file"):
        write_site(tmp_path / "file", None, False, SITE)


def test_a_users_own_files_take_nothing_from_a_site(tmp_path: Path) -> None:
    """Where the site has a filter, a user's would replace it; and a foreign slurm.conf is not written over."""
    with pytest.raises(PluginError, match="this site has a filter of its own"):
        write_own(tmp_path, None, PluginSite("/etc/slurm/slurm.conf", "", "lua", ""))
    with pytest.raises(PluginError, match="unset SLURM_CONF"):
        write_own(tmp_path, None, PluginSite(f"{tmp_path}/slurm.conf", "", "lua", ""))
    (tmp_path / "slurm.conf").write_text("ClusterName=mine\n")
    with pytest.raises(PluginError, match=r"slurm.conf was not written by this command"):
        write_own(tmp_path, None, SITE)
    assert (tmp_path / "slurm.conf").read_text() == "ClusterName=mine\n"
    with pytest.raises(PluginError, match=r"^/x+: File name too long"):
        write_own(tmp_path / "new", None, replace(SITE, plugstack=f"/{'x' * 300}"))
