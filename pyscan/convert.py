"""From version 1.1 to version 2 and back; every uint16 value, every missing record and every sequence survives both
ways.

It receives a path and the path to write and hands on a whole file, as `rewrite` does.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array
from pyscan.errors import ScanError
from pyscan.frame_writer import FrameWriter
from pyscan.frames import Progress
from pyscan.reader import open as open_run
from pyscan.rewrite import Path, version1_part, windows, write_rows, writing
from pyscan.run import Run
from pyscan.schema import Schema
from pyscan.version1 import FIELDS, LOG2Q8_OFFSET, RECORD_DTYPE, Version1Run, encode_header


def import_version1(source: Path, target: Path, *, progress: Progress | None = None) -> None:
    """A version 1.1 file as version 2, with u16 values; with f32, which can say absent, if it lacks records."""
    run = open_run(source)
    if not isinstance(run, Version1Run):
        run.close()
        raise ScanError(f"{os.fspath(source)} has version {run.version} already; only version 1.1 files are imported")
    with run, writing(target) as file:
        sparse = run.channel("act").codec == "u16" and _has_gaps(run)
        channels = [replace(channel, codec="f32") if sparse else channel for channel in run.channels]
        schema = Schema(run.model, tuple(channels), tuple(run.sites), block=0, metadata={"version1": run.metadata})
        writer = FrameWriter(file.write, os.urandom(16), time.time_ns())
        writer.schema(schema)
        write_rows(run, [(channel.name, channel.codec) for channel in channels], writer, progress)
        writer.events(run.events)
        writer.index()


def _has_gaps(run: Version1Run) -> bool:
    """Whether a block of a site lacks the record of a token."""
    return any(
        codecs.is_absent(run.get("act", site.name, blocks=True, steps=slice(start, stop))).any()
        for start, stop in windows(run)
        for site in run.sites
    )


def export_version1(source: Path, target: Path, *, progress: Progress | None = None) -> None:
    """A run as version 1.1: a token per row, a record per block. Codes of log2q8 are stored as code + 32768."""
    with open_run(source) as run, writing(target) as file:
        codec = _export_codec(run)
        header = _header(run, codec)
        file.write(encode_header(header, 0))
        count = 0
        for start, stop in windows(run):
            records = _records(run, codec, header["id_to_param_name_map"], start, stop)
            file.write(records.tobytes())
            count += len(records)
            if progress:
                progress(stop, len(run.steps))
        file.seek(0)
        file.write(encode_header(header, count))


def _export_codec(run: Run) -> str:
    """`u16` for values that came from version 1.1, `log2q8` for all others."""
    names = {channel.name for channel in run.channels}
    if not names.issuperset(FIELDS):
        raise ScanError(f"a version 1.1 file has the channels act and grad, this run has {', '.join(sorted(names))}")
    pers = {run.channel(name).per for name in FIELDS}
    if len(pers) > 1:
        raise ScanError(
            "a version 1.1 record holds act and grad of one block, so both must be per block or both per site; "
            f"this run has act per {run.channel('act').per} and grad per {run.channel('grad').per}: "
            "export it to parquet or csv"
        )
    kinds = {run.channel(name).codec for name in FIELDS}
    imported = bool(version1_part(run.metadata)) and kinds == {"f32"}
    return "u16" if kinds == {"u16"} or imported else "log2q8"


def _header(run: Run, codec: str) -> dict[str, Any]:
    kept = run.metadata if isinstance(run, Version1Run) else version1_part(run.metadata)
    header = {"format_version": "1.1", "model_name": run.model, "timestamp": time.strftime("%Y%m%d_%H%M%S"), **kept}
    header.pop("codec", None)
    header["id_to_param_name_map"] = _ids(run, kept.get("id_to_param_name_map"))
    header["sequences"] = _sequences(run)
    return header | ({"codec": LOG2Q8_OFFSET} if codec == "log2q8" else {})


def _ids(run: Run, kept: Any) -> dict[str, str]:
    """Ids of the file the run was imported from, or else the places of the sites."""
    if isinstance(kept, dict) and {site.name for site in run.sites} <= set(kept.values()):
        return kept
    if len(run.sites) > 65536:
        raise ScanError(f"a version 1.1 file has room for 65536 sites, this run has {len(run.sites)}")
    return {str(place): site.name for place, site in enumerate(run.sites)}


def _sequences(run: Run) -> list[dict[str, Any]]:
    told = [event for event in run.events if event["kind"] == "sequence" and type(event.get("num_tokens")) is int]
    if told and sum(event["num_tokens"] for event in told) == len(run.steps):
        return [{key: value for key, value in event.items() if key not in ("kind", "step", "site")} for event in told]
    return [{"sequence_id": 0, "num_tokens": len(run.steps), "source": run.model}]


def _records(run: Run, codec: str, names: dict[str, str], start: int, stop: int) -> Array:
    """The records of some rows, token after token, inside a token by parameter id and block."""
    ids = {name: int(param_id) for param_id, name in names.items()}
    sites = sorted(run.sites, key=lambda site: ids[site.name])
    parts = [_site_records(run, site.name, ids[site.name], codec, start, stop) for site in sites]
    records = np.concatenate([part for part, _ in parts] or [np.zeros((stop - start, 0), RECORD_DTYPE)], axis=1)
    there = np.concatenate([mask for _, mask in parts] or [np.zeros((stop - start, 0), bool)], axis=1)
    said: Array = records[there]
    return said


def _site_records(run: Run, name: str, param_id: int, codec: str, start: int, stop: int) -> tuple[Array, Array]:
    """Records [rows, blocks] of a site, and which of them have something to say."""
    span = slice(start, stop)
    values = {channel: run.get(channel, name, blocks=True, steps=span) for channel in FIELDS}
    shape = values["act"].shape
    if shape[1] > 65536:
        raise ScanError(f"a version 1.1 file has room for 65536 blocks of a site, {name} has {shape[1]}")
    records = np.zeros(shape, RECORD_DTYPE)
    records["token_idx"] = np.arange(start, stop, dtype=np.uint32)[:, None]
    records["param_id"] = param_id
    records["block_idx"] = np.arange(shape[1], dtype=np.uint16)
    for channel, field in FIELDS.items():
        codes = codecs.encode(values[channel], codec)
        records[field] = codes if codec == "u16" else codes.view("<u2") ^ np.uint16(0x8000)
    return records, ~(codecs.is_absent(values["act"]) & codecs.is_absent(values["grad"]))
