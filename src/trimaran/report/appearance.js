// A table that its frame has no room for becomes a list of cards: no cell is cut, and nothing has to be scrolled aside.
function fitTable(frame) {
  const table = frame.querySelector("table");
  if (!table) return;
  table.classList.remove("cards");
  table.classList.toggle("cards", frame.scrollWidth > frame.clientWidth);
}
// What a chart has of its own on any page: its colours, and no toolbar, which would lie over the first bar.
const CHART_CONFIG = { displaylogo: false, displayModeBar: false };
function chartLook(style) {
  const grid = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: PALETTE, hovermode: "closest",
    font: { color: style("--ink"), family: "system-ui, sans-serif", size: 12 }, hoverlabel: { font: { family: "system-ui, sans-serif" } },
    xaxis: grid, yaxis: grid,
  };
}
const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
