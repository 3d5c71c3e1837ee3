"""What the JSON of a schema frame says, as frozen dataclasses that are valid once they exist.

`Schema.from_json` receives bytes nobody vouches for and raises ScanFormatError for everything FORMAT.md does not allow.
`Layout` hands on where the cells of each site stand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from pyscan.codecs import DTYPES
from pyscan.errors import ScanFormatError
from pyscan.format import ROW_DTYPE, pad64
from pyscan.strict_json import choice, count, json_list, json_object, loads_strict, names, text, unique

PERS = ("block", "row_block", "site")
TRANSFORMS = ("root", "plain")
OPS = ("sumsq", "add", "max")
ROW_KINDS = ("step", "sequence")


@dataclass(frozen=True)
class Channel:
    """One kind of number a row holds."""

    name: str
    per: str = "block"
    codec: str = "log2q8"
    transform: str = "root"
    op: str = "sumsq"

    def __post_init__(self) -> None:
        text(self.name, "channel name")
        choice(self.per, PERS, "per")
        choice(self.codec, tuple(DTYPES), "codec")
        choice(self.transform, TRANSFORMS, "transform")
        choice(self.op, OPS, "op")


@dataclass(frozen=True)
class Merge:
    """How the ranks' cells of one channel become one: combine over some mesh dimensions, take one of the others."""

    over: tuple[str, ...]
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteInfo:
    """One weight matrix and the place where it meets its input."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_blocks: int
    num_row_blocks: int = 0
    tied_to: str | None = None
    offset: tuple[int, int] = (0, 0)
    merge: Mapping[str, Merge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value, what in ((self.name, "site name"), (self.kind, "kind"), (self.dtype, "dtype")):
            text(value, what)
        if self.tied_to is not None:
            text(self.tied_to, "tied_to")
        for number in (*self.shape, *self.offset, self.num_blocks, self.num_row_blocks):
            count(number, f"a number of site {self.name!r}")
        if len(self.shape) > 32:
            raise ScanFormatError(f"site {self.name!r} has {len(self.shape)} dimensions, at most 32 are possible")

    def num_cells(self, per: str) -> int:
        return {"block": self.num_blocks, "row_block": self.num_row_blocks, "site": 1}[per]


@dataclass(frozen=True)
class Mesh:
    """All ranks as an array, and the place of one; the ranks along the dimensions `data` see other rows."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    coords: tuple[int, ...]
    data: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.dims) == len(self.shape) == len(self.coords) <= 32 or len(set(self.dims)) != len(self.dims):
            raise ScanFormatError(f"a mesh names each dimension once with its size and coordinate, got {self.dims}")
        if math.prod(count(size, "mesh size") for size in self.shape) > 2**20:
            raise ScanFormatError("a mesh has at most 2**20 ranks")
        for dim, size, coord in zip(self.dims, self.shape, self.coords, strict=True):
            text(dim, "mesh dimension")
            if not 0 <= count(coord, "mesh coordinate") < count(size, "mesh size"):
                raise ScanFormatError(f"mesh coordinate {coord} is outside the size {size} of {dim!r}")


@dataclass(frozen=True)
class Schema:
    """What governs the rows that follow it in the file."""

    model: str
    channels: tuple[Channel, ...]
    sites: tuple[SiteInfo, ...]
    block: int = 64
    every: int = 1
    rank: int = 0
    world: int = 1
    mesh: Mesh | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    metadata: Any = None
    row_kind: str = "step"

    def __post_init__(self) -> None:
        text(self.model, "model")
        count(self.block, "block")
        if count(self.every, "every") < 1:
            raise ScanFormatError(f"every must be >= 1, got {self.every}")
        if not 0 <= count(self.rank, "rank") < count(self.world, "world") <= 2**20:
            raise ScanFormatError(f"rank must be below world, got rank {self.rank} of {self.world}")
        choice(self.row_kind, ROW_KINDS, "row_kind")
        unique((channel.name for channel in self.channels), "channel")
        unique((site.name for site in self.sites), "site")

    @classmethod
    def from_json(cls, data: bytes) -> Schema:
        raw = json_object(loads_strict(data), "schema")
        mesh = raw.get("mesh")
        return cls(
            model=raw.get("model"),  # type: ignore[arg-type]  # checked by __post_init__
            channels=tuple(map(_channel, json_list(raw.get("channels"), "channels"))),
            sites=tuple(map(_site, json_list(raw.get("sites"), "sites"))),
            block=raw.get("block"),  # type: ignore[arg-type]
            every=raw.get("every", 1),
            rank=raw.get("rank", 0),
            world=raw.get("world", 1),
            mesh=None if mesh is None else _mesh(json_object(mesh, "mesh")),
            versions=json_object(raw.get("versions", {}), "versions"),
            metadata=raw.get("metadata"),
            row_kind=raw.get("row_kind", "step"),
        )

    def to_json(self) -> bytes:
        raw: dict[str, Any] = {
            "model": self.model,
            "block": self.block,
            "every": self.every,
            "channels": [vars(channel) for channel in self.channels],
            "sites": [_site_json(site) for site in self.sites],
            "rank": self.rank,
            "world": self.world,
            "versions": dict(self.versions),
            "metadata": self.metadata,
        }
        if self.mesh is not None:
            raw["mesh"] = vars(self.mesh)
        if self.row_kind != "step":
            raw["row_kind"] = self.row_kind
        try:
            return json.dumps(raw, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise ScanFormatError(f"the metadata cannot be written as JSON: {str(error)[:120]}") from None


class Layout:
    """Where the cells of a schema's sites stand in a row and in the payload of a steps frame."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.channel_index = {channel.name: i for i, channel in enumerate(schema.channels)}
        self.site_index = {site.name: i for i, site in enumerate(schema.sites)}
        starts = {per: [0, *accumulate(site.num_cells(per) for site in schema.sites)] for per in PERS}
        self._starts = [starts[channel.per] for channel in schema.channels]
        self.num_cells = [channel_starts[-1] for channel_starts in self._starts]
        self._sections: dict[int, tuple[list[int], int]] = {}

    def with_schema(self, schema: Schema) -> Layout:
        """The layout of a schema with the same cells, which shares with this one what they have in common."""
        other = copy(self)
        other.schema = replace(schema, sites=self.schema.sites, channels=self.schema.channels)
        return other

    def cells(self, channel: int, site: int) -> tuple[int, int]:
        """First cell of the site in the channel's section and the one after its last."""
        starts = self._starts[channel]
        return starts[site], starts[site + 1]

    def packing(self) -> list[tuple[str, str, int]]:
        """Codec, transform and number of cells of each channel, in the order of a row."""
        cells = zip(self.schema.channels, self.num_cells, strict=True)
        return [(channel.codec, channel.transform, num_cells) for channel, num_cells in cells]

    def sections(self, rows: int) -> tuple[list[int], int]:
        """Payload offset of each channel's section, and the payload's length, for a frame of so many rows."""
        if rows not in self._sections:
            offsets, end = [], pad64(rows * ROW_DTYPE.itemsize)
            for channel, num_cells in zip(self.schema.channels, self.num_cells, strict=True):
                offsets.append(end)
                end += pad64(num_cells * rows * DTYPES[channel.codec].itemsize)
            self._sections[rows] = offsets, end
        return self._sections[rows]


def _channel(raw: Any) -> Channel:
    got = json_object(raw, "channel")
    return Channel(*(got.get(key) for key in ("name", "per", "codec", "transform", "op")))  # type: ignore[arg-type]


def _site(raw: Any) -> SiteInfo:
    got = json_object(raw, "site")
    offset = json_list(got.get("offset") or [0, 0], "offset")
    if len(offset) != 2:
        raise ScanFormatError(f"offset is [row, column], got {len(offset)} numbers")
    return SiteInfo(
        name=got.get("name"),  # type: ignore[arg-type]
        kind=got.get("kind"),  # type: ignore[arg-type]
        shape=tuple(json_list(got.get("shape"), "shape")),
        dtype=got.get("dtype"),  # type: ignore[arg-type]
        num_blocks=got.get("blocks"),  # type: ignore[arg-type]
        num_row_blocks=got.get("row_blocks", 0),
        tied_to=got.get("tied_to"),
        offset=(offset[0], offset[1]),
        merge=_rules(json.dumps(json_object(got.get("merge") or {}, "merge"))),
    )


@lru_cache(256)
def _rules(encoded: str) -> Mapping[str, Merge]:
    """The rules of a site's channels; most sites of most ranks have the same ones, which are kept once."""
    return {name: _merge(rule) for name, rule in json.loads(encoded).items()}


def _merge(raw: Any) -> Merge:
    got = json_object(raw, "merge rule")
    return Merge(names(got.get("over", []), "over"), names(got.get("replicas", []), "replicas"))


def _mesh(got: dict[str, Any]) -> Mesh:
    return Mesh(
        names(got.get("dims"), "mesh dims"),
        tuple(json_list(got.get("shape"), "mesh shape")),
        tuple(json_list(got.get("coords"), "mesh coords")),
        names(got.get("data", []), "mesh data"),
    )


def _site_json(site: SiteInfo) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "name": site.name,
        "kind": site.kind,
        "shape": site.shape,
        "dtype": site.dtype,
        "blocks": site.num_blocks,
    }
    optional = {
        "row_blocks": site.num_row_blocks,
        "tied_to": site.tied_to,
        "offset": site.offset if any(site.offset) else None,
        "merge": {name: vars(rule) for name, rule in site.merge.items()},
    }
    return raw | {key: value for key, value in optional.items() if value}
