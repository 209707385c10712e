// The page's start: what is said first, the heads of columns, and what a reader's hand does.
const SAID = [["fastest", "Fastest"], ["sure", "How sure"], ["next", "Next"]];
const ANSWERS = 3; // of more works at once each is answered in a line
function answered(kind, text) {
  const said = element("dd", { class: kind });
  for (const [place, part] of String(text).split("`").entries()) said.append(...(place % 2 ? [element("code", {}, part)] : breakable(part)));
  return said;
}
function drawAnswers() {
  const work = $("#work").value, answers = content.answers.filter((one) => !work || one.work === work);
  const brief = answers.length > ANSWERS ? SAID.slice(0, 1) : SAID;
  $("#answers").replaceChildren(...answers.flatMap((answer) => {
    const said = element("dl");
    for (const [key, title] of brief) said.append(element("dt", {}, title), answered(brief === SAID ? key : "", answer[key]));
    const where = [new Set(answers.map((one) => one.source)).size > 1 ? answer.source : "", works.size > 1 ? answer.work : ""];
    const head = where.filter(Boolean).join(", ");
    return head ? [element("h2", {}, head), said] : [said];
  }));
}

function follow() {
  drawAnswers();
  refresh();
}

for (const [key, title] of columns) {
  const head = element("th", { scope: "col", class: classOf(key), "data-key": key });
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
$("#work").addEventListener("change", follow);
$("#filters").addEventListener("submit", (event) => event.preventDefault());
$("#filters").addEventListener("reset", () => setTimeout(follow));
$("#before").addEventListener("click", () => turn(-1));
$("#after").addEventListener("click", () => turn(1));
follow();
beginPage();
