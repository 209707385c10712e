// Explore's page follows the system's light or dark, and its table the window.
const preferred = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => { document.documentElement.dataset.theme = preferred.matches ? "dark" : "light"; };
setTheme();
preferred.addEventListener("change", () => location.reload());
function fitAnswer() {
  const frame = document.querySelector("#answer .scroll");
  if (frame) fitTable(frame);
}
addEventListener("resize", fitAnswer);
