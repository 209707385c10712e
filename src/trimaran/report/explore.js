// Explore's page follows the system's light or dark, and its table the window.
const preferred = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => { document.documentElement.dataset.theme = preferred.matches ? "dark" : "light"; };
setTheme();
preferred.addEventListener("change", () => {
  setTheme();
  const chart = document.querySelector("#parts .js-plotly-plot"), line = cssColor("--line");
  if (chart) Plotly.relayout(chart, { "font.color": cssColor("--ink"), "xaxis.gridcolor": line, "yaxis.gridcolor": line });
});
function fitAnswer() {
  const frame = document.querySelector("#answer .scroll");
  if (frame) fitTable(frame);
}
// Plotly's own legend takes as much room as the chart in a narrow window.
function drawLegend(parts) {
  document.getElementById("parts").style.height = `${parts.layout.height ?? 60}px`;
  document.getElementById("legend").replaceChildren(...parts.data.map((part) => {
    const entry = document.createElement("li");
    entry.textContent = part.name;
    entry.style.setProperty("--swatch", part.marker.color);
    return entry;
  }));
}
addEventListener("resize", fitAnswer);
