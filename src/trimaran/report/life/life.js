// The life of a training: its charts, one for each question, and its events.
const FAULTS = new Set(["crash", "hang", "fail", "lost", "oom", "timeout"]);
const isFault = (one) => FAULTS.has(one.event);
const RED = "#c23b3b", AMBER = "#d1621b";
const SHOWN = 500; // rows of the table
const percent = (x) => `${(x * 100).toFixed(1)}%`;
const sum = (parts) => Object.values(parts).reduce((all, one) => all + one, 0);
const duration = (s) => (s < 100 ? `${s.toFixed(1)} s` : s < 5940 ? `${(s / 60).toFixed(1)} min` : `${(s / 3600).toFixed(1)} h`);

// hours, or minutes and seconds where the training was short
const longest = content.progress[content.progress.length - 1][0];
const [UNIT, PER_HOUR] = longest > 3 ? ["hours", 1] : longest > 0.1 ? ["minutes", 60] : ["seconds", 3600];
const at = (hours) => hours * PER_HOUR;

// Marks of events at what a curve has at their step.
function marks(name, events, curve, color, symbol) {
  const valueAt = (step) => (curve.find(([other]) => other >= step) ?? curve[curve.length - 1])[1];
  return {
    type: "scatter", mode: "markers", name, x: events.map((one) => one.step), y: events.map((one) => valueAt(one.step)),
    text: events.map((one) => plain(`${one.event}: ${one.why ?? ""}`)), hovertemplate: "step %{x}<br>%{text}<extra></extra>",
    marker: { color, symbol, size: 10 },
  };
}
const line = (name, points, place, unit) => ({
  type: "scatter", mode: points.length > 1 ? "lines" : "markers", name, x: points.map(([x]) => x), y: points.map(([, y]) => y),
  line: { color: PALETTE[place], width: 1.6 }, marker: { color: PALETTE[place] }, hovertemplate: `%{x}: %{y:.4g} ${unit}<extra></extra>`,
});

chart("losses", "Does it learn?", () => {
  const { losses, validations } = content;
  if (!losses.length) return null;
  const bad = content.marks.filter((one) => one.event === "bad_loss");
  const traces = [line("training loss", losses, 0, "nats")];
  if (validations.length) traces.push({ ...line("validation loss", validations, 2, "nats"), mode: "lines+markers" });
  if (bad.length) traces.push(marks("bad step", bad, losses, RED, "x"));
  return {
    traces, layout: { xaxis: axis("step"), yaxis: axis("nats a token") },
    said: `The loss goes from ${losses[0][1].toFixed(3)} to ${losses[losses.length - 1][1].toFixed(3)} nats a token` +
      (validations.length ? `, held-out text is at ${validations[validations.length - 1][1].toFixed(3)}` : "") +
      `; ${bad.length || "no"} bad step${bad.length === 1 ? "" : "s"}.`,
  };
});

chart("speed", "How fast is it?", () => {
  const { speeds } = content;
  if (!speeds.length) return null;
  const sorted = speeds.map(([, y]) => y).sort((a, b) => a - b), usual = sorted[Math.floor(sorted.length / 2)];
  const slow = content.marks.filter((one) => one.event === "slow"), faults = content.marks.filter(isFault);
  const traces = [line("tokens a second", speeds, 0, "tokens/s")];
  if (slow.length) traces.push(marks("slow rank", slow, speeds, AMBER, "triangle-down"));
  if (faults.length) traces.push(marks("fault", faults, speeds, RED, "x"));
  return {
    traces, layout: { xaxis: axis("step"), yaxis: axis("tokens a second", { rangemode: "tozero" }) },
    said: `${significant(4)(usual)} tokens a second in the median; ${percent(sorted.filter((y) => y < usual / 2).length / sorted.length)} of the steps ran at less than half of that.`,
  };
});

chart("progress", "What interrupted it, and what is saved?", () => {
  const { progress, saved } = content;
  if (progress.length < 2) return null;
  const faults = content.marks.filter(isFault);
  const point = (name, points, marker) => ({
    type: "scatter", mode: "markers", name, x: points.map(([x]) => at(x)), y: points.map(([, y]) => y), marker,
    hovertemplate: `step %{y} at %{x:.4g} ${UNIT}<extra></extra>`,
  });
  const traces = [{ ...line("newest step", progress.map(([x, y]) => [at(x), y]), 0, "") }];
  if (saved.length) traces.push(point("checkpoint", saved, { color: PALETTE[2], size: 6 }));
  const told = (name, events, color, symbol) => ({
    ...point(name, events.map((one) => [one.hours, one.step]), { color, symbol, size: 10 }),
    text: events.map((one) => plain(`${one.event}: ${one.why ?? ""}`)), hovertemplate: "step %{y}<br>%{text}<extra></extra>",
  });
  const refused = content.marks.filter((one) => one.event === "not_saved");
  if (refused.length) traces.push(told("not saved", refused, AMBER, "triangle-down"));
  if (faults.length) traces.push(told("fault", faults, RED, "x"));
  const lost = content.marks.reduce((all, one) => all + (one.lost_steps ?? 0), 0);
  return {
    traces, layout: { xaxis: axis(`${UNIT} since it began`), yaxis: axis("newest step", { rangemode: "tozero" }) },
    said: `${faults.length || "No"} fault${faults.length === 1 ? "" : "s"} and ${saved.length} checkpoint${saved.length === 1 ? "" : "s"}` +
      `${refused.length ? `, ${refused.length} could not be written` : ""}; ${lost || "no"} steps were lost.`,
  };
});

chart("goodput", "Where did the time go?", () => {
  const rows = [["measured", content.measured], ["predicted", content.predicted]].filter(([, parts]) => Object.keys(parts).length);
  const parts = Object.keys(content.legend).filter((part) => rows.some(([, row]) => row[part] > 0));
  const names = rows.map(([name]) => name);
  const [, found] = rows[0], total = sum(found);
  return {
    traces: parts.map((part) => ({
      type: "bar", orientation: "h", name: part, y: names, x: rows.map(([, row]) => (100 * row[part]) / sum(row)),
      marker: { color: PALETTE[Object.keys(content.legend).indexOf(part)] }, customdata: rows.map(([, row]) => duration(row[part])),
      hovertemplate: `${part}: %{customdata}, %{x:.1f}%<extra></extra>`,
    })),
    says: content.legend,
    layout: { barmode: "stack", xaxis: axis("percent of the time", { range: [0, 100] }), yaxis: { autorange: "reversed", automargin: true } },
    said: `Of ${duration(total)}: ` + parts.map((part) => `${part} ${percent(found[part] / total)}`).join(", ") +
      (rows.length > 1 ? `; predicted for as many faults: ${percent(rows[1][1].work / sum(rows[1][1]))} work.` : "."),
  };
});

const EVENT_COLUMNS = [
  ["event", "Event"], ["at", "At, UTC"], ["step", "Step"], ["saved_step", "Saved"], ["rank", "Rank"], ["node", "Node"],
  ["lost_steps", "Lost steps"], ["seconds", "Seconds"], ["layout", "Layout"], ["why", "Why"],
].filter(([key]) => content.marks.some((one) => one[key] !== null));
const TEXT = new Set(["event", "at", "node", "layout", "why"]);
for (const [key, title] of EVENT_COLUMNS) $("thead tr").append(element("th", { scope: "col", class: TEXT.has(key) ? "left" : "" }, title));
for (const one of content.marks.slice(-SHOWN)) {
  const row = element("tr");
  for (const [key, title] of EVENT_COLUMNS) {
    const cell = element(key === "event" ? "th" : "td", { "data-title": title, class: key === "why" || key === "layout" ? "left text" : TEXT.has(key) ? "left" : "" });
    if (key === "event") cell.scope = "row";
    const value = key === "at" ? one.at.slice(0, 19).replace("T", " ") : one[key];
    if (value !== null) cell.append(...(key === "layout" ? breakable(value) : [String(value)]));
    row.append(cell);
  }
  $("tbody").append(row);
}
const many = content.marks.length;
$("#count").textContent = `${Math.min(many, SHOWN)} of ${many} events, without checkpoints`;
drawCharts();
beginPage();
