// The charts: each is built anew from the rows in view, or left out where they have nothing for it.
onPoint = (id, place) => {
  if (id !== "memory" && cases[place]) choose(cases[place]);
};
// A layout as the name of a bar: in two lines, since it would take the chart's width; the end of a stage split is left out.
const LINE = 30;
function short(text) {
  const lines = [""];
  for (const word of text.split(/(?<=,)/)) {
    if (lines[lines.length - 1].length + word.length > LINE && lines[lines.length - 1]) lines.push("");
    lines[lines.length - 1] += word;
  }
  const kept = lines.slice(0, 2).map((line) => plain(line.length > LINE + 4 ? `${line.slice(0, LINE)}\u2026` : line));
  return kept.join("<br>") + (lines.length > 2 ? "\u2026" : "");
}
// Where a name would be cut, all bars are named by what differs between them.
function barNames(layouts) {
  const named = layouts.map(short);
  const words = layouts.map((layout) => layout.split(","));
  const apart = words.map((own) => own.filter((word) => !words.every((other) => other.includes(word))));
  return named.some((name) => name.includes("\u2026")) && apart.every((own) => own.length) ? apart.map((own) => short(own.join(","))) : named;
}
// A sentence names a layout without the device of every rank, which the table has.
const named = (one) => one.layout.replace(/,on\d[\d.-]*/, "");
const firstOf = (shown) => (shown.length === 1 ? "the first layout" : `the first ${shown.length} layouts`);
// a part has one colour in every chart, whatever other parts are shown
const colorOf = (kind, part) => PALETTE[Object.keys(content.legend[kind]).indexOf(part) % PALETTE.length];
// neighbours differ in their dashes too
const curve = (place) => ({ color: PALETTE[place % PALETTE.length], dash: ["solid", "dash", "dot"][place % 3], width: 1.8 });

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
  const fastest = front[front.length - 1];
  const groups = new Map();
  const bySource = differs("source");
  const group = (one) => (bySource ? one.source : `TP ${one.tp ?? "not stated"}`);
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
    said: (front.length === 1
      ? `${named(fastest)} is both the fastest and the smallest of ${all.length.toLocaleString("en")} layouts.`
      : `${front.length} of ${all.length.toLocaleString("en")} layouts are on the front: no other is both faster and smaller. ` +
        `It goes from ${named(front[0])} (${front[0].mem_gib.toFixed(2)} GiB) to ${named(fastest)} ` +
        `(${significant(4)(fastest.sec_per_it)} s/it).`) + drawn + (near ? ` The dotted line is the device's ${limit} GiB.` : ""),
  };
});

chart("parts", "Where the time goes", () => {
  const listed = state.view.filter((one) => Object.keys(one.time_s).length).slice(0, BARS);
  if (state.chosen && Object.keys(state.chosen.time_s).length && !listed.includes(state.chosen)) listed.unshift(state.chosen);
  if (!listed.length) return null;
  const names = Object.keys(listed[0].time_s).filter((part) => listed.some((one) => one.time_s[part] > 0));
  // two rows may carry one layout (two sources, two networks): bars are placed by number and named by layout
  const places = listed.map((_, i) => i);
  const bars = barNames(listed.map((one) => one.layout));
  const traces = names.map((part) => ({
    type: "bar", orientation: "h", name: part, marker: { color: colorOf("time_s", part) }, y: places, x: listed.map((one) => one.time_s[part]),
    customdata: listed.map((one) => one.id), hovertemplate: `${part}: %{x:.4g} s<extra></extra>`,
  }));
  const first = state.chosen && listed.includes(state.chosen) ? state.chosen : listed[0];
  const total = Object.values(first.time_s).reduce((sum, x) => sum + x, 0);
  const largest = names.reduce((a, b) => (first.time_s[a] >= first.time_s[b] ? a : b));
  return {
    // the names of neighbours would run into each other in a narrow window
    traces, says: content.legend.time_s, least: `${90 + listed.length * (bars.some((name) => name.includes("<br>")) ? 26 : 16)}px`,
    layout: {
      barmode: "stack", xaxis: axis("predicted s/it"),
      yaxis: { autorange: "reversed", automargin: true, tickvals: places, ticktext: bars, tickfont: { size: 9 } },
    },
    said: `Predicted parts of ${firstOf(listed)} of the table. ${named(first)}: ` +
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
      type: "bar", name: part, marker: { color: colorOf("memory_gib", part) }, x, y: stages.map((stage) => stage[part]), customdata: stages.map((stage) => stage.layers),
      hovertemplate: `stage %{x}, %{customdata} layers<br>${part}: %{y:.2f} GiB<extra></extra>`,
    })),
    layout: {
      barmode: "stack", xaxis: axis("pipeline stage", { dtick: stages.length > 16 ? 4 : 1 }), yaxis: axis("GiB"),
      shapes: near ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit, line: { dash: "dot", color: "#c23b3b" } }] : [],
    },
    said: `${named(one)}: stage ${fullest} is the fullest, ${totals[fullest].toFixed(2)} GiB predicted` + (limit === null ? "." : ` of ${limit} GiB.`),
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
      `furthest off is ${named(worst)}, ${(Math.max(...errors) * 100).toFixed(0)}%.`,
  };
});

chart("scaling", "Scaling over devices", () => {
  if (state.works > 1) return null;
  const best = new Map();
  for (const one of timed().filter((one) => one.devices !== null)) {
    const key = `${one.source}\n${one.devices}`;
    if (!best.has(key) || pace(one) < pace(best.get(key))) best.set(key, one);
  }
  const sources = [...new Set([...best.values()].map((one) => one.source))];
  const lines = sources.map((source) => [source, [...best.values()].filter((one) => one.source === source).sort((a, b) => a.devices - b.devices)])
    .filter(([, members]) => members.length > 1);
  if (!lines.length) return null;
  const traces = lines.flatMap(([source, members]) => [
    {
      type: "scatter", mode: "lines+markers", name: plain(source), x: thin(members).map((one) => one.devices), y: thin(members).map((one) => 1 / pace(one)),
      customdata: thin(members).map((one) => one.id), text: thin(members).map(hover), hovertemplate: "%{text}<br>%{y:.4g} samples/s<extra></extra>",
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
    // half a device is none
    traces, layout: { xaxis: axis("devices", last.devices <= 8 ? { dtick: 1 } : {}), yaxis: axis("samples a second, best layout", { rangemode: "tozero" }) },
    said: `From ${members[0].devices} to ${last.devices} devices the best layouts keep ${(share * 100).toFixed(0)}% of linear scaling.`,
  };
});

chart("losses", "Loss", () => {
  const curves = state.view.filter((one) => one.losses.length > 1).slice(0, BARS);
  if (!curves.length) return null;
  return {
    traces: curves.map((one, place) => ({
      type: "scatter", mode: "lines", name: plain(one.layout), y: one.losses, x: one.losses.map((_, i) => 1 + i * one.loss_every), line: curve(place), customdata: one.losses.map(() => one.id),
      hovertemplate: `${plain(one.layout)}<br>step %{x}: %{y:.4f}<extra></extra>`,
    })),
    layout: { xaxis: axis("step"), yaxis: axis("nats a token") },
    said: `Loss of ${firstOf(curves)} of the table; ${named(curves[0])} goes from ${curves[0].losses[0].toFixed(3)} to ` +
      `${curves[0].losses[curves[0].losses.length - 1].toFixed(3)} in ${1 + (curves[0].losses.length - 1) * curves[0].loss_every} steps.`,
  };
});

