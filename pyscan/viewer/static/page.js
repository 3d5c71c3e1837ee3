// The page: controls, maps, time axis, histories and tokens over a source of data (a server, or what a report carries).
"use strict";

pyscan.MEANINGS = {
  act: "norm of the input that meets the weight",
  grad: "norm of the weight's gradient, before clipping",
  grad_out: "norm of the gradient per block of outputs",
  sps: "SPS = z(act) − z(grad): high is strongly used and already settled",
  ratio: "gradient over input: grad / act",
  act_max: "largest magnitude of the input",
  grad_max: "largest magnitude of the gradient",
  act_bad: "values of the input that are not finite",
  grad_bad: "values of the gradient that are not finite",
};
pyscan.LABELS = { sps: "SPS", global: "model" };

pyscan.Page = class {
  constructor(source) {
    this.source = source;
    this.view = { measure: "act", colour: "log", scope: "layer", at: 0 };
    this.picked = []; // cells whose history is shown
    this.filter = () => true;
    this.zoom = null;
  }

  async start() {
    await this.load();
    const slider = pyscan.by("slider");
    slider.addEventListener("input", () => this.go(Number(slider.value)));
    pyscan.by("play").addEventListener("click", () => this.play());
    pyscan.by("filter").addEventListener("input", (event) => this.search(event.target));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    await this.go(this.info.num_steps - 1);
    await this.drawTime();
    document.body.dataset.ready = "yes";
  }

  async load() {
    this.info = await this.source.runs();
    this.heading();
    this.choose("measure", this.info.measures);
    this.choose("colour", this.source.colours);
    this.choose("scope", ["layer", "global"]);
    if (!this.info.measures.includes(this.view.measure)) this.view.measure = this.info.measures[0];
    const holder = pyscan.by("maps");
    holder.replaceChildren();
    const titles = this.info.runs.map(({ name }, i) => (this.info.runs.length > 1 ? `${"AB"[i]}: ${name}` : ""));
    if (titles.length > 1) titles.push("difference: log2(B / A)");
    const events = { onHover: (...hit) => this.hover(...hit), onPick: (...hit) => this.pick(...hit) };
    this.maps = titles.map((title) => new pyscan.MapView(holder, { title, ...events }));
    pyscan.maps = this.maps;
    this.relay();
    this.resize();
  }

  heading() {
    const parts = this.info.runs.flatMap(({ name, model, version }) => [pyscan.element("b", { text: name }), ` ${model ? `${model}, ` : ""}version ${version}  `]);
    pyscan.by("title").replaceChildren(...parts);
    document.title = `${this.info.runs.map(({ name }) => name).join(" · ")} – pyscan`;
  }

  choose(name, values) {
    const holder = pyscan.by(name);
    holder.hidden = values.length < 2;
    const buttons = values.map((value) => pyscan.element("button", { text: pyscan.LABELS[value] ?? value, value, type: "button" }));
    for (const button of buttons) {
      button.addEventListener("click", () => {
        this.view[name] = button.value;
        if (name === "measure") this.relay();
        this.press();
        this.redraw();
      });
    }
    holder.replaceChildren(...buttons);
    this.press();
  }

  press() {
    for (const name of ["measure", "colour", "scope"]) {
      for (const button of pyscan.by(name).children) button.setAttribute("aria-pressed", String(button.value === this.view[name]));
    }
    const { measure, colour, scope } = this.view;
    const idle = { colour: measure === "sps", scope: measure !== "sps" && colour === "log" };
    for (const [name, is] of Object.entries(idle)) pyscan.by(name).toggleAttribute("data-idle", is);
    const how = measure === "sps" ? ` · within the ${pyscan.LABELS[scope] ?? scope}` : colour === "z" ? ` · colour: z-score within the ${pyscan.LABELS[scope] ?? scope}` : " · colour: logarithm, per feature";
    const unit = this.info.runs.every(({ has_unit }) => has_unit) ? "" : " · version 1.1: codes without a unit";
    pyscan.by("meaning").textContent = (pyscan.MEANINGS[measure] ?? measure) + how + unit;
  }

  // Give the maps their cells anew: another channel may have others, and the filter hides some.
  relay() {
    this.maps?.forEach((map, i) => {
      const run = this.info.runs[i < this.info.runs.length ? i : 0];
      const found = this.info.runs[0].measures.find(({ name }) => name === this.view.measure);
      map.picture = null;
      map.show(run, found.per, this.filter);
    });
  }

  search(input) {
    try {
      const rule = new RegExp(input.value);
      this.filter = ({ name }) => rule.test(name);
      input.classList.remove("wrong");
    } catch {
      input.classList.add("wrong");
      return;
    }
    for (const map of this.maps) map.show(map.run, map.per, this.filter);
  }

  resize() {
    const slider = pyscan.by("slider");
    slider.max = Math.max(this.info.num_steps - 1, 0);
    slider.disabled = !this.info.num_steps;
  }

  // Go to a place of the axis. Of moves that come while one is under way, the last counts.
  async go(at) {
    this.view.at = Math.max(0, Math.min(at, this.info.num_steps - 1));
    pyscan.by("slider").value = this.view.at;
    await this.redraw();
  }

  async jump(step) {
    await this.go(await this.source.at(step));
  }

  async redraw() {
    if (!this.info.num_steps) return;
    this.wanted = { ...this.view };
    if (this.busy) return this.busy;
    this.busy = this.drain();
    await this.busy;
    this.busy = null;
    return undefined;
  }

  async drain() {
    while (this.wanted) {
      const asked = this.wanted;
      this.wanted = null;
      try {
        this.frame = { ...(await this.source.frame(asked)), asked };
      } catch (error) {
        this.lost?.(error);
        return;
      }
      if (!this.wanted || this.playing) this.repaint();
    }
  }

  repaint() {
    if (!this.frame) return;
    const { step, panels, difference, ends, diverging, asked } = this.frame;
    pyscan.by("step").textContent = `step ${pyscan.thousands(step)}`;
    const open = (parts) => Object.fromEntries(Object.entries(parts).map(([name, packed]) => [name, pyscan.unpack(packed)]));
    this.data = panels.map(({ values, scores }) => ({ values: open(values), scores: pyscan.unpack(scores) }));
    const scale = new pyscan.Scale(this.info.colours, diverging, ends);
    this.data.forEach(({ values, scores }, i) => {
      const main = values[asked.measure];
      this.maps[i].paint({ scores: scores.values, values: main.values, absent: main.absent, scale });
      this.maps[i].tell(scale, ...this.ends(ends, diverging));
    });
    if (difference) this.paintDifference(difference);
    pyscan.markStep(pyscan.by("timeline"), step);
    this.tokens(step);
  }

  ends([low, high], diverging) {
    if (diverging) return [pyscan.signed(low), `${pyscan.signed(high)} ${this.view.measure === "sps" ? "SPS" : "z"}`];
    return [pyscan.text(2 ** low), `${pyscan.text(2 ** high)}${["act", "grad"].includes(this.view.measure) && this.info.runs[0].has_unit ? " per √feature" : ""}`];
  }

  paintDifference({ scores, ends }) {
    const apart = pyscan.unpack(scores);
    const scale = new pyscan.Scale(this.info.colours, true, ends);
    const map = this.maps.at(-1);
    this.apart = apart.values;
    map.paint({ scores: apart.values, values: apart.values.map((v) => (Number.isNaN(v) ? NaN : 1)), absent: apart.values.map((v) => (Number.isNaN(v) ? 1 : 0)), scale });
    const factor = pyscan.text(2 ** ends[1]);
    map.tell(scale, `A ${factor}× larger`, `B ${factor}× larger`);
  }

  hover(cell, event, map) {
    const tip = pyscan.by("tip");
    tip.hidden = !cell || !this.data;
    if (tip.hidden) return;
    const run = map.run;
    const site = run.sites[cell.site];
    const block = site.cells[map.per] > 1 || map.per !== "site" ? this.features(run, site, cell, map.per) : "";
    const lines = this.lines(cell, map);
    const table = pyscan.element("table", {}, ...lines.map(([name, text]) => pyscan.element("tr", {}, pyscan.element("td", { text: name }), pyscan.element("td", { text }))));
    tip.replaceChildren(pyscan.element("b", { text: site.name }), block, table);
    const [x, y] = [event.clientX + 14, event.clientY + 14];
    tip.style.left = `${Math.min(x, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${y + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : y}px`;
    Object.assign(tip.dataset, { site: site.name, block: cell.block, step: this.frame.step, values: JSON.stringify(Object.fromEntries(this.numbers(cell, map))) });
  }

  features(run, site, cell, per) {
    const count = site.cells[per];
    if (count <= 1 || !run.block || per !== "block" || !site.shape.length) return count > 1 ? `block ${cell.block} of ${count}` : `whole ${site.kind === "unknown" ? "site" : site.kind}`;
    const width = site.shape.slice(1).reduce((a, b) => a * b, 1);
    return `block ${cell.block} of ${count}, features ${cell.block * run.block} to ${Math.min((cell.block + 1) * run.block, width) - 1}`;
  }

  // What a cell says, as [name, number]; of the difference both runs' values are told by their colours' cells.
  numbers(cell, map) {
    const i = this.maps.indexOf(map);
    if (i >= this.data.length) return [["difference", this.apart[cell.at]]];
    const { values, scores } = this.data[i];
    const found = Object.entries(values).map(([name, { values: v }]) => [name, v[cell.at]]);
    return [...found, ["score", scores.values[cell.at]]];
  }

  lines(cell, map) {
    const i = this.maps.indexOf(map);
    if (i >= this.data.length) {
      const d = this.apart[cell.at];
      return [["log2(B / A)", pyscan.signed(d)], ["factor", Number.isNaN(d) ? "none" : pyscan.text(2 ** d)]];
    }
    const { values, scores } = this.data[i];
    const told = Object.entries(values).map(([name, { values: v, absent }]) => [pyscan.LABELS[name] ?? name, name === "sps" ? pyscan.signed(v[cell.at]) : pyscan.text(v[cell.at], absent[cell.at])]);
    if (this.frame.asked.colour === "z" && this.frame.asked.measure !== "sps") told.push(["z-score", pyscan.signed(scores.values[cell.at])]);
    return told;
  }

  pick(cell, add, map) {
    if (!cell) return;
    const run = Math.min(this.maps.indexOf(map), this.info.runs.length) % this.info.runs.length;
    const block = this.source.blocks && map.per === "block" ? cell.block : -1;
    const same = (p) => p.site === cell.site && p.block === block && p.run === run;
    const others = add ? this.picked.filter((p) => !same(p)) : [];
    this.select(add && this.picked.some(same) ? others : [...others, { run, site: cell.site, block }].slice(-8));
  }

  select(picked) {
    const free = pyscan.TRACES.filter((colour) => !picked.some((p) => p.colour === colour));
    this.picked = picked.map((p) => ({ ...p, colour: p.colour ?? free.shift() }));
    this.maps.forEach((map, i) => {
      map.chosen = this.picked.filter(({ run }) => run === i || i >= this.info.runs.length);
      map.draw();
    });
    this.drawHistory();
  }

  label({ run, site, block }) {
    const { name, cells } = this.info.runs[run].sites[site];
    return `${this.info.runs.length > 1 ? `${"AB"[run]} ` : ""}${name.replace(/\.weight$/, "")}${block >= 0 && cells.block > 1 ? ` [${block}]` : ""}`;
  }

  async drawHistory() {
    pyscan.by("history-hint").hidden = this.picked.length > 0;
    const chips = this.picked.map((p) => {
      const dot = pyscan.element("i");
      dot.style.background = p.colour;
      const chip = pyscan.element("button", { type: "button", title: "remove" }, dot, this.label(p));
      chip.addEventListener("click", () => this.select(this.picked.filter((q) => q !== p)));
      return chip;
    });
    pyscan.by("chosen").replaceChildren(...chips);
    const holder = pyscan.by("history");
    if (!this.picked.length) {
      Plotly.purge(holder);
      holder.classList.remove("on");
      holder.hasZoom = false;
      return;
    }
    holder.classList.add("on");
    const series = await Promise.all(this.picked.map((p) => this.series(p)));
    pyscan.drawHistory(holder, series, (zoom) => {
      this.zoom = zoom;
      this.drawHistory();
    });
  }

  async series({ run, site, block, colour }) {
    const range = this.zoom ? { first: Math.max(0, Math.floor(this.zoom[0])), last: Math.max(0, Math.ceil(this.zoom[1])) } : {};
    const has = (channel) => this.info.runs[run].measures.some(({ name, per }) => name === channel && per === "block");
    const read = (channel) => (has(channel) ? this.source.history({ run, site, block, channel, points: 500, ...range }) : null);
    const [act, grad] = await Promise.all([read("act"), read("grad")]);
    return { colour, name: this.label({ run, site, block }), act, grad };
  }

  async drawTime() {
    const asked = this.info.runs.map((_, run) => this.source.timeline({ run, points: 600 }));
    const timelines = await Promise.all(asked);
    pyscan.drawTimeline(pyscan.by("timeline"), timelines, (step) => this.jump(step));
    if (this.frame) pyscan.markStep(pyscan.by("timeline"), this.frame.step);
    const told = timelines.flatMap(({ events }) => events).slice(0, 60);
    const buttons = told.map(({ kind, step, site, text, alarm }) => {
      const words = `${pyscan.thousands(step)} · ${kind.replaceAll("_", " ")}${site ? ` · ${site}` : ""}${alarm && text ? ` · ${text}` : ""}`;
      const button = pyscan.element("button", { text: words, title: text || words, type: "button", className: alarm ? "alarm" : "" });
      button.addEventListener("click", () => this.jump(step));
      return button;
    });
    pyscan.by("events").replaceChildren(...buttons);
  }

  // The whole run in some twenty seconds, however long it is.
  async play() {
    this.playing = !this.playing;
    const button = pyscan.by("play");
    button.textContent = this.playing ? "❚❚" : "▶";
    button.setAttribute("aria-label", this.playing ? "pause" : "play");
    if (this.playing && this.view.at >= this.info.num_steps - 1) await this.go(0);
    const stride = Math.max(1, Math.round(this.info.num_steps / 200));
    while (this.playing && this.view.at < this.info.num_steps - 1) {
      await this.go(this.view.at + stride);
      await new Promise((resolve) => setTimeout(resolve, 80));
    }
    if (this.playing) this.play();
  }

  // Text of the step, coloured by the norm of each token; only the last question counts.
  async tokens(step) {
    if (!this.source.tokens) return;
    const asked = (this.tokensAsked = { step, ...this.tokenView });
    await new Promise((resolve) => setTimeout(resolve, 60));
    if (this.tokensAsked !== asked) return;
    let found;
    try {
      found = await this.source.tokens({ run: 0, ...asked });
    } catch {
      found = { step: null };
    }
    if (this.tokensAsked === asked) pyscan.drawTokens(found, this);
  }
};

pyscan.drawTokens = (found, page) => {
  pyscan.by("tokens-card").hidden = found.step === null || (!found.pieces.length && !found.source);
  if (pyscan.by("tokens-card").hidden) return;
  pyscan.by("tokens-step").textContent = `${found.steps ? "of step" : "of the sequence from step"} ${pyscan.thousands(found.step)}`;
  pyscan.by("source").textContent = found.source ?? "";
  pyscan.by("tokens-controls").hidden = !found.pieces.length;
  if (!found.pieces.length) return pyscan.by("tokens").replaceChildren();
  const places = new Map(page.info.runs[0].sites.map(({ name }, place) => [name, place]));
  const options = found.sites.map((name) => pyscan.element("option", { text: name, value: places.get(name), selected: name === found.site }));
  const select = pyscan.by("tokens-site");
  select.replaceChildren(...options);
  const ask = (change) => {
    page.tokenView = { ...page.tokenView, ...change };
    page.tokens(page.frame.step);
  };
  select.onchange = () => ask({ site: select.value });
  const channels = found.steps ? ["contribution", "act", "grad"] : ["act", "grad"];
  pyscan.by("tokens-channel").replaceChildren(...channels.map((name) => {
    const button = pyscan.element("button", { text: name, type: "button", "aria-pressed": String(name === found.channel) });
    button.addEventListener("click", () => ask({ channel: name }));
    return button;
  }));
  pyscan.paintTokens(found, page);
};

pyscan.paintTokens = ({ pieces, values: packed, channel }, page) => {
  const { values, absent } = pyscan.unpack(packed);
  const levels = values.map((v) => (v > 0 && Number.isFinite(v) ? Math.log2(v) : NaN));
  const known = levels.filter((v) => !Number.isNaN(v)).sort();
  const scale = new pyscan.Scale(page.info.colours, false, [known[0] ?? 0, Math.max(known.at(-1) ?? 1, (known[0] ?? 0) + 0.1)]);
  const holder = pyscan.by("tokens");
  holder.classList.toggle("ids", pieces.every((piece) => /^\d+$/.test(piece)));
  holder.replaceChildren(...pieces.map((piece, i) => {
    const span = pyscan.element("span", { text: piece, title: `${channel} ${pyscan.text(values[i], absent[i])}` });
    const at = (levels[i] - scale.low) / (scale.high - scale.low);
    span.style.background = scale.of(levels[i], values[i], absent[i]) ?? "var(--wash)";
    span.style.color = at > 0.6 ? "#111" : Number.isNaN(at) ? "" : "#fff";
    span.dataset.value = values[i];
    return span;
  }));
};
