// Draws the charts from the JSON in the page. Colours come from the style sheet, so a change of theme is a redraw.
"use strict";
(() => {
  const { runs } = JSON.parse(document.getElementById("data").textContent);
  const AXES = {
    step: { title: "Steps", scale: () => [1, ""] },
    tokens: { title: "Training tokens", scale: () => [1, ""] },
    train: { title: "Train time", scale: timeUnit },
    wall: { title: "Wall time", scale: timeUnit },
  };
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "star", "cross"];
  const START_SHARE = 0.08; // the first steps fall so far that the rest would be a flat line; left out of the frame at first
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const runColor = (index) => color(`run-${index % 6}`);
  function shortLabel(run) { // plotly reads names as markup, and lets a long one push the chart off the screen
    const room = innerWidth < 640 ? 28 : 60;
    const cut = run.label.length > room ? `${run.label.slice(0, room - 1)}…` : run.label;
    return cut.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  }
  let axis = "step";

  function timeUnit(seconds) {
    if (seconds > 3 * 3600) return [3600, " (h)"];
    return seconds > 600 ? [60, " (min)"] : [1, " (s)"];
  }
  function scaled() {
    const largest = Math.max(1, ...runs.flatMap((run) => [run.x[axis].at(-1) ?? 0, run.val.x[axis].at(-1) ?? 0]));
    const [unit, suffix] = AXES[axis].scale(largest);
    return { title: AXES[axis].title + suffix, range: [-0.01 * largest / unit, 1.01 * largest / unit], of: (values) => values.map((v) => (v === null ? null : v / unit)) };
  }

  function lossTraces(x) {
    const many = runs.length > 1;
    return runs.flatMap((run, index) => {
      const c = runColor(index);
      const shared = { legendgroup: many ? String(index) : undefined, hovertemplate: "%{y:.4f}" };
      const name = (what) => (many ? `${shortLabel(run)}, ${what}` : what);
      return [
        { ...shared, name: name("each step"), x: x.of(run.x[axis]), y: run.loss, mode: "lines", opacity: many ? 0.18 : 0.4,
          line: { color: c, width: 1 }, showlegend: !many, hoverinfo: many ? "skip" : undefined,
          hovertemplate: many ? undefined : "%{y:.4f}" },
        { ...shared, name: many ? shortLabel(run) : "training, smoothed", x: x.of(run.x[axis]), y: run.smooth, mode: "lines",
          line: { color: c, width: 2, simplify: false, dash: index < 6 ? "solid" : "dash" } },
        { ...shared, name: name("validation"), x: x.of(run.val.x[axis]), y: run.val.loss, mode: "markers", showlegend: !many,
          marker: { color: color("panel"), size: 8, symbol: SYMBOLS[index % 6], line: { color: c, width: 2 } } },
      ];
    });
  }

  function lossRange() {
    if (document.getElementById("whole").checked) return undefined;
    const late = runs.flatMap((run) => {
      const from = START_SHARE * (run.x.step.at(-1) ?? 0);
      const after = (xs, ys) => ys.filter((y, i) => y !== null && xs[i] >= from);
      return [...after(run.x.step, run.smooth), ...after(run.val.x.step, run.val.loss)];
    });
    if (late.length < 2) return undefined;
    const low = Math.min(...runs.flatMap((run) => run.loss.filter((y) => y !== null)), ...late), high = Math.max(...late), margin = 0.06 * (high - low || 1);
    return [low - margin, high + margin];
  }

  function layout(extra) {
    const text = color("text"), quiet = color("quiet"), grid = color("grid");
    const line = { gridcolor: grid, linecolor: color("line"), zeroline: false, automargin: true, tickfont: { color: quiet },
      title: { font: { color: quiet, size: 13 } }, fixedrange: matchMedia("(pointer: coarse)").matches };
    const merge = (own) => ({ ...line, ...own, title: { ...line.title, ...own?.title } });
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 12, t: 8, b: 8 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: text }, hovermode: "x unified",
      hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: text } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: text, size: 12 } },
      ...extra, xaxis: merge({ ...extra.xaxis, spikecolor: quiet, spikethickness: 1, spikedash: "dot" }), yaxis: merge(extra.yaxis),
    };
  }

  function drawLoss() {
    const x = scaled();
    const drawn = layout({ xaxis: { title: { text: x.title }, range: x.range, unifiedhovertitle: { text: `${x.title} %{x}` } }, yaxis: { title: { text: "Loss (nats per token)" }, range: lossRange() } });
    Plotly.react("loss", lossTraces(x), drawn, CONFIG);
  }
  function drawSmall(id, key, shape, format) {
    if (!document.getElementById(id)) return;
    const traces = runs.map((run, index) => ({ name: shortLabel(run), x: run.x.step, y: run[key], mode: "lines", showlegend: false,
      line: { color: runColor(index), width: 1.75, shape, simplify: false }, hovertemplate: `%{y:${format}}` }));
    Plotly.react(id, traces, layout({ yaxis: { rangemode: "tozero", nticks: 4 }, xaxis: { nticks: 5 } }), CONFIG);
  }
  function draw() {
    if (!document.getElementById("loss")) return;
    drawLoss();
    drawSmall("window", "window", "hv", ",d");
    drawSmall("lr", "lr", "linear", ".3f");
    drawSmall("rate", "rate", "linear", ",.0f");
  }

  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function select(tab) {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
    }
    document.getElementById("loss-panel").setAttribute("aria-labelledby", tab.id);
    axis = tab.dataset.axis;
    drawLoss();
  }
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const last = tabs.length - 1;
      const to = { ArrowRight: index === last ? 0 : index + 1, ArrowLeft: index === 0 ? last : index - 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      tabs[to].focus();
      select(tabs[to]);
    });
  });
  document.getElementById("whole")?.addEventListener("change", drawLoss);

  // Paper is light and has no details to open.
  function printed(on) {
    document.documentElement.toggleAttribute("data-theme", on);
    if (on) {
      document.documentElement.dataset.theme = "light";
      document.querySelectorAll("details:not([open])").forEach((box) => { box.open = true; box.dataset.printed = ""; });
    } else {
      document.querySelectorAll("details[data-printed]").forEach((box) => { box.open = false; delete box.dataset.printed; });
    }
    draw();
  }
  addEventListener("beforeprint", () => printed(true));
  addEventListener("afterprint", () => printed(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
