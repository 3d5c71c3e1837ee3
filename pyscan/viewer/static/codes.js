// Numbers as the file stores them, as values, text and colours. Nothing here knows the page.
"use strict";
const pyscan = {};

pyscan.ABSENT_BITS = 0x7fc0ab5e;

// {codec, data} -> values as doubles, and which of them were not observed.
pyscan.unpack = ({ codec, data }) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  if (codec === "u16") {
    const values = Float64Array.from(new Uint16Array(bytes.buffer));
    return { values, absent: new Uint8Array(values.length) };
  }
  if (codec === "f32") {
    const values = Float64Array.from(new Float32Array(bytes.buffer));
    const absent = Uint8Array.from(new Uint32Array(bytes.buffer), (bits) => (bits === pyscan.ABSENT_BITS ? 1 : 0));
    return { values, absent };
  }
  const codes = new Int16Array(bytes.buffer);
  const reserved = { "-32768": 0, "-32767": NaN, 32766: NaN, 32767: Infinity };
  const values = Float64Array.from(codes, (code) => (code in reserved ? reserved[code] : Math.fround(2 ** (code / 256))));
  return { values, absent: Uint8Array.from(codes, (code) => (code === -32767 ? 1 : 0)) };
};

// A number in few characters, as pyscan's tables write it.
pyscan.text = (value, absent) => {
  if (absent || value === null || value === undefined) return "not observed";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "-infinite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e-3 && size < 99999.5 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
};

pyscan.signed = (value) => (Number.isNaN(value) ? "none" : (value >= 0 ? "+" : "") + value.toFixed(2));
pyscan.thousands = (n) => n.toLocaleString("en-US");

pyscan.isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
pyscan.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
pyscan.rgb = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// 256 colours between the anchors of a scale.
pyscan.ramp = (anchors) =>
  Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (anchors.length - 1);
    const low = Math.min(Math.floor(at), anchors.length - 2);
    return pyscan.rgb(anchors[low].map((c, k) => Math.round(c + (anchors[low + 1][k] - c) * (at - low))));
  });

pyscan.Scale = class {
  constructor(colours, diverging, [low, high]) {
    const name = diverging ? (pyscan.isDark() ? "diverging_dark" : "diverging") : "sequential";
    this.colours = pyscan.ramp(colours.scales[name]);
    this.marks = colours.marks;
    this.low = low;
    this.high = high;
  }

  // The colour of a cell from its score; what has no score is told by its value.
  of(score, value, absent) {
    if (absent) return null;
    if (Number.isFinite(score)) {
      const at = Math.round((255 * (score - this.low)) / (this.high - this.low));
      return this.colours[Math.max(0, Math.min(255, at))];
    }
    if (value === 0) return pyscan.rgb(this.marks.zero);
    if (Number.isFinite(value) || score === Infinity || score === -Infinity) {
      return score > 0 ? this.colours[255] : score < 0 ? this.colours[0] : null;
    }
    return pyscan.rgb(this.marks.not_finite);
  }
};

// Small helpers for elements; text never becomes markup.
pyscan.element = (tag, { text, ...rest } = {}, ...children) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(rest)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
};
pyscan.by = (id) => document.getElementById(id);
