// The table: one page of the rows that match the filter, in the order of a column.
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
const KEYS = Object.fromEntries(COLUMNS.map(([key, , , word]) => [word, key]));
// A share is read as the table shows it: 35 and 35% are 0.35, and so is a number below 1.
const numberFor = (key, text) => {
  const number = Number(text.replace(/%$/, "")), isShare = key === "mfu";
  if (!isShare && text.endsWith("%")) return NaN;
  return isShare && (number >= 1 || text.endsWith("%")) ? number / 100 : number;
};
// Why conditions that leave no row do: a column that there is not, or what is no number. Others' words may hold a sign too.
function unread(text) {
  const found = text.toLowerCase().split(/\s+/).map((word) => word.match(CONDITION)).filter(Boolean);
  const strange = found.find(([, word]) => !KEYS[word]);
  if (strange) return `; ${strange[1]} is no column: they are ${columns.map(([, , , word]) => word).join(", ")}`;
  const wordy = found.find(([, word, , wanted]) => isNumber(KEYS[word]) && Number.isNaN(numberFor(KEYS[word], wanted)));
  return wordy ? `; ${wordy[3]} is no number` : "";
}
function matcher(text) {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const found = word.match(CONDITION);
    if (found && KEYS[found[1]]) {
      const key = KEYS[found[1]], wanted = found[3];
      return (one) => {
        const value = one[key];
        if (value === null) return false;
        if (typeof value === "number") return TESTS[found[2]](value, numberFor(key, wanted));
        return TESTS[found[2]](String(value).toLowerCase(), wanted);
      };
    }
    return (one) => (one.text ??= COLUMNS.map(([key]) => one[key] ?? "").join(" ").toLowerCase()).includes(word);
  });
  return (one) => tests.every((test) => test(one));
}

function refresh() {
  const matches = matcher($("#filter").value), status = $("#status").value, work = $("#work").value;
  state.view = cases.filter((one) => (!status || one.status === status) && (!work || one.work === work) && matches(one)).sort(compare);
  state.works = new Set(state.view.map((one) => one.work)).size;
  state.sameBatch = new Set(state.view.map((one) => one.gbs)).size === 1;
  state.from = 0;
  drawTable();
  drawCharts();
}

const classOf = (key) => (key === "layout" ? "left layout" : sentences.has(key) ? "left text" : isNumber(key) ? "" : "left");

function drawTable() {
  const body = document.createDocumentFragment();
  for (const one of state.view.slice(state.from, state.from + PAGE)) {
    const row = element("tr", one === state.chosen ? { "aria-current": "true" } : {});
    for (const [key, title, read] of columns) {
      const value = one[key];
      const cell = element(key === "layout" ? "th" : "td", { "data-title": title, class: classOf(key) });
      if (key === "layout") {
        cell.scope = "row";
        const button = element("button", { type: "button", "data-id": one.id });
        button.append(...breakable(value));
        cell.append(button);
      } else if (value !== null) cell.textContent = read && typeof value === "number" ? read(value) : value;
      row.append(cell);
    }
    body.append(row);
  }
  $("tbody").replaceChildren(body);
  const many = state.view.length;
  $("#count").textContent = `${many.toLocaleString("en")} of ${cases.length.toLocaleString("en")} layout${cases.length === 1 ? "" : "s"}` +
    (many ? "" : unread($("#filter").value)) +
    (many > PAGE ? `, rows ${(state.from + 1).toLocaleString("en")} to ${Math.min(state.from + PAGE, many).toLocaleString("en")} shown` : "");
  $("#pager").hidden = many <= PAGE;
  $("#before").disabled = state.from === 0;
  $("#after").disabled = state.from + PAGE >= many;
  for (const head of document.querySelectorAll("thead th")) {
    const sorted = head.dataset.key === state.sort;
    head.setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
  }
  fitTable($("#table .scroll"));
}

function turn(pages) {
  state.from += pages * PAGE;
  drawTable();
  $("#table").scrollIntoView();
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

