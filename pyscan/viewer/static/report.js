// The report's source of data: what stands in the page itself.
"use strict";

pyscan.Embedded = class {
  colours = ["log"];
  blocks = false;

  constructor(data) {
    this.data = data;
    this.half = pyscan.unpack(data.widths).values.map((width) => 0.5 * Math.log2(width));
    this.curves = Object.fromEntries(Object.entries(data.curves).map(([channel, { low, high, mean, bad }]) => [channel, { bad, low: pyscan.unpack(low).values, high: pyscan.unpack(high).values, mean: pyscan.unpack(mean).values }]));
  }

  runs = async () => this.data.info;
  timeline = async () => this.data.timeline;

  async at(step) {
    const far = this.data.steps.map((s) => Math.abs(s - step));
    return far.indexOf(Math.min(...far));
  }

  async frame({ at, measure, scope }) {
    const { norms, sps } = this.data.snapshots[at];
    const values = { ...norms };
    let scores;
    if (measure === "sps") {
      values.sps = scores = sps[scope];
    } else {
      const [act, grad] = ["act", "grad"].map((name) => norms[name] && pyscan.unpack(norms[name]).values);
      const shown = measure === "act" ? act : measure === "grad" ? grad : grad.map((g, i) => g / act[i]);
      scores = pyscan.wrap(shown.map((v, i) => (v > 0 && Number.isFinite(v) ? Math.log2(v) - (measure === "ratio" ? 0 : this.half[i]) : NaN)));
      if (measure === "ratio") values.ratio = pyscan.wrap(shown);
    }
    const diverging = measure === "sps";
    return { at, step: this.data.steps[at], ends: diverging ? [-3, 3] : this.data.ends[measure], diverging, panels: [{ values, scores }] };
  }

  async history({ site, channel }) {
    const count = this.data.curve_steps.length;
    const { bad, ...parts } = this.curves[channel];
    const cut = (all) => Array.from(all.subarray(site * count, (site + 1) * count), (v) => (Number.isFinite(v) ? v : null));
    const num_bad = new Array(count).fill(0);
    for (const [of, place, number] of bad) if (of === site) num_bad[place] = number;
    return { steps: this.data.curve_steps, low: cut(parts.low), high: cut(parts.high), mean: cut(parts.mean), num_bad };
  }
};

// Numbers computed here, in the shape of those that were packed.
pyscan.wrap = (values) => ({ unpacked: { values, absent: new Uint8Array(values.length) } });
pyscan.unpackStored = pyscan.unpack;
pyscan.unpack = (packed) => packed.unpacked ?? pyscan.unpackStored(packed);

(async () => {
  const page = new pyscan.Page(new pyscan.Embedded(JSON.parse(pyscan.by("data").textContent)));
  pyscan.page = page;
  for (const row of document.querySelectorAll("tr[data-site]")) {
    row.addEventListener("click", (event) => {
      const pick = { run: 0, site: Number(row.dataset.site), block: -1 };
      page.select(event.shiftKey ? [...page.picked, pick].slice(-8) : [pick]);
      pyscan.by("history-card").scrollIntoView({ behavior: "smooth", block: "nearest" });
    });
  }
  await page.start();
})();
