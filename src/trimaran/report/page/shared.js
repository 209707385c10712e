// What every page of charts has: its data, its elements, charts that follow its window, light and dark.
const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
const content = JSON.parse(await new Response(unpacked).text());
const $ = (selector) => document.querySelector(selector);

const fixed = (digits) => (x) => x.toFixed(digits);
const significant = (digits) => (x) => (Math.abs(x) >= 10 ** digits ? x.toFixed(0) : x.toPrecision(digits));

// Text that goes on in the next line behind a comma, where a layout is too long for one.
const breakable = (text) => String(text).split(/(?<=,)/).flatMap((word) => [word, document.createElement("wbr")]);

function element(name, attributes = {}, text) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const style = cssColor;
// Plotly reads a little HTML in texts; those here come from files of others
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function axis(title, more = {}) {
  return { ...chartLook(style).xaxis, title: { text: title, standoff: 8 }, ...more };
}

// A chart is as large as its place, also where that changes without the window: Plotly looks at the window alone.
const roomOf = (plot) => ({ width: plot.clientWidth, height: plot.clientHeight });
const drawnAgain = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const room = roomOf(target), drawn = target.layout;
    if (drawn && room.width && (drawn.width !== room.width || drawn.height !== room.height)) Plotly.relayout(target, room);
  }
});

// What a click on a point of a chart does.
let onPoint = () => {};
const charts = [];
function chart(id, title, build) {
  const figure = element("figure", { "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-said` });
  const plot = element("div", { class: "plot", id, role: "img", "aria-labelledby": `${id}-said` });
  figure.append(element("h2", { id: `${id}-title` }, title), element("ul", { class: "legend" }), plot, element("figcaption", { id: `${id}-said` }));
  $("#charts").append(figure);
  drawnAgain.observe(plot);
  charts.push({ id, figure, plot, build });
}

const CHART_WIDTH = 430; // pixels below which a chart is hard to read
function drawCharts() {
  const built = charts.map((one) => [one, one.build()]);
  for (const [{ figure }, made] of built) figure.hidden = made === null;
  // a chart is drawn at the width that it has beside the others
  placeCharts();
  for (const [{ id, figure, plot }, made] of built) {
    if (made === null) continue;
    drawLegend(figure.querySelector(".legend"), made.traces, made.says);
    plot.style.minHeight = made.least ?? "";
    const layout = {
      ...chartLook(style), ...roomOf(plot), margin: { l: 50, r: 12, t: 10, b: 44 }, showlegend: false, ...made.layout,
    };
    Plotly.react(plot, made.traces, layout, CHART_CONFIG);
    if (!plot.wired) {
      plot.on("plotly_click", (event) => onPoint(id, event.points[0].customdata));
      plot.wired = true;
    }
    document.getElementById(`${id}-said`).replaceChildren(...breakable(made.said));
  }
}

// Rows of equally many charts: a last one would stand alone beside a hole.
function placeCharts() {
  const shown = charts.filter(({ figure }) => !figure.hidden).length || 1;
  const room = Math.max(1, Math.floor($("#charts").clientWidth / CHART_WIDTH));
  $("#charts").style.setProperty("--abreast", Math.ceil(shown / Math.ceil(shown / room)));
}

// Plotly's own legend takes as much room as the chart where names are many
function drawLegend(list, traces, says = {}) {
  let next = 0;
  const entries = traces.flatMap((trace) => {
    const color = trace.line?.color ?? trace.marker?.color ?? PALETTE[next++ % PALETTE.length];
    if (!trace.name || trace.showlegend === false) return [];
    const entry = element("li", { title: says[trace.name] ?? "" }, new DOMParser().parseFromString(trace.name, "text/html").body.textContent);
    entry.style.setProperty("--swatch", color);
    return [entry];
  });
  list.replaceChildren(...(entries.length > 1 ? entries : []));
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  // the button says what it leads to
  $("#theme").textContent = dark ? "Light" : "Dark";
}

function changeTheme(dark) {
  setTheme(dark);
  drawCharts();
}
$("#theme").addEventListener("click", () => changeTheme(document.documentElement.dataset.theme !== "dark"));
const preferred = matchMedia("(prefers-color-scheme: dark)");
preferred.addEventListener("change", (event) => changeTheme(event.matches));
setTheme(preferred.matches);
// on paper, whose width is told to no script, charts are light and of one width
const root = document.documentElement.dataset;
let darkOnScreen = false;
addEventListener("beforeprint", () => {
  darkOnScreen = root.theme === "dark";
  root.paper = "";
  changeTheme(false);
});
addEventListener("afterprint", () => {
  delete root.paper;
  changeTheme(darkOnScreen);
});

// What stands above the charts.
$("h1").textContent = content.title;
for (const [name, value] of content.facts) {
  const pair = element("div");
  pair.append(element("dt", {}, name), element("dd", {}, value));
  $("#facts").append(pair);
}
for (const sentence of content.sentences) $("#sentences").append(element("li", {}, sentence));

// The page's charts and its table follow its width from now on; it says that it is ready.
function beginPage() {
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    // cards change the height alone
    if (Math.round(contentRect.width) === width) return;
    width = Math.round(contentRect.width);
    placeCharts();
    fitTable($("#table .scroll"));
  }).observe($("#table"));
  document.documentElement.dataset.ready = "true";
}
