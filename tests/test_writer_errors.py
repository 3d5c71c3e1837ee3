"""Disks and directories that fail: one warning, no signal, and no flushed row lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest

from pyscan.writer import Writer
from tests import decode as dec
from tests.writer_cases import (
    ROOT,
    check_cells,
    check_survivors,
    fill_until_error,
    make_schema,
    row_of,
    run_python,
)


def test_paths_that_cannot_be_written_are_refused_early(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Writer(tmp_path / "missing" / "run.mscan", make_schema())
    with pytest.raises(OSError, match="must be a regular file"):
        Writer(tmp_path, make_schema(), resume=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="must be a regular file"):
        Writer(tmp_path / "pipe", make_schema(), resume=True)


def test_a_read_only_directory_is_refused_early() -> None:
    code = """if True:
        import os, sys
        from pyscan.schema import Schema
        from pyscan.writer import Writer
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            Writer(sys.argv[1], Schema("m", (), ()))
        except PermissionError as error:
            print("refused", error.filename)
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        result = run_python(code, f"{folder}/run.mscan")
    assert result.stdout.strip() == f"refused {folder}/run.mscan", result.stderr


def test_a_removed_directory_turns_the_writer_off_with_one_warning(tmp_path: Path) -> None:
    folder, schema = tmp_path / "gone", make_schema()
    folder.mkdir()
    writer = Writer(folder / "run.mscan", schema)
    writer.write(1, row_of(1, schema))
    shutil.rmtree(folder)
    with pytest.warns(RuntimeWarning, match="pyscan stopped recording: .*deleted while it was being written"):
        writer.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not writer.write(2, row_of(2, schema))
        writer.close()
    assert "deleted" in str(writer.error)


LIMITED = """if True:
    import json, os, resource, signal, sys, warnings
    sys.path.insert(0, sys.argv[3])
    from pyscan.schema import Schema
    from pyscan.writer import Writer
    from tests.writer_cases import row_of, fill_until_error
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
    schema = Schema.from_json(sys.argv[2].encode())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            writer = Writer(sys.argv[1], schema)
        except OSError as error:
            print(json.dumps({"errno": error.errno, "exists": os.path.exists(sys.argv[1])}))
            sys.exit()
        flushed = fill_until_error(writer, schema)
        late = writer.write(1, row_of(1, schema))
        writer.close()
    print(json.dumps({"flushed": flushed, "error": writer.error, "late": late, "warnings": len(caught)}))
"""


@pytest.mark.parametrize("limit", [30_000, 100_000, 150_000, 200_003])
def test_a_file_size_limit_kills_nobody_and_loses_no_flushed_row(tmp_path: Path, limit: int) -> None:
    """With the default action of SIGXFSZ, which ends a process: the signal must never be delivered."""
    path, schema = tmp_path / "run.mscan", make_schema((100,))
    result = run_python(LIMITED, str(path), schema.to_json().decode(), str(ROOT), str(limit))
    assert result.returncode == 0, (result.returncode, result.stderr)
    report = json.loads(result.stdout)
    assert "File too large" in report["error"]
    assert (report["late"], report["warnings"]) == (False, 1)
    assert report["flushed"] > 0
    check_survivors(path, schema, report["flushed"])
    with Writer(path, schema, resume=True) as writer:
        writer.write(10_000, row_of(10_000, schema))
    decoded = dec.decode(path, strict=False)
    assert decoded.steps[: report["flushed"]] == list(range(report["flushed"]))
    assert decoded.steps[-1] == 10_000
    check_cells(decoded, schema)


@pytest.mark.parametrize("limit", [0, 10, 64, 200])
def test_a_file_that_cannot_even_begin_is_not_left_behind(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "run.mscan"
    result = run_python(LIMITED, str(path), make_schema().to_json().decode(), str(ROOT), str(limit))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"errno": errno.EFBIG, "exists": False}


@pytest.mark.parametrize("kilobytes", [256, 512])
def test_a_full_disk_loses_no_flushed_row(tmp_path: Path, kilobytes: int) -> None:
    disk, schema = tmp_path / "disk", make_schema((100,))
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        path = disk / "run.mscan"
        writer = Writer(path, schema)
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            flushed = fill_until_error(writer, schema)
        assert flushed > 64
        writer.close()
        check_survivors(path, schema, flushed)
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        Writer(path, schema, resume=True).close()
        check_survivors(path, schema, flushed)
        assert not path.with_name("run.mscan.tail").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
