// The page's rows, and how each of their columns is read.
const { choices, ...told } = content.cases;
const byColumn = Object.entries({ ...told, ...choices });
const cases = told.layout.map((_, id) => {
  const one = { id };
  for (const [key, values] of byColumn) one[key] = values[id];
  return one;
});
const PAGE = 100; // rows of the table that are drawn at once
const DRAWN = 2000; // points a chart draws at most: more cannot be told apart on a screen
const BARS = 12;

// key, title, how a person reads it, word that filters use
const COLUMNS = [
  ["layout", "Layout", null, "layout"],
  // what decides comes first: it is seen whatever else there is
  ["sec_per_it", "Sec/it", significant(4), "sec"], ["mem_gib", "Mem, GiB", fixed(2), "mem"],
  ["tflops", "TFLOPs", significant(3), "tflops"], ["mfu", "MFU", (x) => `${(x * 100).toFixed(1)}%`, "mfu"],
  ["status", "Status", null, "status"],
  ["predicted_sec_per_it", "Sec/it predicted", significant(4), "predicted_sec"],
  ["predicted_mem_gib", "Mem predicted, GiB", fixed(2), "predicted_mem"],
  ["source", "Source", null, "source"], ["work", "Work", null, "work"],
  ["nodes", "Nodes", null, "nodes"], ["devices", "Devices", null, "devices"],
  ...content.columns.map(([key, title, word]) => [key, title, null, word]), ["variant", "Variant", null, "variant"],
  ["notes", "Notes", null, "notes"],
];
const differs = (key) => cases.some((one) => one[key] !== cases[0][key]);
const present = (key) => cases.some((one) => one[key] !== null && one[key] !== "");
// what is the same in every row says nothing in a table
const dull = new Set(["source", "work", "status", "variant", "nodes"]);
for (const [key, , , isDull] of content.columns) if (isDull) dull.add(key);
const columns = COLUMNS.filter(([key]) => present(key) && (!dull.has(key) || differs(key)));
const numbers = new Set(COLUMNS.map(([key]) => key).filter((key) => cases.some((one) => typeof one[key] === "number")));
const isNumber = (key) => numbers.has(key);
// sentences may take more than a line
const sentences = new Set(["notes", "work", "variant"]);

const state = { sort: "sec_per_it", down: false, from: 0, chosen: null, view: cases };

