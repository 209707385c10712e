"use strict";
// The page's script: a table that sorts and filters, and charts that follow it.
(() => {
  const content = JSON.parse(document.getElementById("data").textContent);
  const cases = content.cases.map((one, id) => ({ id, ...one, ...one.choices }));
  const $ = (selector) => document.querySelector(selector);
  const PAGE = 100; // rows added to the table at a time
  const DRAWN = 2000; // points a chart draws at most: more cannot be told apart on a screen
  const BARS = 12;

  const fixed = (digits) => (x) => x.toFixed(digits);
  const significant = (digits) => (x) => (Math.abs(x) >= 10 ** digits ? x.toFixed(0) : x.toPrecision(digits));
  // key, title, how a person reads it, word that filters use
  const COLUMNS = [
    ["layout", "Layout", null, "layout"], ["source", "Source", null, "source"],
    ["work", "Work", null, "work"], ["status", "Status", null, "status"],
    ["nodes", "Nodes", null, "nodes"], ["devices", "Devices", null, "devices"],
    ...content.columns.map(([key, title, word]) => [key, title, null, word]), ["variant", "Variant", null, "variant"],
    ["predicted_mem_gib", "Mem predicted, GiB", fixed(2), "predicted_mem"], ["mem_gib", "Mem, GiB", fixed(2), "mem"],
    ["predicted_sec_per_it", "Sec/it predicted", significant(4), "predicted_sec"],
    ["sec_per_it", "Sec/it", significant(4), "sec"], ["tflops", "TFLOPs", significant(3), "tflops"],
    ["notes", "Notes", null, "notes"],
  ];
  const differs = (key) => new Set(cases.map((one) => one[key])).size > 1;
  const present = (key) => cases.some((one) => one[key] !== null && one[key] !== "");
  // what is the same in every row says nothing in a table
  const dull = new Set(["source", "work", "status", "variant", "nodes"]);
  for (const [key, , , isDull] of content.columns) if (isDull) dull.add(key);
  const columns = COLUMNS.filter(([key]) => present(key) && (!dull.has(key) || differs(key)));
  const isNumber = (key) => cases.some((one) => typeof one[key] === "number");

  const state = { sort: "sec_per_it", down: false, shown: PAGE, chosen: null, view: cases };

  // ---- the table ----
  function element(name, attributes = {}, text) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function compare(a, b) {
    const x = a[state.sort], y = b[state.sort];
    if (x === y) return a.id - b.id;
    // what is not known comes last, whichever way the table is sorted
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return state.down ? -order : order;
  }

  const CONDITION = /^([a-z_]+)(<=|>=|!=|=|<|>)(.+)$/;
  const TESTS = {
    "<": (x, y) => x < y, "<=": (x, y) => x <= y, ">": (x, y) => x > y, ">=": (x, y) => x >= y,
    "=": (x, y) => x === y, "!=": (x, y) => x !== y,
  };
  function matcher(text) {
    const keys = Object.fromEntries(COLUMNS.map(([key, , , word]) => [word, key]));
    const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
      const found = word.match(CONDITION);
      if (found && keys[found[1]]) {
        const key = keys[found[1]], wanted = found[3];
        return (one) => {
          const value = one[key];
          if (value === null) return false;
          if (typeof value === "number") return TESTS[found[2]](value, Number(wanted));
          return TESTS[found[2]](String(value).toLowerCase(), wanted);
        };
      }
      return (one) => one.text.includes(word);
    });
    return (one) => tests.every((test) => test(one));
  }

  function refresh() {
    const matches = matcher($("#filter").value), status = $("#status").value, work = $("#work").value;
    state.view = cases.filter((one) => (!status || one.status === status) && (!work || one.work === work) && matches(one)).sort(compare);
    state.works = new Set(state.view.map((one) => one.work)).size;
    state.sameBatch = new Set(state.view.map((one) => one.gbs)).size === 1;
    state.shown = PAGE;
    drawTable();
    drawCharts();
  }

  function drawTable() {
    const body = document.createDocumentFragment();
    for (const one of state.view.slice(0, state.shown)) {
      const row = element("tr", one === state.chosen ? { "aria-current": "true" } : {});
      for (const [key, , read] of columns) {
        const value = one[key];
        const cell = element(key === "layout" ? "th" : "td", isNumber(key) ? {} : { class: "left" });
        if (key === "layout") {
          cell.scope = "row";
          const button = element("button", { type: "button", "data-id": one.id }, value);
          cell.append(button);
        } else if (value !== null) cell.textContent = read && typeof value === "number" ? read(value) : value;
        row.append(cell);
      }
      body.append(row);
    }
    $("tbody").replaceChildren(body);
    const many = state.view.length;
    $("#count").textContent = `${many.toLocaleString("en")} of ${cases.length.toLocaleString("en")} layouts` +
      (many > state.shown ? `, the first ${state.shown} shown` : "");
    $("#more").hidden = many <= state.shown;
    for (const head of document.querySelectorAll("thead th")) {
      const sorted = head.dataset.key === state.sort;
      head.setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
    }
  }

  function choose(one) {
    state.chosen = one;
    for (const row of document.querySelectorAll("tbody tr")) {
      const mine = Number(row.querySelector("button").dataset.id) === one.id;
      if (mine) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
    drawCharts();
  }

  // ---- the charts ----
  const COLORS = ["#0b74b8", "#d1621b", "#3f9b46", "#b63e70", "#7b61c4", "#a78a0b", "#12938f", "#8a5a44", "#6c7a89", "#c23b3b"];
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly reads a little HTML in texts; those here come from files of others
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function axis(title, more = {}) {
    return { title: { text: title, standoff: 8 }, gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true, ...more };
  }

  const charts = [];
  function chart(id, title, build) {
    const figure = element("figure", { "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-said` });
    const plot = element("div", { class: "plot", id, role: "img", "aria-labelledby": `${id}-said` });
    figure.append(element("h2", { id: `${id}-title` }, title), element("ul", { class: "legend" }), plot, element("figcaption", { id: `${id}-said` }));
    $("#charts").append(figure);
    charts.push({ id, figure, plot, build });
  }

  function drawCharts() {
    for (const { id, figure, plot, build } of charts) {
      const made = build();
      figure.hidden = made === null;
      if (made === null) continue;
      const layout = {
        margin: { l: 50, r: 12, t: 10, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: style("--ink"), family: "system-ui, sans-serif", size: 12 }, colorway: COLORS,
        showlegend: false, hovermode: "closest",
        hoverlabel: { font: { family: "system-ui, sans-serif" } }, ...made.layout,
      };
      drawLegend(figure.querySelector(".legend"), made.traces, made.says);
      Plotly.react(plot, made.traces, layout, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
      if (!plot.wired) {
        plot.on("plotly_click", (event) => {
          const one = id === "memory" ? undefined : cases[event.points[0].customdata];
          if (one) choose(one);
        });
        plot.wired = true;
      }
      document.getElementById(`${id}-said`).textContent = made.said;
    }
  }

  // a stage split or placement would push the bars off the chart
  const short = (text) => (text.length > 26 ? `${text.slice(0, 25)}\u2026` : text);
  // Plotly's own legend takes as much room as the chart where names are many
  function drawLegend(list, traces, says = {}) {
    let next = 0;
    const entries = traces.flatMap((trace) => {
      const color = trace.line?.color ?? COLORS[next++ % COLORS.length];
      if (!trace.name || trace.showlegend === false) return [];
      const entry = element("li", { title: says[trace.name] ?? "" }, new DOMParser().parseFromString(trace.name, "text/html").body.textContent);
      entry.style.setProperty("--swatch", color);
      return [entry];
    });
    list.replaceChildren(...(entries.length > 1 ? entries : []));
  }

  const timed = () => state.view.filter((one) => one.sec_per_it !== null && (one.status === "ok" || one.status === "predicted"));
  // the fastest first, whatever the table is sorted by: rows of different work by the time of a sample
  const pace = (one) => one.sec_per_it / one.gbs;
  const hover = (one) => `<b>${plain(one.layout)}</b><br>${plain(one.source)}, ${plain(one.status)}<br>${significant(4)(one.sec_per_it)} s/it` +
    (one.mem_gib === null ? "" : `<br>${one.mem_gib.toFixed(2)} GiB`);

  function thin(all) {
    if (all.length <= DRAWN) return all;
    const step = all.length / DRAWN;
    return Array.from({ length: DRAWN }, (_, i) => all[Math.floor(i * step)]);
  }

  chart("front", "Time against memory", () => {
    const all = timed().filter((one) => one.mem_gib !== null);
    if (all.length < 2 || state.works > 1) return null;
    const seconds = (one) => (state.sameBatch ? one.sec_per_it : pace(one));
    const front = [];
    for (const one of [...all].sort((a, b) => a.mem_gib - b.mem_gib || seconds(a) - seconds(b)))
      if (!front.length || seconds(one) < seconds(front[front.length - 1])) front.push(one);
    const groups = new Map();
    const group = (one) => (differs("source") ? one.source : `TP ${one.tp}`);
    for (const one of thin(all)) (groups.get(group(one)) ?? groups.set(group(one), []).get(group(one))).push(one);
    const traces = [...groups].sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true })).map(([name, members]) => ({
      type: "scatter", mode: "markers", name: plain(name), x: members.map((one) => one.mem_gib), y: members.map(seconds),
      customdata: members.map((one) => one.id), text: members.map(hover), hovertemplate: "%{text}<extra></extra>",
      marker: { size: members.map((one) => (one === state.chosen ? 14 : 7)), opacity: 0.8 },
    }));
    traces.push({
      type: "scatter", mode: "lines+markers", name: "Pareto front", x: front.map((one) => one.mem_gib), y: front.map(seconds),
      customdata: front.map((one) => one.id), text: front.map(hover), hovertemplate: "%{text}<extra></extra>",
      line: { shape: "hv", color: style("--ink"), width: 1.5 }, marker: { size: 4, color: style("--ink") },
    });
    const limit = content.mem_limit_gib;
    const near = limit !== null && Math.max(...all.map((one) => one.mem_gib)) > limit / 4;
    const shapes = near ? [{ type: "line", x0: limit, x1: limit, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", color: "#c23b3b" } }] : [];
    const drawn = all.length > DRAWN ? ` ${DRAWN.toLocaleString("en")} of ${all.length.toLocaleString("en")} are drawn.` : "";
    return {
      traces, layout: { xaxis: axis("memory of the fullest rank, GiB"), yaxis: axis(state.sameBatch ? "seconds an iteration" : "seconds a sample"), shapes },
      said: `${front.length} of ${all.length.toLocaleString("en")} layouts are on the front: no other is both faster and smaller. ` +
        `It goes from ${front[0].layout} (${front[0].mem_gib.toFixed(1)} GiB) to ${front[front.length - 1].layout} ` +
        `(${significant(4)(front[front.length - 1].sec_per_it)} s/it).` + drawn + (near ? ` The dotted line is the device's ${limit} GiB.` : ""),
    };
  });

  chart("parts", "Where the time goes", () => {
    const listed = state.view.filter((one) => Object.keys(one.time_s).length).slice(0, BARS);
    if (state.chosen && Object.keys(state.chosen.time_s).length && !listed.includes(state.chosen)) listed.unshift(state.chosen);
    if (!listed.length) return null;
    const names = Object.keys(listed[0].time_s).filter((part) => listed.some((one) => one.time_s[part] > 0));
    // two rows may carry one layout (two sources, two networks): bars are placed by number and named by layout
    const places = listed.map((_, i) => i);
    const traces = names.map((part) => ({
      type: "bar", orientation: "h", name: part, y: places, x: listed.map((one) => one.time_s[part]),
      customdata: listed.map((one) => one.id), hovertemplate: `${part}: %{x:.4g} s<extra></extra>`,
    }));
    const first = state.chosen && listed.includes(state.chosen) ? state.chosen : listed[0];
    const total = Object.values(first.time_s).reduce((sum, x) => sum + x, 0);
    const largest = names.reduce((a, b) => (first.time_s[a] >= first.time_s[b] ? a : b));
    return {
      traces, says: content.legend.time_s,
      layout: {
        barmode: "stack", xaxis: axis("predicted seconds an iteration"),
        yaxis: { autorange: "reversed", automargin: true, tickvals: places, ticktext: listed.map((one) => plain(short(one.layout))), tickfont: { size: 10 } },
      },
      said: `Predicted parts of the first ${listed.length} layouts of the table. ${first.layout}: ` +
        names.map((part) => [part, first.time_s[part] / total]).filter(([, share]) => share >= 0.005)
          .map(([part, share]) => `${part} ${(share * 100).toFixed(0)}%`).join(", ") + `; most in ${largest}.`,
    };
  });

  chart("memory", "Memory of each stage", () => {
    const one = state.chosen ?? state.view.find((c) => c.memory_gib.length);
    if (!one || !one.memory_gib.length) return null;
    const stages = one.memory_gib;
    const names = Object.keys(stages[0]).filter((part) => part !== "layers" && stages.some((stage) => stage[part] > 0));
    const x = stages.map((_, i) => i);
    const totals = stages.map((stage) => names.reduce((sum, part) => sum + stage[part], 0));
    const fullest = totals.indexOf(Math.max(...totals));
    const limit = content.mem_limit_gib;
    const near = limit !== null && totals[fullest] > limit / 4;
    return {
      traces: names.map((part) => ({
        type: "bar", name: part, x, y: stages.map((stage) => stage[part]), customdata: stages.map((stage) => stage.layers),
        hovertemplate: `stage %{x}, %{customdata} layers<br>${part}: %{y:.2f} GiB<extra></extra>`,
      })),
      layout: {
        barmode: "stack", xaxis: axis("pipeline stage", { dtick: stages.length > 16 ? 4 : 1 }), yaxis: axis("GiB"),
        shapes: near ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit, line: { dash: "dot", color: "#c23b3b" } }] : [],
      },
      said: `${one.layout}: stage ${fullest} is the fullest, ${totals[fullest].toFixed(2)} GiB predicted` + (limit === null ? "." : ` of ${limit} GiB.`),
    };
  });

  chart("predicted", "Predicted against measured", () => {
    const both = thin(timed().filter((one) => one.predicted_sec_per_it !== null));
    if (both.length < 2) return null;
    const errors = both.map((one) => Math.abs(one.predicted_sec_per_it / one.sec_per_it - 1));
    const ends = [Math.min(...both.map((one) => Math.min(one.sec_per_it, one.predicted_sec_per_it))) * 0.9,
      Math.max(...both.map((one) => Math.max(one.sec_per_it, one.predicted_sec_per_it))) * 1.1];
    const worst = both[errors.indexOf(Math.max(...errors))];
    return {
      traces: [
        { type: "scatter", mode: "lines", x: ends, y: ends, line: { dash: "dot", color: style("--faint") }, hoverinfo: "skip", showlegend: false },
        {
          type: "scatter", mode: "markers", showlegend: false, x: both.map((one) => one.sec_per_it), y: both.map((one) => one.predicted_sec_per_it),
          customdata: both.map((one) => one.id), text: both.map((one) => `${hover(one)}<br>predicted ${significant(4)(one.predicted_sec_per_it)} s/it`),
          hovertemplate: "%{text}<extra></extra>", marker: { size: both.map((one) => (one === state.chosen ? 14 : 8)) },
        },
      ],
      layout: { xaxis: axis("measured, s/it", { type: "log" }), yaxis: axis("predicted, s/it", { type: "log" }) },
      said: `Predictions are off by ${((errors.reduce((a, b) => a + b) / errors.length) * 100).toFixed(1)}% on average over ${both.length} rows; ` +
        `furthest off is ${worst.layout}, ${(Math.max(...errors) * 100).toFixed(0)}%.`,
    };
  });

  chart("scaling", "Scaling over devices", () => {
    if (state.works > 1) return null;
    const best = new Map();
    for (const one of timed()) {
      const key = `${one.source}\n${one.devices}`;
      if (!best.has(key) || pace(one) < pace(best.get(key))) best.set(key, one);
    }
    const sources = [...new Set([...best.values()].map((one) => one.source))];
    const lines = sources.map((source) => [source, [...best.values()].filter((one) => one.source === source).sort((a, b) => a.devices - b.devices)])
      .filter(([, members]) => members.length > 1);
    if (!lines.length) return null;
    const traces = lines.flatMap(([source, members]) => [
      {
        type: "scatter", mode: "lines+markers", name: plain(source), x: members.map((one) => one.devices), y: members.map((one) => 1 / pace(one)),
        customdata: members.map((one) => one.id), text: members.map(hover), hovertemplate: "%{text}<br>%{y:.4g} samples/s<extra></extra>",
      },
      {
        type: "scatter", mode: "lines", name: "linear", showlegend: lines.length === 1, line: { dash: "dot", color: style("--faint") }, hoverinfo: "skip",
        x: [members[0].devices, members[members.length - 1].devices],
        y: [1 / pace(members[0]), members[members.length - 1].devices / members[0].devices / pace(members[0])],
      },
    ]);
    const [, members] = lines[0], last = members[members.length - 1];
    const share = (pace(members[0]) * members[0].devices) / (pace(last) * last.devices);
    return {
      traces, layout: { xaxis: axis("devices"), yaxis: axis("samples a second, best layout", { rangemode: "tozero" }) },
      said: `From ${members[0].devices} to ${last.devices} devices the best layouts keep ${(share * 100).toFixed(0)}% of linear scaling.`,
    };
  });

  chart("losses", "Loss", () => {
    const curves = state.view.filter((one) => one.losses.length > 1).slice(0, BARS);
    if (!curves.length) return null;
    return {
      traces: curves.map((one) => ({
        type: "scatter", mode: "lines", name: plain(one.layout), y: one.losses, x: one.losses.map((_, i) => i + 1), customdata: one.losses.map(() => one.id),
        hovertemplate: `${plain(one.layout)}<br>step %{x}: %{y:.4f}<extra></extra>`,
      })),
      layout: { xaxis: axis("step"), yaxis: axis("nats a token") },
      said: `Loss of the first ${curves.length} layouts of the table; ${curves[0].layout} goes from ${curves[0].losses[0].toFixed(3)} to ` +
        `${curves[0].losses[curves[0].losses.length - 1].toFixed(3)} in ${curves[0].losses.length} steps.`,
    };
  });

  // ---- theme, start ----
  function setTheme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    $("#theme").setAttribute("aria-pressed", String(dark));
    drawCharts();
  }

  $("h1").textContent = content.title;
  for (const [name, value] of content.facts) {
    const pair = element("div");
    pair.append(element("dt", {}, name), element("dd", {}, value));
    $("#facts").append(pair);
  }
  for (const sentence of content.sentences) $("#sentences").append(element("li", {}, sentence));
  for (const one of cases) one.text = COLUMNS.map(([key]) => one[key] ?? "").join(" ").toLowerCase();
  for (const [key, title] of columns) {
    const head = element("th", { scope: "col", class: isNumber(key) ? "" : "left", "data-key": key });
    head.append(element("button", { type: "button" }, title));
    $("thead tr").append(head);
  }
  for (const status of [...new Set(cases.map((one) => one.status))].sort()) $("#status").append(element("option", { value: status }, status));
  const works = new Map();
  for (const one of cases) works.set(one.work, (works.get(one.work) ?? 0) + 1);
  $("#work").append(element("option", { value: "" }, "all"));
  for (const [work, count] of works) $("#work").append(element("option", { value: work }, `${work} (${count})`));
  $("#work").parentElement.hidden = works.size < 2;
  // opens with what has most rows, so that there is something to compare
  const most = [...works].reduce((a, b) => (b[1] > a[1] ? b : a))[0];
  for (const option of $("#work").options) option.defaultSelected = option.value === most;
  $("#status").parentElement.hidden = !differs("status");

  $("thead").addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head) return;
    state.down = state.sort === head.dataset.key && !state.down;
    state.sort = head.dataset.key;
    refresh();
  });
  $("tbody").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose(cases[Number(button.dataset.id)]);
  });
  let waiting;
  $("#filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(refresh, 120);
  });
  $("#status").addEventListener("change", refresh);
  $("#work").addEventListener("change", refresh);
  $("#filters").addEventListener("submit", (event) => event.preventDefault());
  $("#filters").addEventListener("reset", () => setTimeout(refresh));
  $("#more").addEventListener("click", () => {
    state.shown += PAGE;
    drawTable();
  });
  $("#theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  preferred.addEventListener("change", (event) => setTheme(event.matches));
  document.documentElement.dataset.theme = preferred.matches ? "dark" : "light";
  $("#theme").setAttribute("aria-pressed", String(preferred.matches));
  // charts are drawn light on paper
  addEventListener("beforeprint", () => setTheme(false));
  addEventListener("afterprint", () => setTheme(preferred.matches));
  refresh();
  document.documentElement.dataset.ready = "true";
})();
