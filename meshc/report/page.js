"use strict";
// Filters the rows of parameters and values by the box (`report.html?find=mlp` fills it), and folds modules. Without scripts all is shown.
const box = document.getElementById("find");
const told = document.getElementById("found");
const tables = [...document.querySelectorAll("tbody")].map((body) =>
  [...body.querySelectorAll("tr[data-find]")].map((row) => ({
    row, text: row.dataset.find, depth: Number(row.dataset.depth ?? 0), closed: false,
  }))
).filter((rows) => rows.length);

function show() {
  const words = box.value.trim().toLowerCase();
  const anyLayer = words.replace(/(^|\.)\d+(?=\.|$)/, "$1*"); // equal layers stand under a star
  let hits = 0;
  for (const rows of tables) {
    const above = []; // the rows in which this one lies
    for (const one of rows) {
      while (above.length && above[above.length - 1].depth >= one.depth) above.pop();
      const hit = one.text.includes(words) || one.text.includes(anyLayer);
      hits += hit;
      one.row.hidden = words ? !hit : above.some((other) => other.closed);
      if (words && hit) for (const other of above) other.row.hidden = false;
      above.push(one);
    }
  }
  told.textContent = words ? `${hits} found` : "";
  if (words) document.getElementById("all-values").open = true;
}

for (const rows of tables) {
  for (const one of rows) {
    const button = one.row.querySelector("button");
    button?.addEventListener("click", () => {
      one.closed = !one.closed;
      button.setAttribute("aria-expanded", String(!one.closed));
      box.value = new URLSearchParams(location.search).get("find") ?? "";
show();
    });
  }
}
box.addEventListener("input", show);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== box) {
    event.preventDefault();
    box.focus();
  }
});
box.value = new URLSearchParams(location.search).get("find") ?? "";
show();
