// Curves over the steps with Plotly: the loss with its events, and the history of chosen cells.
"use strict";

// Eight colours that stay apart without full colour vision (Okabe and Ito).
pyscan.TRACES = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7f00", "#7f7f7f"];
pyscan.escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

pyscan.layout = (more) => {
  const axis = { gridcolor: pyscan.css("--grid"), linecolor: pyscan.css("--line"), zeroline: false, ticks: "", automargin: true };
  const { xaxis = {}, yaxis = {}, yaxis2, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: pyscan.css("--soft") },
    margin: { l: 44, r: 12, t: 8, b: 28 },
    showlegend: false,
    hovermode: "x",
    dragmode: "zoom",
    xaxis: { ...axis, fixedrange: false, ...xaxis },
    yaxis: { ...axis, fixedrange: true, ...yaxis },
    ...(yaxis2 ? { yaxis2: { ...axis, fixedrange: true, ...yaxis2 } } : {}),
    ...rest,
  };
};
pyscan.OPTIONS = { displayModeBar: false, responsive: true, doubleClick: "reset", scrollZoom: false };

// Mean of each bucket as a line, lowest to highest as a band around it.
pyscan.band = ({ steps, low, high, mean, num_bad }, { name, colour, yaxis = "y" }) => {
  const base = { type: "scatter", yaxis, hoverinfo: "skip", mode: "lines", line: { width: 0 } };
  const label = pyscan.escape(name);
  const hover = mean.map((m, i) => `${label} ${pyscan.text(m)}${low[i] < high[i] ? ` (${pyscan.text(low[i])} to ${pyscan.text(high[i])})` : ""}${num_bad[i] ? `, ${num_bad[i]} not finite` : ""}`);
  const bad = steps.map((step, i) => (num_bad[i] ? step : null)).filter((step) => step !== null);
  return [
    { ...base, x: steps, y: low },
    { ...base, x: steps, y: high, fill: "tonexty", fillcolor: `${colour}33` },
    { type: "scatter", mode: steps.length > 1 ? "lines" : "markers", x: steps, y: mean, yaxis, name: label, text: hover, hoverinfo: "text+x", line: { color: colour, width: 1.6 }, marker: { color: colour } },
    ...(bad.length ? [{ type: "scatter", mode: "markers", x: bad, y: bad.map(() => mean.find((m) => m !== null) ?? 1), yaxis, hoverinfo: "skip", marker: { symbol: "x", color: "#e6007e", size: 8 } }] : []),
  ];
};

// The loss and, along the top, what happened; a click goes to the step.
pyscan.drawTimeline = (holder, timelines, onJump) => {
  const traces = timelines.flatMap((data, i) => (data.mean.some((m) => m !== null) ? pyscan.band(data, { name: timelines.length > 1 ? `loss ${"AB"[i]}` : "loss", colour: pyscan.TRACES[i] }) : []));
  const span = timelines.flatMap(({ steps }) => (steps.length ? [steps[0], steps.at(-1)] : []));
  traces.push({ type: "scatter", mode: "markers", x: span, y: span.map(() => 0), yaxis: "y2", opacity: 0, hoverinfo: "skip" });
  for (const alarm of [false, true]) {
    const told = timelines.flatMap(({ events }) => events).filter((event) => event.alarm === alarm);
    const text = told.map(({ kind, step, site, text: words }) => pyscan.escape(`${kind} at ${step}${site ? `: ${site}` : ""}`) + (words ? `<br>${pyscan.escape(words).slice(0, 120)}` : ""));
    traces.push({ type: "scatter", mode: "markers", x: told.map(({ step }) => step), y: told.map(() => 1), yaxis: "y2", text, hoverinfo: "text", cliponaxis: false, marker: { symbol: "triangle-down", size: alarm ? 11 : 8, color: alarm ? pyscan.css("--bad") : pyscan.css("--soft") } });
  }
  const layout = pyscan.layout({
    hovermode: "closest",
    xaxis: { title: { text: "step", standoff: 4 } },
    yaxis: { title: { text: "loss" } },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false },
    shapes: holder.layout?.shapes ?? [],
  });
  Plotly.react(holder, traces, layout, pyscan.OPTIONS);
  if (holder.hasJump) return;
  holder.hasJump = true;
  holder.on("plotly_click", ({ points }) => onJump(points[0].x));
};

pyscan.markStep = (holder, step) => {
  if (!holder.data) return;
  const line = { type: "line", x0: step, x1: step, y0: 0, y1: 1, yref: "paper", line: { color: pyscan.css("--accent"), width: 1.5 } };
  Plotly.relayout(holder, { shapes: [line] });
};

// act above, grad below, one colour per cell; `onZoom` is given the steps in view, or nothing for all.
pyscan.drawHistory = (holder, series, onZoom) => {
  const traces = series.flatMap(({ colour, name, act, grad }) => [...(act ? pyscan.band(act, { name: `act ${name}`, colour }) : []), ...(grad ? pyscan.band(grad, { name: `grad ${name}`, colour, yaxis: "y2" }) : [])]);
  const range = holder.layout?.xaxis?.autorange === false ? { range: holder.layout.xaxis.range, autorange: false } : {};
  const layout = pyscan.layout({
    xaxis: { title: { text: "step", standoff: 4 }, anchor: "y2", ...range },
    yaxis: { type: "log", domain: [0.54, 1], title: { text: "act" }, exponentformat: "power" },
    yaxis2: { type: "log", domain: [0, 0.46], title: { text: "grad" }, exponentformat: "power" },
  });
  Plotly.react(holder, traces, layout, pyscan.OPTIONS);
  if (holder.hasZoom) return;
  holder.hasZoom = true;
  holder.on("plotly_relayout", (change) => {
    if (change["xaxis.autorange"]) onZoom(null);
    else if ("xaxis.range[0]" in change) onZoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
  });
};
