"""The writer inside a process: its queue, threads, forks, and an end without close."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pyscan.writer import Writer, encode_json
from tests import decode as dec
from tests.writer_cases import (
    ROOT,
    RUN_ID,
    check_cells,
    make_schema,
    row_of,
    run_python,
    write_rows,
)


def occupy(writer: Writer) -> None:
    """Give the writer thread so much to write that it takes no row from the queue for well over 20 ms."""
    assert writer.tokens(0, bytes(60_000_000))
    writer.flush(wait=False)
    time.sleep(0.005)


def test_rows_that_the_disk_cannot_take_are_dropped_counted_and_named(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    writer = Writer(path, schema, queue_rows=2, fsync="never")
    accepted, seconds = [], []
    occupy(writer)
    for step in range(12):
        start = time.monotonic()
        if writer.write(step, row_of(step, schema)):
            accepted.append(step)
        seconds.append(time.monotonic() - start)
    dropped = sorted(set(range(12)) - set(accepted))
    assert (writer.rows_accepted, writer.rows_dropped) == (len(accepted), len(dropped))
    assert len(dropped) > 4
    assert seconds[dropped[0]] >= 0.02  # the first row without a slot waits; the others find that nothing has moved
    assert np.median([seconds[step] for step in dropped[1:]]) < 0.01
    writer.flush()
    assert writer.write(100, row_of(100, schema))
    writer.close()
    decoded = dec.decode(path)
    assert decoded.steps == [*accepted, 100]
    assert decoded.events == [
        {"kind": "dropped_rows", "step": dropped[0], "site": None, "count": len(dropped), "steps": dropped},
    ]
    assert writer.error is None


def test_a_row_that_finds_a_slot_within_20_ms_is_not_dropped(tmp_path: Path) -> None:
    """Rows come faster than they are packed, the queue is full most of the time; a busy machine gets five attempts."""
    schema = make_schema((1000,))
    for attempt in range(5):
        path = tmp_path / f"run{attempt}.mscan"
        with Writer(path, schema, queue_rows=2, fsync="never") as writer:
            accepted = [writer.write(step, row_of(step, schema)) for step in range(300)]
        assert len(dec.decode(path).rows) == sum(accepted)
        if all(accepted):
            return
    raise AssertionError("rows were dropped in every attempt")


def test_waiting_messages_take_bounded_memory(tmp_path: Path) -> None:
    with Writer(tmp_path / "run.mscan", make_schema(), flush_seconds=1000, fsync="never") as writer:
        assert not writer.tokens(1, bytes(70_000_000))  # the bound is 64 MiB
        assert writer.tokens(2, bytes(40_000_000))
        accepted = [writer.tokens(step, bytes(7_000_000)) for step in range(3, 203)]  # far faster than any disk
        assert not all(accepted)
        writer.flush()
        assert writer.tokens(203, bytes(40_000_000))
        assert writer.error is None


def test_many_threads_may_write_and_every_accepted_row_is_there(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    accepted: list[list[int]] = [[] for _ in range(4)]
    with Writer(path, schema, flush_seconds=0.01) as writer:

        def work(thread: int) -> None:
            for step in range(thread * 1000, thread * 1000 + 300):
                if writer.write(step, row_of(step, schema)):
                    accepted[thread].append(step)
                if step % 50 == 0:
                    writer.event("note", step)
                    writer.flush(wait=step % 100 == 0)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.rows_accepted + writer.rows_dropped == 1200
    decoded = dec.decode(path)
    assert sorted(decoded.steps) == sorted(step for steps in accepted for step in steps)
    assert sum(event["kind"] == "note" for event in decoded.events) == 24
    check_cells(decoded, schema)


@pytest.mark.parametrize(
    "ending", ["os._exit(0)", "writer.close(); os._exit(0)", "del writer; os._exit(0)", "sys.exit(0)"]
)
def test_a_forked_child_changes_nothing_and_ends(tmp_path: Path, ending: str) -> None:
    """Like a DataLoader worker: whatever the child does with its copy, the parent's file is as without it."""
    code = f"""if True:
        import json, os, sys
        sys.path.insert(0, sys.argv[3])
        from pyscan.schema import Schema
        from pyscan.writer import Writer
        from tests.writer_cases import row_of
        schema = Schema.from_json(sys.argv[2].encode())
        writer = Writer(sys.argv[1], schema, flush_seconds=1000)
        for step in range(40):
            writer.write(step, row_of(step, schema))
            if step % 10 == 4:
                writer.flush()
            if step % 10 == 9:
                child = os.fork()
                if child == 0:
                    accepted = [writer.write(1000, row_of(0, schema)), writer.event("child", 0), writer.flush(),
                                writer.tokens(0, b"x"), writer.change_schema(schema)]
                    if any(accepted) or writer.error is not None:
                        os._exit(3)
                    {ending}
                assert os.waitpid(child, 0)[1] == 0
        writer.close()
        assert writer.error is None
    """
    path, schema = tmp_path / "run.mscan", make_schema()
    result = run_python(code, str(path), schema.to_json().decode(), str(ROOT))
    assert result.returncode == 0, result.stderr
    decoded = dec.decode(path)
    assert decoded.steps == list(range(40))
    assert decoded.events == []
    check_cells(decoded, schema)


def test_a_child_neither_releases_the_lock_nor_keeps_it(tmp_path: Path) -> None:
    code = """if True:
        import json, os, signal, sys, time
        sys.path.insert(0, sys.argv[3])
        from pyscan.schema import Schema
        from pyscan.writer import Writer
        writer = Writer(sys.argv[1], Schema.from_json(sys.argv[2].encode()))
        if os.fork() == 0:
            writer.close()
            del writer
            print("child", os.getpid(), flush=True)
            os.close(1)
            time.sleep(60)
            os._exit(0)
        sys.stdin.read()
        os._exit(0)
    """
    path, schema = tmp_path / "run.mscan", make_schema()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(path), schema.to_json().decode(), str(ROOT)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        try:
            with pytest.raises(BlockingIOError):
                Writer(path, schema, resume=True)
            parent.stdin.close()
            parent.wait(30)
            Writer(path, schema, resume=True).close()  # the parent is gone, its child lives on
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "sys.exit(1)",
        "raise RuntimeError('training failed')",
        "del writer",
        "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(writer))  # never destroyed",
    ],
)
def test_a_process_that_ends_without_close_leaves_a_closed_file(tmp_path: Path, ending: str) -> None:
    code = f"""if True:
        import json, sys
        sys.path.insert(0, sys.argv[3])
        from pyscan.schema import Schema
        from pyscan.writer import Writer
        from tests.writer_cases import row_of
        schema = Schema.from_json(sys.argv[2].encode())
        writer = Writer(sys.argv[1], schema, flush_seconds=1000)
        for step in range(10):
            writer.write(step, row_of(step, schema))
        {ending}
    """
    path, schema = tmp_path / "run.mscan", make_schema()
    run_python(code, str(path), schema.to_json().decode(), str(ROOT))
    decoded = dec.decode(path)
    assert decoded.steps == list(range(10))
    assert decoded.frames[-1].kind == dec.INDEX
    assert not path.with_name("run.mscan.tail").exists()


def test_other_threads_run_while_one_waits_for_a_flush(tmp_path: Path) -> None:
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0001)

    thread = threading.Thread(target=count)
    with Writer(tmp_path / "run.mscan", make_schema(), fsync="never") as writer:
        thread.start()
        writer.tokens(0, bytes(60_000_000))
        before = ticks
        writer.flush()
        gained = ticks - before
        stop.set()
        thread.join()
    assert gained > 10


@pytest.mark.parametrize("fsync", ["never", "close", "flush"])
def test_every_fsync_mode_writes_the_same_file(tmp_path: Path, fsync: str) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema, run_id=RUN_ID, fsync=fsync) as writer:
        write_rows(writer, schema, range(70))
    decoded = dec.decode(path)
    assert decoded.run_id == writer.run_id == RUN_ID
    assert decoded.steps == list(range(70))


def test_an_event_is_one_line_of_plain_json() -> None:
    assert encode_json({"a": [1, 2.5], "é": None}) == '{"a":[1,2.5],"é":null}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json({"a": math.nan})


def test_the_writer_needs_no_tensor_library() -> None:
    result = run_python("import sys, pyscan.writer; print('torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_limits_of_the_host_are_untouched(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGXFSZ), resource.getrlimit(resource.RLIMIT_FSIZE), signal.pthread_sigmask(0, [])
    Writer(tmp_path / "run.mscan", make_schema()).close()
    assert before == (
        signal.getsignal(signal.SIGXFSZ),
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.pthread_sigmask(0, []),
    )
