"use strict";
// Draws the charts of the page with uPlot, in the colours of the page's style; on a live page also asks for news.
(() => {
  const drawn = new Map(); // chart's key -> { plot, labels, isLog, hidden }
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColour = (run) => colour(`--c${[0, 1, 2, 3, 4, 5, 7][run % 7]}`);
  const scaled = (value, units, digits) => {
    let place = 0;
    while (Math.abs(value) >= 999.5 && place < units.length - 1) { value /= 1000; place += 1; }
    return `${Number(value.toPrecision(digits))}${units[place] ? " " + units[place] : ""}`;
  };
  const written = (value, unit, digits = 4) => {
    if (value == null) return "–";
    if (unit === "bytes") return scaled(value, ["B", "kB", "MB", "GB", "TB"], digits - 1);
    if (Math.abs(value) >= 1e4) return scaled(value, ["", "k", "M", "G"], digits);
    return String(Number(value.toPrecision(digits)));
  };

  // A mean in which older points weigh less and less, as in TensorBoard. Curves with marks are left as they are.
  const isSmooth = (chart, curve) => smoothing > 0 && ["loss", "speed"].includes(chart.key) && !curve.dotted;
  function smoothed(values) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return null;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + 1 - smoothing;
      return sum / weight;
    });
  }

  // One table of all curves over the steps of any: a band is two more columns beside its line. What a curve has at no
  // step of another one is undefined, and its line goes on; what it has as null is a gap, up to its own next steps (2).
  function columnsOf(chart) {
    const [first, ...rest] = chart.curves.map((curve) => {
      const [steps, values, ...band] = curve.data, scale = inEpochs ? page.perEpoch[curve.run] || 1 : 1;
      const x = scale === 1 ? steps : steps.map((step) => step / scale);
      return [x, ...(isSmooth(chart, curve) ? [smoothed(values)] : []), values, ...band];
    });
    return rest.length ? uPlot.join([first, ...rest], [first, ...rest].map((table) => table.map(() => 2))) : first;
  }

  function seriesOf(chart, hidden) {
    const series = [{}], bands = [];
    for (const curve of chart.curves) {
      const line = series.length, stroke = () => runColour(curve.run), show = !hidden.has(curve.label);
      const dotted = curve.dotted && chart.curves.some((other) => !other.dotted);
      series.push({
        label: curve.label, show, stroke, width: 2, spanGaps: false, curve, line, dash: dotted ? [6, 4] : undefined,
        points: { show: curve.dotted || curve.data[0].length === 1, size: 7, fill: stroke },
      });
      const beside = { show, stroke: "transparent", spanGaps: false, points: { show: false } };
      if (isSmooth(chart, curve)) series.push({ ...beside, label: "as measured", stroke: () => runColour(curve.run) + "50" });
      if (curve.data.length > 2) {
        const low = series.push({ ...beside, label: "low" }, { ...beside, label: "high" }) - 2;
        bands.push({ series: [low + 1, low], fill: () => runColour(curve.run) + "33" });
      }
      series[line].count = series.length - line;
    }
    return { series, bands };
  }

  function legendOf(figure, chart, entry) {
    figure.querySelector(".legend")?.remove();
    const legend = document.createElement("div");
    legend.className = "legend";
    entry.labels = [];
    for (const series of entry.plot.series.filter((one) => one.curve)) {
      const button = document.createElement("button"), mark = document.createElement("i"), text = document.createElement("span");
      mark.style.borderColor = runColour(series.curve.run);
      if (series.curve.dotted && chart.curves.some((other) => !other.dotted)) mark.className = "dotted";
      button.append(mark, text);
      button.setAttribute("aria-pressed", String(!entry.hidden.has(series.curve.label)));
      button.onclick = () => {
        const show = entry.hidden.delete(series.curve.label);
        if (!show) entry.hidden.add(series.curve.label);
        button.setAttribute("aria-pressed", String(show));
        for (let at = 0; at < series.count; at++) entry.plot.setSeries(series.line + at, { show });
      };
      entry.labels.push({ series, text });
      legend.append(button);
    }
    if (chart.key === "loss") {
      const button = document.createElement("button");
      button.textContent = "logarithmic";
      button.setAttribute("aria-pressed", String(Boolean(entry.isLog)));
      button.onclick = () => draw(figure, chart, !entry.isLog);
      legend.append(button);
    }
    figure.querySelector("figcaption").append(legend);
    readOff(entry, chart, null);
  }

  // The value under the cursor, else the newest one.
  function readOff(entry, chart, at) {
    for (const { series, text } of entry.labels) {
      const column = entry.plot.data[series.line];
      let place = at ?? column.length - 1;
      while (place > 0 && column[place] == null) place -= 1;
      text.textContent = `${series.curve.label} ${written(column[place], chart.unit)}`.trim();
    }
  }

  function draw(figure, chart, isLog) {
    const before = drawn.get(chart.key);
    before?.plot.destroy();
    const hidden = before?.hidden ?? new Set();
    const { series, bands } = seriesOf(chart, hidden), grid = { stroke: () => colour("--grid"), width: 1 };
    const axis = { stroke: () => colour("--soft"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const widest = chart.unit === "bytes" ? 76 : 58, entry = { isLog, hidden };
    const steps = (u, values) => values.map((value) => (Number.isInteger(value) || inEpochs ? scaled(value, ["", "k", "M", "G"], 4).replace(" ", "") : ""));
    const options = {
      width: Math.max(200, figure.clientWidth), height: chart.key === "loss" ? 280 : 200, series, bands, legend: { show: false },
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 34, values: steps, label: inEpochs ? "epoch" : "step", labelSize: 18, labelGap: -4, labelFont: axis.font },
        { ...axis, size: widest, values: (u, values) => values.map((value) => (value == null ? "" : written(value, chart.unit, 5))) },
      ],
      hooks: { setCursor: [(plot) => entry.labels && readOff(entry, chart, plot.cursor.idx)] },
    };
    entry.plot = new uPlot(options, columnsOf(chart), figure);
    drawn.set(chart.key, entry);
    legendOf(figure, chart, entry);
  }

  // Buttons above the charts: how much to smooth, and whether the axis counts steps or epochs.
  function toolsOf(charts) {
    const tools = document.createElement("div"), label = document.createElement("label"), slider = document.createElement("input");
    tools.className = "tools";
    Object.assign(slider, { type: "range", min: 0, max: 0.98, step: 0.02, value: smoothing });
    slider.oninput = () => { smoothing = Number(slider.value); drawAll(page.charts); };
    label.append("smoothing", slider);
    tools.append(label);
    for (const [name, value] of page.perEpoch.some(Boolean) ? [["steps", false], ["epochs", true]] : []) {
      const button = document.createElement("button");
      button.textContent = name;
      button.setAttribute("aria-pressed", String(inEpochs === value));
      button.onclick = () => {
        inEpochs = value;
        for (const other of tools.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
        for (const chart of page.charts) draw(figureOf(chart), chart, drawn.get(chart.key)?.isLog);
      };
      tools.append(button);
    }
    charts.before(tools);
  }

  // A button beside every file, which copies it.
  function copyable(pre) {
    const button = document.createElement("button"), box = document.createElement("div"), text = pre.textContent;
    box.className = "copyable";
    button.className = "copy";
    button.textContent = "copy";
    button.onclick = async () => {
      getSelection().selectAllChildren(pre);
      try { await navigator.clipboard.writeText(text); } catch { if (!document.execCommand("copy")) return; }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    };
    pre.replaceWith(box);
    box.append(pre, button);
  }

  function furnish() {
    document.querySelectorAll(".charts").forEach(toolsOf);
    document.querySelectorAll("pre").forEach(copyable);
    drawAll(page.charts);
  }

  const figureOf = (chart) => document.querySelector(`figure[data-chart="${CSS.escape(chart.key)}"]`);
  function drawAll(charts) {
    for (const chart of charts) {
      const figure = figureOf(chart);
      if (!figure) continue;
      const before = drawn.get(chart.key), { min, max } = before?.plot.scales.x ?? {};
      const all = before?.plot.data[0], zoomed = all && (min > all[0] || max < all[all.length - 1]);
      draw(figure, chart, before?.isLog);
      if (zoomed) drawn.get(chart.key).plot.setScale("x", { min, max });
    }
  }

  let page = JSON.parse(document.getElementById("figures").textContent), smoothing = 0.6, inEpochs = false;
  const redraw = () => { for (const { plot } of drawn.values()) plot.redraw(false); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(page.charts));
  addEventListener("beforeprint", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    for (const { plot } of drawn.values()) {
      plot.setSize({ width: Math.max(200, plot.root.parentElement.clientWidth), height: plot.height });
    }
  });
  furnish();
  document.body.dataset.drawn = drawn.size;

  // --- live: ask where the page came from, and put in place what is new ----------------------------
  if (!("live" in document.body.dataset)) return;
  let seen = "";
  function tell(text) {
    document.getElementById("gone")?.remove();
    if (!text) return;
    const gone = document.createElement("div");
    gone.id = "gone";
    gone.textContent = text;
    document.body.prepend(gone);
  }
  function replace(markup) {
    const boxes = () => [...document.querySelectorAll(".scroll, pre")], top = scrollY;
    const open = [...document.querySelectorAll("details")].map((one) => one.open);
    const places = boxes().map((one) => [one.scrollLeft, one.scrollTop]);
    document.querySelector("main").innerHTML = markup;
    document.querySelectorAll("details").forEach((one, at) => { one.open = open[at] ?? false; });
    furnish();
    boxes().forEach((one, at) => { [one.scrollLeft, one.scrollTop] = places[at] ?? [0, 0]; });
    scrollTo(scrollX, top);
  }
  async function ask() {
    try {
      const answer = await fetch(`content${location.search}&seen=${seen}`, { cache: "no-store" });
      if (answer.status === 200 || answer.status === 204) tell("");
      else tell(await answer.text());
      if (answer.status === 200) {
        const news = await answer.json();
        seen = news.version;
        document.title = news.title;
        page = news;
        replace(news.markup);
        document.body.dataset.version = seen;
      }
    } catch {
      tell("hoploom watch has stopped: this page is no longer updated.");
    }
    setTimeout(ask, 1000);
  }
  setTimeout(ask, 1000);
})();
