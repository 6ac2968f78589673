// Draws the charts from the JSON in the page. Colours come from the style sheet, so a change of theme is a redraw.
// The live page calls page.show with new data; what the reader has chosen (axis, groups, switches) stays.
"use strict";
const page = (() => {
  const AXES = { step: "Steps", tokens: "Training tokens", train: "Train time", wall: "Wall time" };
  const PALETTE = 9; // --run-0 to --run-8
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "star", "cross"];
  const FENCE = 1.5; // interquartile ranges beyond the quartiles: what lies further away does not stretch the frame
  const UNIFIED_LINES = 8; // more lines in one hover box would cover the chart
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  const byId = (id) => document.getElementById(id);
  const chosen = { axis: "step", hidden: new Set(), whole: false, each: false };
  let data = JSON.parse(byId("data").textContent);

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const runColor = (index) => color(`run-${index % PALETTE}`);
  const isNarrow = () => innerWidth < 640;
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // plotly reads names as markup
  const cut = (text, room) => plain(text.length > room ? `${text.slice(0, room - 1)}…` : text); // a long name pushes the chart off the screen
  const short = (label) => cut(label, isNarrow() ? 22 : 48);
  function lines(text, room) { // on a phone as many as it takes, broken where a word ends if one does
    if (!isNarrow() || text.length <= room) return [short(text)];
    const found = [""], words = text.split(/(?<=[ \-_/])/).flatMap((word) => word.match(new RegExp(`.{1,${room}}`, "g")));
    for (const word of words) {
      if (found.at(-1) && (found.at(-1) + word).trim().length > room) found.push("");
      found[found.length - 1] += word;
    }
    return found.map((line) => plain(line.trim()));
  }

  function unitOf(axis, largest) {
    if (axis === "step" || axis === "tokens") return [1, ""];
    return largest > 3 * 3600 ? [3600, " (h)"] : largest > 600 ? [60, " (min)"] : [1, " (s)"];
  }
  function scaled() {
    const ends = data.runs.flatMap((run) => [run.x[chosen.axis].at(-1) ?? 0, run.val.x[chosen.axis].at(-1) ?? 0]);
    const largest = Math.max(1, ...ends);
    const [unit, suffix] = unitOf(chosen.axis, largest);
    return { title: AXES[chosen.axis] + suffix, range: [-0.01 * largest / unit, 1.01 * largest / unit],
      of: (x) => x[chosen.axis].map((v) => (v === null ? null : v / unit)) };
  }

  // ---- loss

  function runTraces(run, x, { alone, thin }) {
    const c = runColor(run.group), name = short(run.label), line = { color: c, simplify: false };
    const marker = { color: color("panel"), size: 8, symbol: SYMBOLS[run.group % 6], line: { color: c, width: 2 } };
    const traces = [{ name: alone ? "training, smoothed" : name, x: x.of(run.x), y: run.smooth, mode: "lines",
      line: { ...line, width: thin ? 1 : 2, dash: run.group < PALETTE ? "solid" : "dash" }, opacity: thin ? 0.55 : 1 }];
    if (thin) return traces;
    if (run.loss) {
      traces.unshift({ name: "each step", x: x.of(run.x), y: run.loss, mode: "lines", line: { ...line, width: 1 },
        opacity: alone ? 0.4 : 0.18, hoverinfo: alone ? undefined : "skip" });
    }
    traces.push({ name: alone ? "validation" : `${name}, validation`, x: x.of(run.val.x), y: run.val.loss, mode: "markers", marker });
    return traces;
  }
  function groupTraces(group, number, x) {
    const runs = data.runs.filter((run) => run.group === number);
    if (!group.mean) return runs.flatMap((run) => runTraces(run, x, { alone: data.runs.length === 1, thin: false }));
    const c = runColor(number), { mean, val } = group;
    const edge = { x: x.of(mean.x), mode: "lines", line: { width: 0, color: c }, hoverinfo: "skip" };
    const traces = [
      { ...edge, y: mean.low },
      { ...edge, y: mean.high, fill: "tonexty", fillcolor: `${c}33` },
      { name: `${short(group.label)} (mean)`, x: x.of(mean.x), y: mean.mean, mode: "lines",
        line: { color: c, width: 2, simplify: false, dash: number < PALETTE ? "solid" : "dash" } },
    ];
    if (val) {
      const off = (other) => val.mean.map((v, i) => Math.abs(other[i] - v));
      traces.push({ name: `${short(group.label)}, validation`, x: x.of(val.x), y: val.mean, mode: "markers",
        error_y: { type: "data", symmetric: false, array: off(val.high), arrayminus: off(val.low), color: c, thickness: 1.5, width: 4 },
        marker: { color: color("panel"), size: 8, symbol: SYMBOLS[number % 6], line: { color: c, width: 2 } } });
    }
    const apart = runs.filter((run) => chosen.each || !run.in_mean); // a run in progress is seen beside the mean
    traces.push(...apart.flatMap((run) => runTraces(run, x, { alone: false, thin: true })));
    return traces;
  }
  const isShown = (number) => !chosen.hidden.has(data.groups[number].label);

  function lossRange() {
    if (chosen.whole) return undefined;
    const runs = data.runs.filter((run) => isShown(run.group));
    const after = (run, xs, ys, end) => ys.filter((y, i) => y !== null && xs[i] >= data.start_share * end);
    const losses = (run, end) => [...after(run, run.x.step, run.smooth, end), ...after(run, run.val.x.step, run.val.loss, end)];
    let all = runs.flatMap((run) => losses(run, run.steps)); // those that have only begun do not rule the frame
    if (!all.length) all = runs.flatMap((run) => losses(run, run.x.step.at(-1) ?? 0)); // unless all of them have
    if (!all.length) return undefined;
    all.sort((a, b) => a - b);
    const at = (share) => all[Math.floor(share * (all.length - 1))], reach = FENCE * (at(0.75) - at(0.25));
    const raw = runs.flatMap((run) => (data.groups[run.group].mean ? [] : after(run, run.x.step, run.loss ?? [], run.steps)));
    const low = Math.max([...raw, at(0)].reduce((a, b) => Math.min(a, b)), at(0.25) - reach), high = Math.min(at(1), at(0.75) + reach);
    if (!(high > low)) return undefined;
    const margin = 0.06 * (high - low);
    return [low - margin, high + margin];
  }

  function drawLoss() {
    if (!byId("loss")) return;
    const x = scaled();
    const traces = data.groups.flatMap((group, number) => (isShown(number) ? groupTraces(group, number, x) : []));
    const named = traces.map((trace) => ({ hovertemplate: trace.hoverinfo ? undefined : "%{y:.4f}", ...trace, showlegend: data.runs.length === 1 }));
    plot("loss", named, {
      hovermode: data.groups.length > UNIFIED_LINES ? "closest" : "x unified",
      xaxis: { title: { text: x.title }, range: x.range, unifiedhovertitle: { text: `${x.title} %{x}` } },
      yaxis: { title: { text: "Loss (nats per token)" }, range: lossRange() },
    });
  }

  function drawLegend() {
    const box = byId("legend");
    if (!box) return;
    const labels = data.groups.map((group) => [group.label, group.n]);
    if (box.dataset.labels === JSON.stringify(labels)) return;
    box.dataset.labels = JSON.stringify(labels);
    box.replaceChildren(...labels.map(([label, n], number) => {
      const row = document.createElement("label"), input = document.createElement("input"), key = document.createElement("span");
      Object.assign(input, { type: "checkbox", checked: !chosen.hidden.has(label) });
      input.dataset.group = label;
      key.className = "key";
      key.style.background = `var(--run-${number % PALETTE})`;
      row.append(input, key, n > 1 ? `${label}, ${n} runs` : label);
      return row;
    }));
  }

  // ---- everything else

  function drawSmall(id, shape, format) {
    if (!byId(id)) return;
    const traces = data.groups.map((group, number) => group.schedule[id] && ({ name: short(group.label), ...group.schedule[id],
      mode: "lines", showlegend: false, line: { color: runColor(number), width: 1.75, shape, simplify: false }, hovertemplate: `%{y:${format}}` }))
      .filter((trace, number) => trace && isShown(number));
    plot(id, traces, { hovermode: traces.length > UNIFIED_LINES ? "closest" : "x unified", yaxis: { rangemode: "tozero", nticks: 4 }, xaxis: { nticks: 5 } });
  }
  // Rows from top to bottom, by number, since two may have one name.
  function plotRows(id, labels, traces, { title, legend = false, format, ...rest }) {
    const legendRows = legend ? Math.ceil(traces.length / (isNarrow() ? 1 : 4)) : 0;
    const head = lines(title, 26), names = labels.map((label) => lines(label, 20));
    const below = 16 * head.length; // without room of its own a title lies on the numbers
    const row = Math.max(34, ...names.map((name) => 4 + 15 * name.length));
    byId(id).style.height = `${70 + below + 24 * legendRows + row * labels.length}px`;
    const rows = { tickvals: labels.map((_, i) => i), ticktext: names.map((name) => name.join("<br>")), range: [labels.length - 0.4, -0.6], fixedrange: true };
    plot(id, traces.map((trace) => ({ showlegend: legend, ...trace })), { hovermode: "closest", barmode: "stack", bargap: 0.35,
      xaxis: { title: { text: head.join("<br>") }, tickformat: format, nticks: isNarrow() ? 4 : 8, ...rest.xaxis }, yaxis: rows, shapes: rest.shapes ?? [] });
  }
  function drawParts(id, labels, parts, values, title) {
    if (!byId(id)) return;
    plotRows(id, labels, parts.map(plain).map((part, k) => ({ type: "bar", orientation: "h", name: part, y: labels.map((_, i) => i),
      x: values.map((row) => row[k]), marker: { color: runColor(k) }, hovertemplate: `${part}: %{x:.4g}<extra></extra>` })), { title, legend: parts.length > 1 });
  }
  function drawCosts() {
    const known = (key) => data.groups.filter((group) => [group[key]].flat().some((v) => v !== null)).slice(0, data.most_bars);
    const timed = known("wall"), sized = known("peak");
    drawParts("wall-time", timed.map((g) => g.label), data.parts, timed.map((g) => g.wall), "Seconds since launch");
    drawParts("memory", sized.map((g) => g.label), ["peak memory, GiB"], sized.map((g) => [g.peak / 2 ** 30]), "GiB");
  }
  function drawWaterfall({ waterfall: bars }, number) {
    const id = `waterfall-${number}`;
    if (!byId(id)) return;
    let at = 0;
    const spans = bars.map((bar) => {
      const from = bar.kind === "start" || bar.kind === "end" ? null : at;
      at = from === null ? bar.value : at + bar.value;
      return [from, at];
    });
    const ends = spans.flat().filter((v) => v !== null), room = (isNarrow() ? 0.9 : 0.3) * (Math.max(...ends) - Math.min(...ends) || 0.01);
    const range = [Math.min(...ends) - room, Math.max(...ends) + room];
    const kinds = { start: "run-6", end: "run-6", interaction: "run-3" };
    const drawn = { type: "bar", orientation: "h", y: bars.map((_, i) => i), base: spans.map(([from]) => from ?? range[0]),
      x: spans.map(([from, to]) => to - (from ?? range[0])), textposition: "outside", cliponaxis: false,
      marker: { color: bars.map((bar) => color(kinds[bar.kind] ?? (bar.value < 0 ? "run-2" : "run-1"))) },
      text: bars.map((bar) => (bar.kind in kinds && bar.kind !== "interaction" ? bar.value.toFixed(4) : `${bar.value < 0 ? "−" : "+"}${Math.abs(bar.value).toFixed(4)}`)),
      hovertemplate: "%{text}<extra></extra>" };
    const joints = spans.slice(0, -1).map(([, to], i) => ({ type: "line", x0: to, x1: to, y0: i, y1: i + 1, layer: "below", line: { color: color("quiet"), width: 1, dash: "dot" } }));
    plotRows(id, bars.map((bar) => bar.label), [drawn], { title: "Loss (the axis does not begin at 0)", xaxis: { range }, shapes: joints });
  }
  function drawEffects({ effects }, number) {
    const id = `effects-${number}`;
    if (!byId(id)) return;
    const colors = effects.map((e) => color(e.noise ? "quiet" : e.mean < 0 ? "run-2" : "run-1"));
    const between = (e) => (e.low === null ? "one seed only" : `${e.low.toFixed(4)} to ${e.high.toFixed(4)}`);
    const points = effects.map((e, i) => ({ mode: "markers", x: [e.mean], y: [i], marker: { size: 9, color: colors[i], symbol: e.kind === "add-one-in" ? "diamond" : "circle" },
      error_x: { type: "data", symmetric: false, array: [(e.high ?? e.mean) - e.mean], arrayminus: [e.mean - (e.low ?? e.mean)], color: colors[i], thickness: 2, width: 5 },
      hovertemplate: `${short(e.title)}, ${e.kind}: %{x:+.4f} (${between(e)})<extra></extra>` }));
    const zero = { type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, line: { color: color("quiet"), width: 1 } };
    plotRows(id, effects.map((e) => `${e.title} (${e.kind})`), points, { title: "Change of the loss; left of 0 it helps", format: "+.3~f", shapes: [zero] });
  }

  function plot(id, traces, extra) {
    const text = color("text"), quiet = color("quiet"), grid = color("grid");
    const line = { gridcolor: grid, linecolor: color("line"), zeroline: false, automargin: true, tickfont: { color: quiet },
      title: { font: { color: quiet, size: 13 } }, fixedrange: matchMedia("(pointer: coarse)").matches };
    const merge = (own) => ({ ...line, ...own, title: { ...line.title, ...own?.title } });
    const paper = document.documentElement.hasAttribute("data-printed"); // nobody waits there until a chart has measured its box
    Plotly.react(id, traces, {
      autosize: !paper, width: paper ? byId(id).clientWidth : undefined, height: paper ? byId(id).clientHeight : undefined,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 12, t: 8, b: 8 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: text },
      hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: text } },
      legend: { orientation: "h", traceorder: "normal", maxheight: 600, x: 0, y: 1.02, yanchor: "bottom", font: { color: text, size: 12 } },
      ...extra, xaxis: merge({ ...extra.xaxis, spikecolor: quiet, spikethickness: 1, spikedash: "dot" }), yaxis: merge(extra.yaxis),
    }, CONFIG);
  }
  function drawCurves() {
    drawLoss();
    const lines = { lr: ".3f", momentum: ".3f", rate: ",.0f", allocated: ".2f" }; // the others change in steps
    for (const id of new Set(data.groups.flatMap((group) => Object.keys(group.schedule)))) drawSmall(id, id in lines ? "linear" : "hv", lines[id] ?? ",d");
  }
  function draw() {
    drawLegend();
    drawCurves();
    drawCosts();
    data.ablations.forEach(drawWaterfall);
    data.ablations.forEach(drawEffects);
  }

  // ---- the reader's choices; listened to at the document, because the live page exchanges its parts

  const tabs = () => [...document.querySelectorAll('[role="tab"]')];
  function showChoices() {
    for (const tab of tabs()) {
      const isChosen = tab.dataset.axis === chosen.axis;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      if (isChosen) byId("loss-panel").setAttribute("aria-labelledby", tab.id);
    }
    for (const name of ["whole", "each"]) if (byId(name)) byId(name).checked = chosen[name];
  }
  function choose(tab) {
    chosen.axis = tab.dataset.axis;
    showChoices();
    drawLoss();
  }
  addEventListener("click", ({ target }) => { if (target.matches?.('[role="tab"]')) choose(target); });
  addEventListener("keydown", (event) => {
    if (!event.target.matches?.('[role="tab"]')) return;
    const all = tabs(), index = all.indexOf(event.target), last = all.length - 1;
    const to = { ArrowRight: index === last ? 0 : index + 1, ArrowLeft: index === 0 ? last : index - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    all[to].focus();
    choose(all[to]);
  });
  addEventListener("change", ({ target }) => {
    if (target.id === "whole" || target.id === "each") {
      chosen[target.id] = target.checked;
      drawLoss();
    } else if (target.dataset.group !== undefined) {
      chosen.hidden[target.checked ? "delete" : "add"](target.dataset.group);
      drawCurves();
    }
  });

  // Paper is light, narrower than most screens, and has no details to open.
  function printed(on) {
    const root = document.documentElement;
    root.toggleAttribute("data-printed", on);
    if (on) {
      root.dataset.theme = "light";
      document.querySelectorAll("details:not([open])").forEach((box) => { box.open = true; box.dataset.printed = ""; });
    } else {
      delete root.dataset.theme;
      document.querySelectorAll("details[data-printed]").forEach((box) => { box.open = false; delete box.dataset.printed; });
    }
    draw();
    if (!on) document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.Plots.resize(chart));
  }
  addEventListener("beforeprint", () => printed(true));
  addEventListener("afterprint", () => printed(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.Plotly && draw());
  if (window.Plotly) draw();
  else if (byId("no-charts")) byId("no-charts").hidden = false;

  return {
    show(newData) {
      data = newData;
      showChoices();
      draw();
    },
  };
})();
