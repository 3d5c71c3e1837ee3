// The map of a model on a canvas: a row per layer, a box per module, a cell per block.
"use strict";

pyscan.MapView = class {
  static GAP = 7;
  static HEAD = 34;

  constructor(holder, { title, onHover, onPick }) {
    this.run = null;
    this.cells = []; // {site, block, at, x, y, w, h}: `at` is its place among all cells of the run
    this.chosen = [];
    this.canvas = pyscan.element("canvas", { role: "img" });
    this.heading = pyscan.element("h3", { text: title || "" });
    this.legend = pyscan.element("div", { className: "legend" });
    holder.append(pyscan.element("div", { className: "map" }, this.heading, this.canvas, this.legend));
    this.canvas.addEventListener("mousemove", (event) => onHover(this.hit(event), event, this));
    this.canvas.addEventListener("mouseleave", () => onHover(null, null, this));
    this.canvas.addEventListener("click", (event) => onPick(this.hit(event), event.shiftKey, this));
    new ResizeObserver(() => this.redraw()).observe(holder);
  }

  // `keep` says of a site whether the filter lets it stay.
  show(run, per, keep) {
    Object.assign(this, { run, per, keep });
    let start = 0;
    this.starts = run.sites.map((site) => (start += site.cells[per]) - site.cells[per]);
    this.redraw();
  }

  paint({ scores, values, absent, scale }) {
    this.picture = { scores, values, absent, scale };
    this.draw();
  }

  redraw() {
    if (!this.run || !this.canvas.clientWidth) return;
    this.place(this.canvas.clientWidth);
    this.draw();
  }

  // Sections with the columns and rows that have a site to show.
  sections() {
    const kept = (box) => box.filter((site) => this.keep(this.run.sites[site]));
    return this.run.sections
      .map(({ title, columns, rows }) => {
        const shown = rows.map(({ label, boxes }) => ({ label, boxes: boxes.map(kept) })).filter((r) => r.boxes.some((b) => b.length));
        const sizes = columns.map((_, i) => Math.max(0, ...shown.map(({ boxes }) => this.size(boxes[i]))));
        return { title, columns, rows: shown, sizes };
      })
      .filter(({ rows }) => rows.length);
  }

  size(box) {
    return box.reduce((sum, site) => sum + this.run.sites[site].cells[this.per], 0);
  }

  // Lines per box and width of a cell: as few lines as leave cells wide enough to see and to hit.
  fit(sections, room) {
    const widest = Math.max(1, ...sections.map(({ sizes }) => Math.max(...sizes)));
    for (let lines = 1; ; lines += 1) {
      const width = Math.min(...sections.map(({ sizes }) => {
        const used = sizes.filter((size) => size);
        return (room - pyscan.MapView.GAP * used.length) / used.reduce((sum, size) => sum + Math.ceil(size / lines), 0);
      }));
      if (width >= 4.5 || lines >= widest || lines >= 24) return { lines, width: Math.max(1, Math.min(width, widest > 1 ? 22 : 150)) };
    }
  }

  place(width) {
    const sections = this.sections();
    const labels = sections.flatMap(({ rows }) => rows.map(({ label }) => label));
    this.gutter = Math.min(width < 500 ? 84 : 130, 14 + 6.6 * Math.max(1, ...labels.map((label) => label.length)));
    const { lines, width: cell } = this.fit(sections, width - this.gutter);
    const height = lines > 1 ? Math.max(4, Math.min(9, cell)) : 17;
    this.cells = [];
    this.words = [];
    let y = 0;
    for (const { title, columns, rows, sizes } of sections) {
      const lefts = [];
      let x = this.gutter;
      sizes.forEach((size, i) => {
        lefts[i] = x;
        x += size ? Math.min(size, Math.ceil(size / lines)) * cell + pyscan.MapView.GAP : 0;
      });
      if (title) {
        this.name(columns, sizes, lefts, x, y);
        y += pyscan.MapView.HEAD;
      } else y += y ? 8 : 0;
      for (const { label, boxes } of rows) {
        const used = Math.max(...boxes.map((box) => Math.min(lines, Math.max(1, this.size(box)))));
        this.words.push({ text: label, x: this.gutter - 8, y: y + (used * height) / 2, align: "right", room: this.gutter - 8 });
        boxes.forEach((box, i) => this.fill(box, lefts[i], y, cell, height, Math.ceil(sizes[i] / lines)));
        y += used * height + (lines > 1 ? 4 : 2);
      }
    }
    this.height = y + 2;
  }

  // Names of the columns, and above them the part that neighbours share: self_attn, mlp.
  name(columns, sizes, lefts, end, y) {
    let group = null;
    columns.forEach((column, i) => {
      if (!sizes[i]) return;
      const dot = column.lastIndexOf(".");
      const above = column.slice(0, Math.max(dot, 0));
      const next = lefts.slice(i + 1).find((left, k) => sizes[i + 1 + k]) ?? end;
      this.words.push({ text: column.slice(dot + 1), x: lefts[i], y: y + 25, align: "left", room: next - lefts[i] - 4 });
      if (above && above !== group) {
        const last = columns.reduce((far, c, k) => (k >= i && sizes[k] && c.startsWith(above + ".") ? k : far), i);
        const right = lefts.slice(last + 1).find((left, k) => sizes[last + 1 + k]) ?? end;
        this.words.push({ text: above, x: lefts[i], y: y + 11, align: "left", room: right - lefts[i] - 4, strong: true });
      }
      group = above;
    });
  }

  fill(box, x, y, width, height, perLine) {
    let count = 0;
    for (const site of box) {
      for (let block = 0; block < this.run.sites[site].cells[this.per]; block += 1, count += 1) {
        const left = x + (count % perLine) * width;
        const cell = { site, block, at: this.starts[site] + block, x: left, y: y + Math.floor(count / perLine) * height, w: width, h: height };
        this.cells.push(cell);
      }
    }
  }

  draw() {
    if (!this.run || !this.canvas.clientWidth) return;
    const ratio = devicePixelRatio || 1;
    const { clientWidth } = this.canvas;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = clientWidth * ratio;
    this.canvas.height = this.height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.write(pen);
    if (this.picture) this.colour(pen);
  }

  colour(pen) {
    const { scores, values, absent, scale } = this.picture;
    const inset = this.cells.length && this.cells[0].w >= 4 ? 0.7 : 0;
    const empty = pyscan.css("--wash");
    for (const { at, x, y, w, h } of this.cells) {
      pen.fillStyle = scale.of(scores[at], values[at], absent[at]) ?? empty;
      pen.fillRect(x, y, Math.max(w - inset, 0.8), Math.max(h - inset, 0.8));
    }
    this.chosen.forEach(({ site, block, colour }) => {
      pen.strokeStyle = colour;
      pen.lineWidth = 2;
      const mine = this.cells.filter((c) => c.site === site && (block < 0 || c.block === block));
      if (!mine.length) return;
      const [left, top] = [Math.min(...mine.map((c) => c.x)), Math.min(...mine.map((c) => c.y))];
      const [right, bottom] = [Math.max(...mine.map((c) => c.x + c.w)), Math.max(...mine.map((c) => c.y + c.h))];
      pen.strokeRect(left - 1, top - 1, right - left + 1, bottom - top + 1);
    });
  }

  write(pen) {
    const family = getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    for (const { text, x, y, align, room, strong } of this.words) {
      pen.font = `${strong ? 600 : 400} 11px ${family}`;
      pen.fillStyle = pyscan.css(strong ? "--ink" : "--soft");
      pen.textAlign = align;
      pen.fillText(this.cut(pen, text, room, align === "right"), x, y);
    }
  }

  // As much of a word as there is room for: without what many words end with, then without its beginning or end.
  cut(pen, text, room, keepEnd) {
    const fits = (word) => pen.measureText(word).width <= room;
    for (const word of [text, text.replace(/_proj$/, ""), keepEnd ? text.split(".").at(-1) : text]) if (fits(word)) return word;
    for (let n = text.length - 1; n > 0; n -= 1) {
      const word = keepEnd ? `…${text.slice(-n)}` : `${text.replace(/_proj$/, "").slice(0, n)}…`;
      if (fits(word)) return word;
    }
    return "";
  }

  hit(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    return this.cells.find((c) => x >= c.x && x < c.x + c.w && y >= c.y && y < c.y + c.h) ?? null;
  }

  // The scale under the map: its ends in the unit of the values, and what is no number.
  tell(scale, low, high) {
    const bar = pyscan.element("span", { className: "bar" });
    bar.style.background = `linear-gradient(90deg, ${scale.colours.filter((_, i) => i % 15 === 0).join(",")})`;
    const marks = [["zero", "0"], ["not_finite", "not finite"]].flatMap(([name, text]) => {
      const swatch = pyscan.element("span", { className: "swatch" });
      swatch.style.background = pyscan.rgb(scale.marks[name]);
      return [swatch, text];
    });
    const none = pyscan.element("span", { className: "swatch" });
    none.style.background = "var(--wash)";
    this.legend.replaceChildren(low, bar, high, ...marks, none, "not observed");
  }
};
